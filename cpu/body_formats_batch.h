// Products of panels of the formats of body_formats.h with more than a few tokens. Part of kernels_avx512.cpp, after
// body_formats_panel.h.
//
// A panel is unpacked once for all tokens, some blocks at a time, so that its bits, scales and minima cost nothing beside
// the products: bytes of quants, and scales and minima as floats. A block of a row and a token then takes 8 dot product
// instructions, and 3 others on the same ports (4 with minima by groups of 16): at most 8/11 of their peak on Zen 4.

constexpr int kUnpackedBlocks = 32;  // at a time: 40 to 48 KiB, in the second-level cache; 1 KiB of each token
template <Formats W>
constexpr int kUnpackedGroups = W::kGroups == 2 ? 2 : 1;  // of a block, each of which has a scale

template <Formats W>
struct alignas(64) UnpackedBlock {
  uint8_t w[8][kPanelRows][4];
  float scale[kUnpackedGroups<W>][kPanelRows];
  float min[W::kMin ? kUnpackedGroups<W> : 0][kPanelRows];  // of weights, divided by 8: to be multiplied with totals
};

// n blocks from the panel's super-block `super` on.
template <Formats W>
HEARTH_SIMD void unpack_panel(const uint8_t* super, int n, UnpackedBlock<W>* out) {
  for (int b0 = 0; b0 < n; b0 += W::kBlocks, super += kPanelRows * W::kBytes) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const PanelScaleReader reader{super, v * kW};
      const F d = d_of<W>(reader);
      F dmin = zero();
      if constexpr (W::kMin) dmin = mul(dmin_of<W>(reader), set1(0.125f));
      Words16 scale[4], min[4];
      if constexpr (W::kGroups > 0) W::scales(reader, scale, min);
#pragma GCC unroll 1
      for (int b = 0; b < W::kBlocks; ++b) {
        UnpackedBlock<W>& to = out[b0 + b];
#pragma GCC unroll 2
        for (int group = 0; group < kUnpackedGroups<W>; ++group) {
          F s = d, m = dmin;
          if constexpr (W::kGroups > 0) {
            const int at = b * W::kGroups + group;
            s = mul(_mm512_cvtepi32_ps(signed_byte(scale[at / 4], at % 4)), d);
            if constexpr (W::kMin) m = mul(_mm512_cvtepi32_ps(signed_byte(min[at / 4], at % 4)), dmin);
          }
          store(to.scale[group] + v * kW, s);
          if constexpr (W::kMin) store(to.min[group] + v * kW, m);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
          const Bytes64 q = W::quants(PanelReader{super + 4 * kW * v, g}, b);
          _mm512_storeu_si512(to.w[g][v * kW], reinterpret_cast<__m512i>(q));
        }
      }
    }
  }
}

// Sums of M tokens over the blocks of a chunk, by group of columns.
template <Formats W, int M>
struct TokenSums {
  static constexpr int kGroups = kUnpackedGroups<W>;
  alignas(64) int32_t start[M][W::kOffset != 0 ? kGroups : 0][kUnpackedBlocks];  // -kOffset times the sum of q
  alignas(64) float total[M][W::kMin ? kGroups : 0][kUnpackedBlocks];            // d times -8 times the sum of q
  // Reads n blocks of token i, from block `at` on. Rows go on behind their last block, so that whole vectors can be read.
  HEARTH_SIMD_MEMBER void read(int i, const Q8Row& x, int64_t at, int n) {
    for (int b = 0; b < n; b += kW) {
      const __m512i all = _mm512_loadu_si512(x.total + at + b), half = _mm512_loadu_si512(x.half + at + b);
      const __m512i of[2] = {kGroups == 1 ? all : half, _mm512_sub_epi32(all, half)};
#pragma GCC unroll 2
      for (int group = 0; group < kGroups; ++group) {
        if constexpr (W::kOffset != 0) _mm512_store_si512(start[i][group] + b, less_offset<W::kOffset>(of[group]));
        if constexpr (W::kMin) store(total[i][group] + b, mul(_mm512_cvtepi32_ps(of[group]), load(x.d + at + b)));
      }
    }
  }
};

// M tokens times n unpacked blocks, which are those from `at` on of their rows.
template <Formats W, int M>
void unpacked_tile(const UnpackedBlock<W>* blocks, int n_blocks, int64_t at, const uint8_t* x, size_t x_stride,
                   int64_t cols, float* y, int64_t y_stride, int n, bool add_to_y) {
  constexpr int kGroups = kUnpackedGroups<W>, kFours = 8 / kGroups;
  TokenSums<W, M> sums;
  F acc[M][2];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    acc[i][0] = acc[i][1] = zero();
    sums.read(i, q8_row(x + static_cast<size_t>(i) * x_stride, cols), at, n_blocks);
  }
  const Q8Row first = q8_row(x, cols);
  const auto* q = reinterpret_cast<const uint8_t*>(first.q + at * kBlock);
  const auto* d = reinterpret_cast<const uint8_t*>(first.d + at);
  for (int b = 0; b < n_blocks; ++b) {
    const UnpackedBlock<W>& block = blocks[b];
    F scaled[M][2];
#pragma GCC unroll 2
    for (int group = 0; group < kGroups; ++group) {
      __m512i products[M][2];
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        __m512i start = _mm512_setzero_si512();
        if constexpr (W::kOffset != 0) start = _mm512_set1_epi32(sums.start[i][group][b]);
        products[i][0] = products[i][1] = start;
      }
#pragma GCC unroll 8
      for (int g = group * kFours; g < (group + 1) * kFours; ++g) {
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
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const F s = load(block.scale[group] + v * kW);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          const F p = _mm512_cvtepi32_ps(products[i][v]);
          scaled[i][v] = group == 0 ? mul(p, s) : fma(p, s, scaled[i][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      float dx;
      __builtin_memcpy(&dx, d + static_cast<size_t>(i) * x_stride + static_cast<size_t>(b) * sizeof dx, sizeof dx);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        acc[i][v] = fma(scaled[i][v], set1(dx), acc[i][v]);
        if constexpr (W::kMin) {
#pragma GCC unroll 2
          for (int group = 0; group < kGroups; ++group)
            acc[i][v] = fma(load(block.min[group] + v * kW), set1(sums.total[i][group][b]), acc[i][v]);
        }
      }
    }
  }
  store_panel<M>(acc, y, y_stride, n, add_to_y);
}

// unpacked_tile() of m tokens, m <= M.
template <typename W, int M, typename... Args>
void unpacked_tile_upto(int64_t m, Args... args) {
  if (m == M) return unpacked_tile<W, M>(args...);
  if constexpr (M > 1) unpacked_tile_upto<W, M - 1>(m, args...);
}

// More than kFewTokens tokens times a panel. The sums of a row and a token are the same for any number of them.
template <Formats W>
void panel_dot_batch(const void* panel, int64_t cols, const void* x, size_t x_stride, int64_t T, float* y,
                     int64_t y_stride, int n, bool add_to_y, bool from_memory) {
  static_assert(kUnpackedBlocks % W::kBlocks == 0);
  constexpr int kMost = kUnpackedGroups<W> == 2 ? 5 : 6;  // tokens of a tile, whose sums fit the registers
  UnpackedBlock<W> blocks[kUnpackedBlocks];
  const auto* super = static_cast<const uint8_t*>(panel);
  const int64_t all = n_blocks(cols), tiles = (T + kMost - 1) / kMost;
  for (int64_t at = 0; at < all; at += kUnpackedBlocks) {
    const int count = all - at < kUnpackedBlocks ? static_cast<int>(all - at) : kUnpackedBlocks;
    unpack_panel<W>(super, count, blocks);
    const int64_t bytes = kPanelRows * W::kBytes * (count / W::kBlocks);
    super += bytes;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      // The next blocks come from memory meanwhile.
      if (from_memory) {
        const int64_t begin = tile * bytes / tiles;
        prefetch(super, begin, (tile + 1) * bytes / tiles - begin);
      }
      const int64_t t = tile * T / tiles, m = (tile + 1) * T / tiles - t;
      unpacked_tile_upto<W, kMost>(m, blocks, count, at,
                                   static_cast<const uint8_t*>(x) + static_cast<size_t>(t) * x_stride, x_stride, cols,
                                   y + t * y_stride, y_stride, n, add_to_y || at > 0);
    }
  }
}

template <typename W>
constexpr int64_t blocks_of_unit() {
  if constexpr (Formats<W>) {
    return W::kBlocks;
  } else {
    return 1;
  }
}

// Up to six tokens at a time: 6 x 2 accumulators in integers and as many in floats; four, where groups of 16 columns
// need another set. Of seven and eight, half. Each pass of a few tokens asks for its part of the next panel, so that
// memory is busy during all of them.
template <typename W>
void panel_dot(const void* panel, int64_t cols, const void* x, size_t x_stride, int64_t T, float* y, int64_t y_stride,
               int n, bool add_to_y, PanelIn where) {
  bool from_memory = where != PanelIn::cache;
  if constexpr (Formats<W>) {
    if (T > kFewTokens) return panel_dot_batch<W>(panel, cols, x, x_stride, T, y, y_stride, n, add_to_y, from_memory);
  }
  constexpr int kMost = most_tokens<W>();
  constexpr int64_t kBlockBytes = kPanelRows * W::kBytes / blocks_of_unit<W>();
  const int64_t most = T > kMost && T <= kFewTokens ? 4 : kMost;
  AlsoAhead also;
  const bool shares = where == PanelIn::memory_with_next && T > most && T <= kFewTokens;  // in two passes
  if (shares) also = {static_cast<const uint8_t*>(panel) + n_blocks(cols) * kBlockBytes, kBlockBytes / 2};
  for (int64_t t = 0; t < T; t += most, from_memory = false) {
    panel_tile_upto<W, kMost>(T - t < most ? T - t : most, panel, cols,
                              static_cast<const uint8_t*>(x) + static_cast<size_t>(t) * x_stride, x_stride,
                              y + t * y_stride, y_stride, n, add_to_y, from_memory, also);
    if (shares) also.at += n_blocks(cols) * also.bytes;
  }
}

// The entries of the table for a type of weights: null for those that are not quantised.
template <typename W>
struct PanelKernels {
  static constexpr auto pack = &panel_pack<W>;
  static constexpr auto row = &panel_row<W>;
  static constexpr auto dot = &panel_dot<W>;
};
template <Elements W>
struct PanelKernels<W> {
  static constexpr decltype(nullptr) pack = nullptr, row = nullptr, dot = nullptr;
};
