#pragma once
// Vectors of 4 floats in plain C++, for processors without AVX2; also says what every function of the simd_*.h files
// means.
#include "core/half.h"

// Vectors are passed between inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace hearth::cpu {
namespace {

struct F {
  float v[4];
};
constexpr int kW = 4;          // floats in a vector
constexpr int kMr = 4;         // tokens of gemm_tile
constexpr int kTileRows = 2;   // rows at once in products with several tokens
constexpr int kDotTokens = 8;  // Kernels::dot_tokens

#define HEARTH_SIMD_MEMBER inline __attribute__((always_inline))
#define HEARTH_SIMD static HEARTH_SIMD_MEMBER
// For functions that are worth inlining only where SIMD makes them a few instructions: not here.
#define HEARTH_LARGE_MEMBER __attribute__((noinline))

template <typename Op>
HEARTH_SIMD F each(Op op) {
  F r;
  for (int i = 0; i < kW; ++i) r.v[i] = op(i);
  return r;
}
HEARTH_SIMD F zero() {
  return {};
}
HEARTH_SIMD F set1(float x) {
  return {{x, x, x, x}};
}
HEARTH_SIMD F load(const float* p) {
  return {{p[0], p[1], p[2], p[3]}};
}
// The first n elements, zeros behind them; nothing beyond p[n - 1] is touched. 0 <= n <= kW.
HEARTH_SIMD F load_n(const float* p, int n) {
  return each([=](int i) { return i < n ? p[i] : 0.0f; });
}
HEARTH_SIMD void store(float* p, F x) {
  __builtin_memcpy(p, x.v, sizeof x.v);
}
HEARTH_SIMD void store_n(float* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}
HEARTH_SIMD F load_f16(const uint16_t* p) {
  return each([=](int i) { return hearth::f16_to_f32(p[i]); });
}
HEARTH_SIMD F load_f16_n(const uint16_t* p, int n) {
  return each([=](int i) { return i < n ? hearth::f16_to_f32(p[i]) : 0.0f; });
}
HEARTH_SIMD F load_bf16(const uint16_t* p) {
  return each([=](int i) { return hearth::bf16_to_f32(p[i]); });
}
HEARTH_SIMD F load_bf16_n(const uint16_t* p, int n) {
  return each([=](int i) { return i < n ? hearth::bf16_to_f32(p[i]) : 0.0f; });
}
HEARTH_SIMD void store_f16_n(uint16_t* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = hearth::f32_to_f16(x.v[i]);
}
// x, in a register: compilers read memory once for every use of what they have loaded.
HEARTH_SIMD F keep(F x) {
  return x;
}
HEARTH_SIMD F add(F a, F b) {
  return each([=](int i) { return a.v[i] + b.v[i]; });
}
HEARTH_SIMD F sub(F a, F b) {
  return each([=](int i) { return a.v[i] - b.v[i]; });
}
HEARTH_SIMD F mul(F a, F b) {
  return each([=](int i) { return a.v[i] * b.v[i]; });
}
HEARTH_SIMD F div(F a, F b) {
  return each([=](int i) { return a.v[i] / b.v[i]; });
}
HEARTH_SIMD F fma(F a, F b, F c) {
  return each([=](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
HEARTH_SIMD F max(F a, F b) {
  return each([=](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
HEARTH_SIMD F min(F a, F b) {
  return each([=](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
HEARTH_SIMD F abs(F a) {
  return each([=](int i) { return __builtin_fabsf(a.v[i]); });
}
HEARTH_SIMD F if_greater(F a, F b, F yes, F no) {
  return each([=](int i) { return a.v[i] > b.v[i] ? yes.v[i] : no.v[i]; });
}
// To the nearest integer, ties to even.
HEARTH_SIMD F round(F a) {
  return each([=](int i) { return __builtin_nearbyintf(a.v[i]); });
}
// 2^n for integers n in [-126, 127].
HEARTH_SIMD F exp2_int(F n) {
  return each(
      [=](int i) { return std::bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23); });
}
HEARTH_SIMD float sum(F a) {
  return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
}
HEARTH_SIMD float largest(F a) {
  const float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1], y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
  return x > y ? x : y;
}
HEARTH_SIMD float from_f16(uint16_t h) {
  return hearth::f16_to_f32(h);
}
// Something that depends on 256 aligned bytes.
HEARTH_SIMD uint64_t xor_all(const void* p) {
  const auto* v = static_cast<const uint64_t*>(p);
  uint64_t a = 0;
  for (int i = 0; i < 32; ++i) a ^= v[i];
  return a;
}

// The 32 weights of a block as floats, unscaled.
HEARTH_SIMD void widen_q8_0(const uint8_t* q, F out[8]) {
  for (int j = 0; j < 8; ++j)
    out[j] = each([=](int i) { return static_cast<float>(static_cast<int8_t>(q[4 * j + i])); });
}
HEARTH_SIMD void widen_q4_0(const uint8_t* q, F out[8]) {
  for (int j = 0; j < 4; ++j) {
    out[j] = each([=](int i) { return static_cast<float>((q[4 * j + i] & 15) - 8); });
    out[j + 4] = each([=](int i) { return static_cast<float>((q[4 * j + i] >> 4) - 8); });
  }
}

// The bits of the largest |x| of a block.
HEARTH_SIMD uint32_t largest_magnitude(const float* x) {
  uint32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
// A block of integers in [-127, 127] as q and Q8Row::offset; returns Q8Row::total.
HEARTH_SIMD int32_t store_q8(const F v[8], int8_t* q, int32_t* offset) {
  int32_t total = 0;
  for (int j = 0; j < 8; ++j) {
    offset[j] = 0;
    for (int i = 0; i < 4; ++i) {
      q[4 * j + i] = static_cast<int8_t>(static_cast<int32_t>(v[j].v[i]));
      offset[j] -= 8 * q[4 * j + i];
    }
    total += offset[j];
  }
  return total;
}

// Four sums, one for each of four rows.
using Four = F;
HEARTH_SIMD Four zero_four() {
  return zero();
}
HEARTH_SIMD void store_four(float* p, Four x) {
  store(p, x);
}
// kSpan blocks of four quantised rows are multiplied at once. These are their scales; a block has `bytes` bytes.
constexpr int kSpan = 1;
using SpanScales = F;
HEARTH_SIMD SpanScales load_scales(const uint8_t* const* rows, int /*bytes*/, int /*span*/) {
  return each([=](int r) {
    uint16_t h;
    __builtin_memcpy(&h, rows[r], sizeof h);
    return hearth::f16_to_f32(h);
  });
}
struct SpanInput {
  const int8_t* x;
};
// A span of weights: the quants of up to kSpan blocks, `second` being `first` where the span is one block.
struct SpanQ8 {
  const uint8_t* q;
  HEARTH_SIMD_MEMBER int32_t dot(SpanInput x) const {
    int32_t s = 0;
    for (int j = 0; j < 32; ++j) s += static_cast<int8_t>(q[j]) * x.x[j];
    return s;
  }
};
HEARTH_SIMD SpanQ8 load_q8_0(const uint8_t* first, const uint8_t* /*second*/) {
  return {first};
}
// As many blocks of the input, whose form depends on the weights' type.
HEARTH_SIMD SpanInput load_input(SpanQ8, const int8_t* x, const int32_t* /*offset*/, int /*span*/) {
  return {x};
}
struct SpanQ4 {
  const uint8_t* q;
  HEARTH_SIMD_MEMBER int32_t dot(SpanInput x) const {
    int32_t s = 0;
    for (int j = 0; j < 16; ++j) s += ((q[j] & 15) - 8) * x.x[j] + ((q[j] >> 4) - 8) * x.x[j + 16];
    return s;
  }
};
HEARTH_SIMD SpanQ4 load_q4_0(const uint8_t* first, const uint8_t* /*second*/) {
  return {first};
}
HEARTH_SIMD SpanInput load_input(SpanQ4, const int8_t* x, const int32_t* /*offset*/, int /*span*/) {
  return {x};
}
// acc[r] + (w[r] x) scales[r] d, block after block. A block's integer sum is exact.
template <typename Span>
HEARTH_SIMD Four add_products(const Span* w, SpanInput x, SpanScales scales, const float* d, int /*span*/, Four acc) {
  return each([&](int r) { return static_cast<float>(w[r].dot(x)) * (scales.v[r] * d[0]) + acc.v[r]; });
}

// Rows become columns.
HEARTH_SIMD void transpose(F r[kW]) {
  for (int i = 0; i < kW; ++i) {
    for (int j = i + 1; j < kW; ++j) {
      const float x = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = x;
    }
  }
}

// --- the formats of body_formats.h ---
// 32 bytes, one for each column of a block.
using Bytes32 = uint16_t __attribute__((vector_size(32)));
using Words4 = uint32_t __attribute__((vector_size(16)));
HEARTH_SIMD Bytes32 bytes32(const uint8_t* p) {
  Bytes32 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
// Columns 0 to 15 are the low halves of 16 bytes, 16 to 31 the high ones.
HEARTH_SIMD Bytes32 load_nibbles(const uint8_t* p) {
  uint8_t q[32];
  for (int i = 0; i < 16; ++i) q[i] = p[i] & 15, q[i + 16] = p[i] >> 4;
  return bytes32(q);
}
// Column c is bit c of four bytes.
HEARTH_SIMD Bytes32 load_bits(const uint8_t* p) {
  uint8_t q[32];
  for (int i = 0; i < 32; ++i) q[i] = (p[i / 8] >> (i % 8)) & 1;
  return bytes32(q);
}
// table[index], index < 16.
HEARTH_SIMD Bytes32 look_up(Bytes32 index, const uint8_t* table) {
  uint8_t q[32];
  __builtin_memcpy(q, &index, sizeof q);
  for (uint8_t& x : q) x = table[x];
  return bytes32(q);
}
// The bytes less kOffset, as floats.
template <int kOffset>
HEARTH_SIMD void widen_bytes(Bytes32 v, F* out) {
  uint8_t q[32];
  __builtin_memcpy(q, &v, sizeof q);
  for (int j = 0; j < 8; ++j) out[j] = each([&](int i) { return static_cast<float>(q[4 * j + i] - kOffset); });
}
// out[i] = factor * signed byte i of the words, i < 16.
HEARTH_SIMD void times_bytes(const uint32_t* words, float factor, float* out) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(static_cast<int8_t>(words[i / 4] >> (8 * (i % 4)))) * factor;
}
HEARTH_SIMD Four four(float a, float b, float c, float d) {
  return {{a, b, c, d}};
}
HEARTH_SIMD Four set1_four(float x) {
  return set1(x);
}
HEARTH_SIMD Four to_four(Words4 x) {
  return each([&](int i) { return static_cast<float>(static_cast<int32_t>(x[i])); });
}
// The quants of a span of blocks of one row; the scales of their groups, from the lowest byte of a word on; the input.
struct Chunk {
  Bytes32 q;
};
HEARTH_SIMD Chunk chunk_of(Bytes32 first, Bytes32 /*second*/) {
  return {first};
}
using Lanes = uint32_t;
template <int kGroups>
HEARTH_SIMD Lanes scale_lanes(uint32_t scales) {
  return scales;
}
using ChunkInput = const int8_t*;
template <int kOffset>
HEARTH_SIMD ChunkInput chunk_input(const int8_t* x, const int32_t* /*offset*/, int /*span*/) {
  return x;
}
// sums[i] is, for each of four rows, the sum over the groups of block i of scale * sum (q - kOffset) x, exact.
template <int kOffset, int kGroups>
__attribute__((noinline)) void chunk_sums(const Chunk* w, ChunkInput x, const Lanes* scales, Four* sums) {
  sums[0] = each([&](int r) {
    uint8_t q[32];
    __builtin_memcpy(q, &w[r].q, sizeof q);
    int32_t groups[2] = {};
    for (int i = 0; i < 32; ++i) groups[i / 16] += (q[i] - kOffset) * x[i];
    const auto scale = [&](int g) { return kGroups == 0 ? 1 : static_cast<int8_t>(scales[r] >> (8 * g)); };
    return static_cast<float>(groups[0] * scale(0) + groups[1] * scale(kGroups == 2 ? 1 : 0));
  });
}

}  // namespace
}  // namespace hearth::cpu
