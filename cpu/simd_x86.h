// Operations that simd_avx2.h and simd_avx512.h share for the formats of body_formats.h. Both include this file inside
// their namespace, after Four.
using Bytes32 = uint16_t __attribute__((vector_size(32)));
using Words4 = uint32_t __attribute__((vector_size(16)));
HEARTH_SIMD Bytes32 load_nibbles(const uint8_t* p) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i both = _mm256_set_m128i(_mm_srli_epi16(low, 4), low);
  return reinterpret_cast<Bytes32>(_mm256_and_si256(both, _mm256_set1_epi8(15)));
}
HEARTH_SIMD Bytes32 look_up(Bytes32 index, const uint8_t* table) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<Bytes32>(_mm256_shuffle_epi8(both, reinterpret_cast<__m256i>(index)));
}
HEARTH_SIMD Four mul(Four a, Four b) {
  return _mm_mul_ps(a, b);
}
HEARTH_SIMD Four fma(Four a, Four b, Four c) {
  return _mm_fmadd_ps(a, b, c);
}
HEARTH_SIMD Four four(float a, float b, float c, float d) {
  return _mm_setr_ps(a, b, c, d);
}
HEARTH_SIMD Four set1_four(float x) {
  return _mm_set1_ps(x);
}
HEARTH_SIMD Four to_four(Words4 x) {
  return _mm_cvtepi32_ps(reinterpret_cast<__m128i>(x));
}
// Not as one load: it would have to wait until the words, which were just written, have left for the cache.
HEARTH_SIMD __m128i bytes_of(const uint32_t* words) {
  return _mm_setr_epi32(static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                        static_cast<int>(words[3]));
}
