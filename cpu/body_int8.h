// Quantised matrix products in integers (VNNI). Part of kernels_avx512.cpp.
//
// A panel holds kNr rows, block by block: 32 scales, then the weights as unsigned bytes [8][kNr][4], so that one
// instruction multiplies four consecutive columns of 16 rows with four activations. The unsigned form is w + 128 (q8_0)
// or w + 8 (q4_0); the products start from what that adds, which the activations bring along (Q8Row::total).

struct Int8Block {
  float scale[kNr];
  uint8_t w[8][kNr][4];
};
constexpr int kInt8TileTokens = 6;  // 6 x 2 accumulators in integers and as many in floats

size_t int8_panel_bytes(int64_t cols) {
  return static_cast<size_t>(n_blocks(cols)) * sizeof(Int8Block);
}

HEARTH_SIMD __m256i unsigned_bytes(WeightQ8_0, const uint8_t* block) {
  return _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 2)), _mm256_set1_epi8(-128));
}
HEARTH_SIMD __m256i unsigned_bytes(WeightQ4_0, const uint8_t* block) {
  return load_q4_0(block + 2).w;
}

template <typename W>
void int8_pack_rows(const void* w, size_t row_bytes, int64_t r0, int n_rows, int64_t cols, void* panel) {
  auto* out = static_cast<Int8Block*>(panel);
  const int64_t blocks = n_blocks(cols);
  for (int half = 0; half < kNr; half += kW) {
    for (int64_t b = 0; b < blocks; b += 2) {  // two blocks are 16 groups of four columns: a square to transpose
      const bool pair = b + 1 < blocks;
      F rows[kW];
      for (int i = 0; i < kW; ++i) {
        __m256i first = _mm256_setzero_si256(), second = first;
        float d0 = 0.0f, d1 = 0.0f;
        if (half + i < n_rows) {
          const uint8_t* block =
              static_cast<const uint8_t*>(w) + static_cast<size_t>(r0 + half + i) * row_bytes + b * W::kBytes;
          first = unsigned_bytes(W{}, block);
          d0 = W::scale(block);
          if (pair) {
            second = unsigned_bytes(W{}, block + W::kBytes);
            d1 = W::scale(block + W::kBytes);
          }
        }
        rows[i] = _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
        out[b].scale[half + i] = d0;
        if (pair) out[b + 1].scale[half + i] = d1;
      }
      transpose(rows);
      for (int g = 0; g < 8; ++g) {
        _mm512_storeu_ps(out[b].w[g][half], rows[g]);
        if (pair) _mm512_storeu_ps(out[b + 1].w[g][half], rows[8 + g]);
      }
    }
  }
}

// M tokens times the rows of the panel.
template <int M, int Offset>
HEARTH_SIMD void int8_tile(const Int8Block* panel, int64_t blocks, const uint8_t* x, size_t x_stride, float* y,
                           int64_t y_stride, int n, bool add_to_y) {
  F acc[M][2];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) acc[i][0] = acc[i][1] = zero();
  const uint8_t* q = reinterpret_cast<const uint8_t*>(q8_row(x, blocks * kBlock).q);
  for (int64_t b = 0; b < blocks; ++b) {
    const Int8Block& block = panel[b];
    __m512i products[M][2];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const auto* row = reinterpret_cast<const int32_t*>(x + static_cast<size_t>(i) * x_stride);
      products[i][0] = products[i][1] = _mm512_set1_epi32(row[blocks + b] * Offset);
    }
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __m512i w0 = _mm512_loadu_si512(block.w[g][0]), w1 = _mm512_loadu_si512(block.w[g][kW]);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        int32_t four;
        __builtin_memcpy(&four, q + static_cast<size_t>(i) * x_stride + b * kBlock + 4 * g, sizeof four);
        const __m512i xv = _mm512_set1_epi32(four);
        products[i][0] = _mm512_dpbusd_epi32(products[i][0], w0, xv);
        products[i][1] = _mm512_dpbusd_epi32(products[i][1], w1, xv);
      }
    }
    const F s0 = load(block.scale), s1 = load(block.scale + kW);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const F d = set1(reinterpret_cast<const float*>(x + static_cast<size_t>(i) * x_stride)[b]);
      acc[i][0] = fma(_mm512_cvtepi32_ps(products[i][0]), mul(s0, d), acc[i][0]);
      acc[i][1] = fma(_mm512_cvtepi32_ps(products[i][1]), mul(s1, d), acc[i][1]);
    }
  }
  const int n0 = n < kW ? n : kW, n1 = n - n0;
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    float* row = y + i * y_stride;
    store_n(row, add_to_y ? add(load_n(row, n0), acc[i][0]) : acc[i][0], n0);
    if (n1 > 0) store_n(row + kW, add_to_y ? add(load_n(row + kW, n1), acc[i][1]) : acc[i][1], n1);
  }
}

template <int Offset>
void int8_gemm(const void* panel, int64_t cols, const void* x, size_t x_stride, int64_t T, float* y, int64_t y_stride,
               int n, bool add_to_y) {
  const auto* blocks = static_cast<const Int8Block*>(panel);
  const auto tile = [&]<int M>(int64_t t) __attribute__((always_inline)) {
    int8_tile<M, Offset>(blocks, n_blocks(cols), static_cast<const uint8_t*>(x) + static_cast<size_t>(t) * x_stride,
                         x_stride, y + t * y_stride, y_stride, n, add_to_y);
  };
  int64_t t = 0;
  for (; t + kInt8TileTokens <= T; t += kInt8TileTokens) tile.template operator()<kInt8TileTokens>(t);
  for (; t + 2 <= T; t += 2) tile.template operator()<2>(t);
  if (t < T) tile.template operator()<1>(t);
}
