// Dot products of rows of super-blocks, four blocks of four rows at a time. Part of kernels_avx512.cpp, between
// body_formats_rows.h and body_dot.h.
//
// Integers are added up to one sum for each group of columns and row first and then multiplied with scales, 16 of them
// in a register: one instruction where scales in the lanes of products take one for each row. Sums of a block are exact,
// so that the bits are those of the other dot_tile().
template <typename W>
concept SuperBlocks = Formats<W> && (W::kBlocks > 1);

// [i][j], i and j < 4, are quarter i and lane j of a register.
HEARTH_SIMD __m512i to_quarters(__m128i four) {  // [i][j] = four[i]
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                  _mm512_castsi128_si512(four));
}
HEARTH_SIMD __m512i bytes_by_row(Words4 words) {  // [i][j] = signed byte i of word j
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_cvtepi8_epi32(_mm_shuffle_epi8(reinterpret_cast<__m128i>(words), order));
}
// [i][j] = sum of quarter i of p[j].
HEARTH_SIMD __m512i sums_of_quarters(const __m512i* p) {
  const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(p[0], p[1]), _mm512_unpackhi_epi32(p[0], p[1]));
  const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(p[2], p[3]), _mm512_unpackhi_epi32(p[2], p[3]));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}
// Quarters 0 and 1, and 2 and 3, of both added up.
HEARTH_SIMD __m512i sums_of_pairs(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
}
template <int i>
HEARTH_SIMD Four quarter(F x) {
  return _mm512_extractf32x4_ps(x, i);
}

template <SuperBlocks W, int R, int T, bool kNear>
HEARTH_SIMD void dot_tile(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                          size_t x_stride, float* y, int64_t y_stride) {
  static_assert(R == 4 && W::kBlocks % 4 == 0 && (W::kGroups == 1 || W::kGroups == 2));
  constexpr int kWords = W::kGroups;  // of four groups each, in four blocks
  Four acc[T];
  Q8Row xs[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    xs[t] = q8_row(x + static_cast<size_t>(t) * x_stride, cols);
    acc[t] = zero_four();
  }
  int64_t at = 0;  // block of the row
  for (int64_t s = 0; s < cols / kColumns<W>; ++s) {
    const FourReader four{w, s * W::kBytes};
    const F d = _mm512_broadcast_f32x4(d_of<W>(four));
    F dmin = zero();
    if constexpr (W::kMin) dmin = _mm512_broadcast_f32x4(dmin_of<W>(four));
    Words4 scale[4], min[4];
    W::scales(four, scale, min);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (ahead != nullptr) prefetch<kNear>(ahead[r], s * W::kBytes, W::kBytes);
    }
#pragma GCC unroll 2
    for (int b = 0; b < W::kBlocks; b += 4, at += 4) {
      __m512i scales[kWords], minima[kWords];
#pragma GCC unroll 2
      for (int k = 0; k < kWords; ++k) {
        scales[k] = bytes_by_row(scale[b / 4 * kWords + k]);
        if constexpr (W::kMin) minima[k] = bytes_by_row(min[b / 4 * kWords + k]);
      }
      Chunk wv[2][R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const RowReader row{w[r] + s * W::kBytes};
        wv[0][r] = chunk_of(W::quants(row, b), W::quants(row, b + 1));
        wv[1][r] = chunk_of(W::quants(row, b + 2), W::quants(row, b + 3));
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        __m512i sums[2];  // of the groups of two blocks, or of their halves
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const __m512i xv = _mm512_loadu_si512(xs[t].q + kBlock * (at + 2 * h));
          __m512i p[R];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) p[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), wv[h][r], xv);
          sums[h] = sums_of_quarters(p);
        }
        const __m128i total = _mm_loadu_si128(reinterpret_cast<const __m128i*>(xs[t].total + at));
        __m512i eights[kWords], products, less;  // eights: -8 times the sums of x by group
        if constexpr (W::kGroups == 1) {
          eights[0] = to_quarters(total);
          products = sums_of_pairs(sums[0], sums[1]);
          if constexpr (W::kOffset != 0) products = _mm512_add_epi32(products, less_offset<W::kOffset>(eights[0]));
          products = _mm512_mullo_epi32(products, scales[0]);
          if constexpr (W::kMin) less = _mm512_mullo_epi32(eights[0], minima[0]);
        } else {
          const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(xs[t].half + at));
          const __m128i rest = _mm_sub_epi32(total, half);
          eights[0] = to_quarters(_mm_unpacklo_epi32(half, rest));
          eights[1] = to_quarters(_mm_unpackhi_epi32(half, rest));
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            if constexpr (W::kOffset != 0) sums[h] = _mm512_add_epi32(sums[h], less_offset<W::kOffset>(eights[h]));
            sums[h] = _mm512_mullo_epi32(sums[h], scales[h]);
            if constexpr (W::kMin) eights[h] = _mm512_mullo_epi32(eights[h], minima[h]);
          }
          products = sums_of_pairs(sums[0], sums[1]);
          if constexpr (W::kMin) less = sums_of_pairs(eights[0], eights[1]);
        }
        const __m128i four_d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(xs[t].d + at));
        const F dx = _mm512_castsi512_ps(to_quarters(four_d));
        const F f = _mm512_cvtepi32_ps(products), factor = mul(d, dx);
        F m = zero(), m_factor = zero();
        if constexpr (W::kMin) m = _mm512_cvtepi32_ps(less), m_factor = mul(dmin, mul(set1(0.125f), dx));
        const auto add_block = [&]<int i>() __attribute__((always_inline)) {
          acc[t] = fma(quarter<i>(f), quarter<i>(factor), acc[t]);
          if constexpr (W::kMin) acc[t] = fma(quarter<i>(m), quarter<i>(m_factor), acc[t]);
        };
        add_block.template operator()<0>();
        add_block.template operator()<1>();
        add_block.template operator()<2>();
        add_block.template operator()<3>();
      }
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) store_four(y + t * y_stride, acc[t]);
}
