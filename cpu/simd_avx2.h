#pragma once
// Vectors of 8 floats: AVX2, FMA and F16C. See simd_scalar.h for what each function means.
#include <immintrin.h>

namespace hearth::cpu {
namespace {

using F = __m256;
constexpr int kW = 8;
constexpr int kMr = 6;          // gemm_tile: 6 x 2 vectors of accumulators, of 16 registers
constexpr int kTileRows = 2;    // rows at once in products with several tokens
constexpr int kDotTokens = 16;  // Kernels::dot_tokens

#define HEARTH_SIMD_MEMBER inline __attribute__((always_inline))
#define HEARTH_SIMD static HEARTH_SIMD_MEMBER
#define HEARTH_LARGE_MEMBER HEARTH_SIMD_MEMBER

HEARTH_SIMD __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
HEARTH_SIMD F zero() {
  return _mm256_setzero_ps();
}
HEARTH_SIMD F set1(float x) {
  return _mm256_set1_ps(x);
}
HEARTH_SIMD F load(const float* p) {
  return _mm256_loadu_ps(p);
}
HEARTH_SIMD F load_n(const float* p, int n) {
  return _mm256_maskload_ps(p, first(n));
}
HEARTH_SIMD void store(float* p, F x) {
  _mm256_storeu_ps(p, x);
}
HEARTH_SIMD void store_n(float* p, F x, int n) {
  _mm256_maskstore_ps(p, first(n), x);
}
HEARTH_SIMD __m128i load_u16_n(const uint16_t* p, int n) {
  uint16_t lanes[8] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes));
}
HEARTH_SIMD F load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HEARTH_SIMD F load_f16_n(const uint16_t* p, int n) {
  return _mm256_cvtph_ps(load_u16_n(p, n));
}
HEARTH_SIMD F widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
HEARTH_SIMD F load_bf16(const uint16_t* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
HEARTH_SIMD F load_bf16_n(const uint16_t* p, int n) {
  return widen_bf16(load_u16_n(p, n));
}
HEARTH_SIMD void store_f16_n(uint16_t* p, F x, int n) {
  uint16_t lanes[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
HEARTH_SIMD F keep(F a) {
  asm("" : "+x"(a));
  return a;
}
HEARTH_SIMD F add(F a, F b) {
  return _mm256_add_ps(a, b);
}
HEARTH_SIMD F sub(F a, F b) {
  return _mm256_sub_ps(a, b);
}
HEARTH_SIMD F mul(F a, F b) {
  return _mm256_mul_ps(a, b);
}
HEARTH_SIMD F div(F a, F b) {
  return _mm256_div_ps(a, b);
}
HEARTH_SIMD F fma(F a, F b, F c) {
  return _mm256_fmadd_ps(a, b, c);
}
HEARTH_SIMD F max(F a, F b) {
  return _mm256_max_ps(a, b);
}
HEARTH_SIMD F min(F a, F b) {
  return _mm256_min_ps(a, b);
}
HEARTH_SIMD F abs(F a) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
HEARTH_SIMD F if_greater(F a, F b, F yes, F no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
HEARTH_SIMD F round(F a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
HEARTH_SIMD F exp2_int(F n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
HEARTH_SIMD float sum(F a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
HEARTH_SIMD float largest(F a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
HEARTH_SIMD float from_f16(uint16_t h) {
  return _cvtsh_ss(h);
}
HEARTH_SIMD uint64_t xor_all(const void* p) {
  const auto* v = static_cast<const __m256i*>(p);
  __m256i a = _mm256_load_si256(v);
  for (int i = 1; i < 8; ++i) a = _mm256_xor_si256(a, _mm256_load_si256(v + i));
  return static_cast<uint64_t>(_mm256_extract_epi64(a, 0));
}

HEARTH_SIMD F widen_i8(const uint8_t* q) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))));
}
HEARTH_SIMD void widen_q8_0(const uint8_t* q, F out[4]) {
  for (int i = 0; i < 4; ++i) out[i] = widen_i8(q + 8 * i);
}
HEARTH_SIMD void widen_q4_0(const uint8_t* q, F out[4]) {
  const __m256i eight = _mm256_set1_epi32(8), low = _mm256_set1_epi32(15);
  for (int i = 0; i < 2; ++i) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + 8 * i)));
    out[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(bytes, low), eight));
    out[i + 2] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bytes, 4), eight));
  }
}

HEARTH_SIMD uint32_t largest_magnitude(const float* x) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i m = _mm256_setzero_si256();
  for (int i = 0; i < kBlock; i += kW) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    m = _mm256_max_epu32(m, _mm256_and_si256(bits, magnitude));
  }
  __m128i s = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  s = _mm_max_epu32(s, _mm_shuffle_epi32(s, 0x4E));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(s, _mm_shuffle_epi32(s, 0xB1))));
}
HEARTH_SIMD int32_t sum_i32(__m256i a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
HEARTH_SIMD int32_t store_q8(const F v[4], int8_t* q, int32_t* offset) {
  // The lowest byte of each, as a conversion to int8_t takes it, so that nothing saturates.
  const auto byte = [](F a) { return _mm256_and_si256(_mm256_cvtps_epi32(a), _mm256_set1_epi32(255)); };
  const __m256i low = _mm256_packs_epi32(byte(v[0]), byte(v[1])), high = _mm256_packs_epi32(byte(v[2]), byte(v[3]));
  // Packing works on halves of registers: groups of four come as 0 2 4 6 1 3 5 7.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
  const __m256i eights = _mm256_maddubs_epi16(_mm256_set1_epi8(8), bytes);
  const __m256i offsets = _mm256_madd_epi16(eights, _mm256_set1_epi16(-1));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(offset), offsets);
  return sum_i32(offsets);
}

using Four = __m128;
HEARTH_SIMD Four zero_four() {
  return _mm_setzero_ps();
}
HEARTH_SIMD void store_four(float* p, Four x) {
  _mm_storeu_ps(p, x);
}
constexpr int kSpan = 1;
using SpanScales = __m128;
HEARTH_SIMD SpanScales load_scales(const uint8_t* const* rows, int, int) {
  uint64_t halves = 0;
  for (int r = 3; r >= 0; --r) {
    uint16_t h;
    __builtin_memcpy(&h, rows[r], sizeof h);
    halves = halves << 16 | h;
  }
  return _mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(halves)));
}
struct SpanInput {
  __m256i x, start;
};
HEARTH_SIMD __m256i load_i256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
// maddubs adds two products in 16 bits with saturation: |w| <= 128 and |x| <= 127 give at most 2 * 128 * 127 = 32512.
struct SpanQ8 {
  __m256i w;
  HEARTH_SIMD_MEMBER __m256i pairs(SpanInput x) const {  // |-128| = 128 as an unsigned byte
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x.x, w));
  }
};
HEARTH_SIMD SpanQ8 load_q8_0(const uint8_t* q, const uint8_t*) {
  return {load_i256(q)};
}
HEARTH_SIMD SpanInput load_input(SpanQ8, const int8_t* x, const int32_t*, int) {
  return {load_i256(x), _mm256_setzero_si256()};
}
struct SpanQ4 {
  __m256i w;  // w + 8, unsigned
  HEARTH_SIMD_MEMBER __m256i pairs(SpanInput x) const { return _mm256_maddubs_epi16(w, x.x); }
};
HEARTH_SIMD SpanQ4 load_q4_0(const uint8_t* q, const uint8_t*) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_srli_epi16(low, 4), 1);
  return {_mm256_and_si256(both, _mm256_set1_epi8(15))};
}
HEARTH_SIMD SpanInput load_input(SpanQ4, const int8_t* x, const int32_t* offset, int) {
  return {load_i256(x), load_i256(offset)};
}
template <typename Span>
HEARTH_SIMD Four add_products(const Span* w, SpanInput x, SpanScales scales, const float* d, int, Four acc) {
  __m256i p[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    p[r] = _mm256_add_epi32(_mm256_madd_epi16(w[r].pairs(x), _mm256_set1_epi16(1)), x.start);
  }
  const __m256i rows = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
  const __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(rows), _mm256_extracti128_si256(rows, 1));
  return _mm_fmadd_ps(_mm_cvtepi32_ps(sums), _mm_mul_ps(scales, _mm_set1_ps(d[0])), acc);
}

HEARTH_SIMD void transpose(F r[kW]) {
  F t[kW];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i + 0] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

// --- the formats of body_formats.h ---
#include "cpu/simd_x86.h"
HEARTH_SIMD Bytes32 load_bits(const uint8_t* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(bits),
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
  const __m256i bit = _mm256_and_si256(spread, _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u)));
  return reinterpret_cast<Bytes32>(_mm256_min_epu8(bit, _mm256_set1_epi8(1)));
}
template <int kOffset>
HEARTH_SIMD void widen_bytes(Bytes32 v, F out[4]) {
  uint8_t q[32];
  __builtin_memcpy(q, &v, sizeof q);
  for (int i = 0; i < 4; ++i) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + 8 * i)));
    out[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(wide, _mm256_set1_epi32(kOffset)));
  }
}
HEARTH_SIMD void times_bytes(const uint32_t* words, float factor, float* out) {
  const __m128i bytes = bytes_of(words);
  store(out, mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), set1(factor)));
  store(out + kW, mul(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))), set1(factor)));
}
using Chunk = __m256i;
HEARTH_SIMD Chunk chunk_of(Bytes32 first, Bytes32 /*second*/) {
  return reinterpret_cast<__m256i>(first);
}
// The scales of a block's groups: 16 lanes for pairs of columns, 8 lanes for fours.
struct Lanes {
  __m256i pairs, fours;
};
template <int kGroups>
HEARTH_SIMD Lanes scale_lanes(uint32_t scales) {
  const auto first = static_cast<int8_t>(scales), second = static_cast<int8_t>(kGroups == 2 ? scales >> 8 : scales);
  return {_mm256_set_m128i(_mm_set1_epi16(second), _mm_set1_epi16(first)),
          _mm256_set_m128i(_mm_set1_epi32(second), _mm_set1_epi32(first))};
}
using ChunkInput = SpanInput;
// Quants with kOffset = 128 are multiplied as signed bytes: two products of unsigned ones would not fit 16 bits.
template <int kOffset>
HEARTH_SIMD ChunkInput chunk_input(const int8_t* x, const int32_t* offset, int /*span*/) {
  const __m256i eights = load_i256(offset);  // -8 times the sums
  if constexpr (kOffset == 0 || kOffset == 128) {
    return {load_i256(x), _mm256_setzero_si256()};
  } else if constexpr (kOffset == 4) {
    return {load_i256(x), _mm256_srai_epi32(eights, 1)};
  } else {
    return {load_i256(x), _mm256_slli_epi32(eights, kOffset == 16 ? 1 : 2)};
  }
}
template <int kOffset, int kGroups>
HEARTH_SIMD void chunk_sums(const Chunk* w, ChunkInput x, const Lanes* scales, Four* sums) {
  static_assert(kOffset == 0 || kOffset == 4 || kOffset == 16 || kOffset == 32 || kOffset == 128);
  __m256i p[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    __m256i pairs;
    if constexpr (kOffset == 128) {
      const __m256i q = _mm256_xor_si256(w[r], _mm256_set1_epi8(-128));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x.x, q));
    } else {
      pairs = _mm256_maddubs_epi16(w[r], x.x);
    }
    if constexpr (kGroups == 0) {
      p[r] = _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), x.start);
    } else {
      p[r] = _mm256_madd_epi16(pairs, scales[r].pairs);
      if constexpr (kOffset != 0 && kOffset != 128)
        p[r] = _mm256_add_epi32(p[r], _mm256_mullo_epi32(x.start, scales[r].fours));
    }
  }
  const __m256i rows = _mm256_hadd_epi32(_mm256_hadd_epi32(p[0], p[1]), _mm256_hadd_epi32(p[2], p[3]));
  sums[0] = _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(rows), _mm256_extracti128_si256(rows, 1)));
}

}  // namespace
}  // namespace hearth::cpu
