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
constexpr int kRowsSmallT = 4;  // rows at once in products with several tokens
constexpr int kDotTokens = 64;  // Kernels::dot_tokens

#define HEARTH_SIMD_MEMBER inline __attribute__((always_inline))
#define HEARTH_SIMD static HEARTH_SIMD_MEMBER

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
HEARTH_SIMD uint32_t negative(F a) {
  return _mm512_cmp_ps_mask(a, zero(), _CMP_LT_OQ);
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

// Eight partial sums of a block's products, as floats.
using F8 = __m256;
HEARTH_SIMD F8 zero8() {
  return _mm256_setzero_ps();
}
HEARTH_SIMD F8 fma8(F8 a, float b, F8 c) {
  return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c);
}
HEARTH_SIMD float sum8(F8 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
HEARTH_SIMD void scales4(const uint8_t* block, int bytes, const float* d, float* out) {
  uint64_t halves = 0;
  for (int i = 3; i >= 0; --i) {
    uint16_t h;
    __builtin_memcpy(&h, block + i * bytes, sizeof h);
    halves = halves << 16 | h;
  }
  _mm_storeu_ps(out, _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<int64_t>(halves))), _mm_loadu_ps(d)));
}
struct BlockQ8 {
  __m256i magnitude, w;
};
HEARTH_SIMD BlockQ8 load_q8_0(const uint8_t* q) {
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  return {_mm256_abs_epi8(w), w};  // |-128| = 128 as an unsigned byte
}
HEARTH_SIMD F8 dot(BlockQ8 b, const int8_t* x, const int32_t*) {
  const __m256i signed_x = _mm256_sign_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), b.w);
  return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_setzero_si256(), b.magnitude, signed_x));
}
struct BlockQ4 {
  __m256i w;  // w + 8, unsigned
};
HEARTH_SIMD BlockQ4 load_q4_0(const uint8_t* q) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_srli_epi16(low, 4), 1);
  return {_mm256_and_si256(both, _mm256_set1_epi8(15))};
}
HEARTH_SIMD F8 dot(BlockQ4 b, const int8_t* x, const int32_t* offset) {
  return _mm256_cvtepi32_ps(_mm256_dpbusd_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(offset)), b.w,
                                                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
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

}  // namespace
}  // namespace hearth::cpu
