#pragma once
// Vectors of 16 floats: AVX-512 F, BW, VL, DQ and VNNI. See simd_scalar.h for what each function means.
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header starts from registers it leaves undefined on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif

namespace hearth::cpu {
namespace {

using F = __m512;
constexpr int kW = 16;
constexpr int kMr = 14;         // gemm_tile: 14 x 2 vectors of accumulators, of 32 registers
constexpr int kTileRows = 4;    // rows at once in products with several tokens
constexpr int kDotTokens = 64;  // Kernels::dot_tokens

#define HEARTH_SIMD_MEMBER inline __attribute__((always_inline))
#define HEARTH_SIMD static HEARTH_SIMD_MEMBER
#define HEARTH_LARGE_MEMBER HEARTH_SIMD_MEMBER

HEARTH_SIMD __mmask16 first(int n) {
  return static_cast<__mmask16>((1u << n) - 1u);
}
HEARTH_SIMD F zero() {
  return _mm512_setzero_ps();
}
HEARTH_SIMD F set1(float x) {
  return _mm512_set1_ps(x);
}
HEARTH_SIMD F load(const float* p) {
  return _mm512_loadu_ps(p);
}
HEARTH_SIMD F load_n(const float* p, int n) {
  return _mm512_maskz_loadu_ps(first(n), p);
}
HEARTH_SIMD void store(float* p, F x) {
  _mm512_storeu_ps(p, x);
}
HEARTH_SIMD void store_n(float* p, F x, int n) {
  _mm512_mask_storeu_ps(p, first(n), x);
}
HEARTH_SIMD F load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HEARTH_SIMD F load_f16_n(const uint16_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
HEARTH_SIMD F widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
HEARTH_SIMD F load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HEARTH_SIMD F load_bf16_n(const uint16_t* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p));
}
HEARTH_SIMD void store_f16_n(uint16_t* p, F x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HEARTH_SIMD F keep(F a) {
  asm("" : "+v"(a));
  return a;
}
HEARTH_SIMD F add(F a, F b) {
  return _mm512_add_ps(a, b);
}
HEARTH_SIMD F sub(F a, F b) {
  return _mm512_sub_ps(a, b);
}
HEARTH_SIMD F mul(F a, F b) {
  return _mm512_mul_ps(a, b);
}
HEARTH_SIMD F div(F a, F b) {
  return _mm512_div_ps(a, b);
}
HEARTH_SIMD F fma(F a, F b, F c) {
  return _mm512_fmadd_ps(a, b, c);
}
HEARTH_SIMD F max(F a, F b) {
  return _mm512_max_ps(a, b);
}
HEARTH_SIMD F min(F a, F b) {
  return _mm512_min_ps(a, b);
}
HEARTH_SIMD F abs(F a) {
  return _mm512_abs_ps(a);
}
HEARTH_SIMD F if_greater(F a, F b, F yes, F no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
}
HEARTH_SIMD F round(F a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
HEARTH_SIMD F exp2_int(F n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
HEARTH_SIMD float sum(F a) {
  return _mm512_reduce_add_ps(a);
}
HEARTH_SIMD float largest(F a) {
  return _mm512_reduce_max_ps(a);
}
HEARTH_SIMD float from_f16(uint16_t h) {
  return _cvtsh_ss(h);
}
HEARTH_SIMD uint64_t xor_all(const void* p) {
  const auto* v = static_cast<const __m512i*>(p);
  const __m512i a = _mm512_xor_si512(_mm512_load_si512(v), _mm512_load_si512(v + 1));
  const __m512i b = _mm512_xor_si512(_mm512_load_si512(v + 2), _mm512_load_si512(v + 3));
  return static_cast<uint64_t>(_mm256_extract_epi64(_mm512_castsi512_si256(_mm512_xor_si512(a, b)), 0));
}

// The 32 weights of a block as floats, unscaled.
HEARTH_SIMD void widen_q8_0(const uint8_t* q, F out[2]) {
  const auto* v = reinterpret_cast<const __m128i*>(q);
  out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v)));
  out[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v + 1)));
}
HEARTH_SIMD void widen_q4_0(const uint8_t* q, F out[2]) {
  // The permutation looks at the low four bits of each lane only: it masks, subtracts 8 and converts in one.
  const F table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  out[0] = _mm512_permutexvar_ps(bytes, table);
  out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
}

HEARTH_SIMD uint32_t largest_magnitude(const float* x) {
  const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + kW), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}
HEARTH_SIMD int32_t sum_i32(__m256i a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
HEARTH_SIMD int32_t store_q8(const F v[2], int8_t* q, int32_t* offset) {
  const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v[0]));
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v[1])), low);
  const __m256i eights = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(8), bytes);
  const __m256i offsets = _mm256_sub_epi32(_mm256_setzero_si256(), eights);
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
// Two blocks at a time, in the halves of a register; an odd one is paired with zeros.
constexpr int kSpan = 2;
using SpanScales = __m256;
HEARTH_SIMD SpanScales load_scales(const uint8_t* const* rows, int bytes, int span) {
  const auto four = [=](int at) __attribute__((always_inline)) {
    uint64_t halves = 0;
    for (int r = 3; r >= 0; --r) {
      uint16_t h;
      __builtin_memcpy(&h, rows[r] + at, sizeof h);
      halves = halves << 16 | h;
    }
    return static_cast<int64_t>(halves);
  };
  return _mm256_cvtph_ps(_mm_set_epi64x(span == kSpan ? four(bytes) : 0, four(0)));
}
struct SpanInput {
  __m512i x, start;  // `start`: less what the unsigned form of the weights has too much
};
HEARTH_SIMD __mmask16 lanes_of(int span) {
  return span == kSpan ? 0xFFFF : 0x00FF;
}
struct SpanQ8 {
  __m512i w;  // w + 128, unsigned
};
HEARTH_SIMD SpanQ8 load_q8_0(const uint8_t* first, const uint8_t* second) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  const __m512i both = _mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
  return {_mm512_xor_si512(both, _mm512_set1_epi8(-128))};
}
HEARTH_SIMD SpanInput load_input(SpanQ8, const int8_t* x, const int32_t* offset, int span) {
  const __mmask16 lanes = lanes_of(span);
  return {_mm512_maskz_loadu_epi32(lanes, x), _mm512_slli_epi32(_mm512_maskz_loadu_epi32(lanes, offset), 4)};
}
struct SpanQ4 {
  __m512i w;  // w + 8, unsigned
};
HEARTH_SIMD SpanQ4 load_q4_0(const uint8_t* first, const uint8_t* second) {
  const __m512i low = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)));
  const __m512i both =
      _mm512_mask_broadcast_i32x4(low, 0xFF00, _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)));
  const __m512i shifted = _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
  return {_mm512_and_si512(shifted, _mm512_set1_epi8(15))};
}
HEARTH_SIMD SpanInput load_input(SpanQ4, const int8_t* x, const int32_t* offset, int span) {
  const __mmask16 lanes = lanes_of(span);
  return {_mm512_maskz_loadu_epi32(lanes, x), _mm512_maskz_loadu_epi32(lanes, offset)};
}
// The sums of four rows' partial sums: of the first block in the lower half, of the second in the upper.
HEARTH_SIMD __m256i sums_of_four(const __m512i* p) {
  const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
  const __m512i low = add(_mm512_unpacklo_epi32(p[0], p[1]), _mm512_unpackhi_epi32(p[0], p[1]));
  const __m512i high = add(_mm512_unpacklo_epi32(p[2], p[3]), _mm512_unpackhi_epi32(p[2], p[3]));
  const __m512i rows = add(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  // Each quarter has partial sums of the four rows, each half those of a block.
  const __m512i sums = add(rows, _mm512_shuffle_i32x4(rows, rows, 0xB1));
  return _mm512_castsi512_si256(_mm512_shuffle_i32x4(sums, sums, 0xD8));
}
// -kOffset times sums of which `eights` has -8 times.
template <int kOffset>
HEARTH_SIMD __m512i less_offset(__m512i eights) {
  static_assert(kOffset == 4 || kOffset == 16 || kOffset == 32 || kOffset == 128);
  if constexpr (kOffset == 4) {
    return _mm512_srai_epi32(eights, 1);
  } else {
    return _mm512_slli_epi32(eights, kOffset == 16 ? 1 : kOffset == 32 ? 2 : 4);
  }
}
template <typename Span>
HEARTH_SIMD Four add_products(const Span* w, SpanInput x, SpanScales scales, const float* d, int span, Four acc) {
  __m512i p[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) p[r] = _mm512_dpbusd_epi32(x.start, w[r].w, x.x);
  const __m256 products = _mm256_cvtepi32_ps(sums_of_four(p));
  const auto block = [=](int i) __attribute__((always_inline)) {
    return i == 0 ? _mm256_castps256_ps128(products) : _mm256_extractf128_ps(products, 1);
  };
  const Four first = _mm_mul_ps(_mm256_castps256_ps128(scales), _mm_set1_ps(d[0]));
  acc = _mm_fmadd_ps(block(0), first, acc);
  if (span < kSpan) return acc;
  const Four second = _mm_mul_ps(_mm256_extractf128_ps(scales, 1), _mm_set1_ps(d[1]));
  return _mm_fmadd_ps(block(1), second, acc);
}

// Rows become columns: r[i][j] <-> r[j][i].
HEARTH_SIMD void transpose(F r[kW]) {
  F t[kW];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i + 0] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  // Now lane l of r[4 g + c] holds column 4 l + c of rows 4 g .. 4 g + 3: a 4 x 4 transpose of 128-bit lanes is left.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const F a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x44), b = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xEE);
    const F d = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x44), e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xEE);
    t[c] = _mm512_shuffle_f32x4(a, d, 0x88);
    t[4 + c] = _mm512_shuffle_f32x4(a, d, 0xDD);
    t[8 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
    t[12 + c] = _mm512_shuffle_f32x4(b, e, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// --- the formats of body_formats.h ---
#include "cpu/simd_x86.h"
HEARTH_SIMD Bytes32 load_bits(const uint8_t* p) {
  uint32_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<Bytes32>(_mm256_maskz_set1_epi8(bits, 1));
}
template <int kOffset>
HEARTH_SIMD void widen_bytes(Bytes32 v, F out[2]) {
  const auto q = reinterpret_cast<__m256i>(v);
  const auto wide = [](__m128i x) __attribute__((always_inline)) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepu8_epi32(x), _mm512_set1_epi32(kOffset)));
  };
  out[0] = wide(_mm256_castsi256_si128(q)), out[1] = wide(_mm256_extracti128_si256(q, 1));
}

HEARTH_SIMD void times_bytes(const uint32_t* words, float factor, float* out) {
  store(out, mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_of(words))), set1(factor)));
}
using Chunk = __m512i;
HEARTH_SIMD Chunk chunk_of(Bytes32 first, Bytes32 second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(reinterpret_cast<__m256i>(first)), reinterpret_cast<__m256i>(second),
                            1);
}
using Lanes = __m512i;  // of four columns each
template <int kGroups>
HEARTH_SIMD Lanes scale_lanes(uint32_t scales) {
  const __m128i order = kGroups == 2 ? _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
                                     : _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  return _mm512_cvtepi8_epi32(_mm_shuffle_epi8(_mm_cvtsi32_si128(static_cast<int>(scales)), order));
}
using ChunkInput = SpanInput;
template <int kOffset>
HEARTH_SIMD ChunkInput chunk_input(const int8_t* x, const int32_t* offset, int span) {
  const __mmask16 lanes = lanes_of(span);
  const __m512i q = _mm512_maskz_loadu_epi32(lanes, x);
  if constexpr (kOffset == 0) {
    return {q, _mm512_setzero_si512()};
  } else {
    return {q, less_offset<kOffset>(_mm512_maskz_loadu_epi32(lanes, offset))};
  }
}
template <int kOffset, int kGroups>
HEARTH_SIMD void chunk_sums(const Chunk* w, ChunkInput x, const Lanes* scales, Four* sums) {
  __m512i p[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    p[r] = _mm512_dpbusd_epi32(x.start, w[r], x.x);
    if constexpr (kGroups > 0) p[r] = _mm512_mullo_epi32(p[r], scales[r]);
  }
  const __m256 products = _mm256_cvtepi32_ps(sums_of_four(p));
  sums[0] = _mm256_castps256_ps128(products);
  sums[1] = _mm256_extractf128_ps(products, 1);
}

}  // namespace
}  // namespace hearth::cpu
