// Products of quantised weights in panels with any number of tokens, in integers (VNNI). Part of kernels_avx512.cpp.
//
// A panel is kPanelRows rows, block by block: their scales, then their quants, interleaved by four bytes
// [group][row][4], so that one instruction multiplies four consecutive columns of 16 rows with four activations. It
// takes as many bytes as the rows do in a file. Q8_0's quants are stored as unsigned bytes, w + 128; a byte of Q4_0's
// has two columns 16 apart, w + 8 each, as in the file: the upper half of a group is the fourth group behind it. The
// products start from what the unsigned form has too much, which the activations bring along (Q8Row::total).

template <typename W>
struct PanelBlock {
  static constexpr int kGroups = (W::kBytes - 2) / 4;
  uint16_t scale[kPanelRows];
  uint8_t w[kGroups][kPanelRows][4];
};
static_assert(kPanelRows == 2 * kW);
static_assert(sizeof(PanelBlock<WeightQ8_0>) == kPanelRows * WeightQ8_0::kBytes);
static_assert(sizeof(PanelBlock<WeightQ4_0>) == kPanelRows * WeightQ4_0::kBytes);

// 64 bytes of quants: those of the first n of several blocks, zeros behind them; as a panel stores them.
HEARTH_SIMD __m512i quants_of(WeightQ8_0, const uint8_t* blocks, int n) {
  const auto of = [=](int i) { return reinterpret_cast<const __m256i*>(blocks + i * WeightQ8_0::kBytes + 2); };
  const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256(of(0)));
  const __m256i second = n > 1 ? _mm256_loadu_si256(of(1)) : _mm256_setzero_si256();
  return _mm512_xor_si512(_mm512_inserti64x4(first, second, 1), _mm512_set1_epi8(-128));
}
HEARTH_SIMD __m512i quants_of(WeightQ4_0, const uint8_t* blocks, int n) {
  const auto of = [=](int i) {
    const auto* p = reinterpret_cast<const __m128i*>(blocks + i * WeightQ4_0::kBytes + 2);
    return i < n ? _mm_loadu_si128(p) : _mm_setzero_si128();
  };
  const __m256i low = _mm256_set_m128i(of(1), of(0)), high = _mm256_set_m128i(of(3), of(2));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

template <Blocks W>
void panel_pack(const void* w, size_t row_bytes, int n_rows, int64_t cols, void* panel) {
  using Block = PanelBlock<W>;
  constexpr int kAtOnce = 16 / Block::kGroups;  // blocks: 16 groups of four bytes, a square to transpose
  auto* out = static_cast<Block*>(panel);
  const int64_t blocks = n_blocks(cols);
  for (int half = 0; half < kPanelRows; half += kW) {
    for (int64_t b = 0; b < blocks; b += kAtOnce) {
      const int n = blocks - b < kAtOnce ? static_cast<int>(blocks - b) : kAtOnce;
      F rows[kW];
      for (int i = 0; i < kW; ++i) {
        const bool present = half + i < n_rows;
        const uint8_t* block =
            static_cast<const uint8_t*>(w) + static_cast<size_t>(present ? half + i : 0) * row_bytes + b * W::kBytes;
        rows[i] = present ? _mm512_castsi512_ps(quants_of(W{}, block, n)) : zero();
        for (int k = 0; k < n; ++k)
          out[b + k].scale[half + i] = present ? read_u16(block + k * W::kBytes) : uint16_t{0};
      }
      transpose(rows);
      for (int k = 0; k < n; ++k) {
        for (int g = 0; g < Block::kGroups; ++g) _mm512_storeu_ps(out[b + k].w[g][half], rows[k * Block::kGroups + g]);
      }
    }
  }
}

template <Blocks W>
void panel_row(const void* panel, int row, int64_t cols, float* out) {
  using Block = PanelBlock<W>;
  const auto* blocks = static_cast<const Block*>(panel);
  for (int64_t b = 0; b < n_blocks(cols); ++b) {
    uint8_t block[W::kBytes];
    __builtin_memcpy(block, &blocks[b].scale[row], 2);
    for (int g = 0; g < Block::kGroups; ++g) __builtin_memcpy(block + 2 + 4 * g, blocks[b].w[g][row], 4);
    for (int i = 2; i < W::kBytes; ++i) block[i] ^= W::kPanelFlip;
    to_float<W>(block, out + b * kBlock, kBlock);
  }
}

// The weights of group g of kW rows, unsigned.
HEARTH_SIMD __m512i group_of(const PanelBlock<WeightQ8_0>& block, int g, int first_row) {
  return _mm512_loadu_si512(block.w[g][first_row]);
}
HEARTH_SIMD __m512i group_of(const PanelBlock<WeightQ4_0>& block, int g, int first_row) {
  const __m512i both = _mm512_loadu_si512(block.w[g % 4][first_row]);
  return _mm512_and_si512(g < 4 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}

// Prefetches ahead of a piece of a panel. A core reads a panel as one stream. With one token the hardware's own
// prefetching suffices except at the beginning of a page, and a request for every line costs a fifth of the speed (Zen 4:
// 20 instead of 25 GB/s to a core). With several tokens the hardware's prefetching comes too late.
template <int M>
HEARTH_SIMD void prefetch_panel(const uint8_t* piece, int64_t bytes) {
  if constexpr (M > 1) {
    prefetch(piece, kAheadBytes, bytes);
  } else {
    constexpr uintptr_t kPage = 4096;
    const uintptr_t page = reinterpret_cast<uintptr_t>(piece) / kPage;
    if (page == (reinterpret_cast<uintptr_t>(piece) + static_cast<uintptr_t>(bytes)) / kPage) return;
    prefetch(reinterpret_cast<const uint8_t*>((page + 2) * kPage), 0, 256);
  }
}

// A pass over a panel of several tokens prefetches this besides: `bytes` for each block, from `at` on.
struct AlsoAhead {
  const uint8_t* at = nullptr;
  int64_t bytes = 0;
  HEARTH_SIMD_MEMBER void prefetch_for(int64_t block) const {
    if (at != nullptr) prefetch(at, block * bytes, bytes);
  }
};

template <int M>
HEARTH_SIMD void store_panel(const F (*acc)[2], float* y, int64_t y_stride, int n, bool add_to_y) {
  const int n0 = n < kW ? n : kW, n1 = n - n0;
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    float* row = y + i * y_stride;
    store_n(row, add_to_y ? add(load_n(row, n0), acc[i][0]) : acc[i][0], n0);
    if (n1 > 0) store_n(row + kW, add_to_y ? add(load_n(row + kW, n1), acc[i][1]) : acc[i][1], n1);
  }
}

// M tokens times the rows of the panel. The order in which a row's blocks are added up is that of dot_tile().
// Prefetches what follows the panel, if so asked.
template <Blocks W, int M>
HEARTH_SIMD void panel_tile(const void* packed, int64_t cols, const uint8_t* x, size_t x_stride, float* y,
                            int64_t y_stride, int n, bool add_to_y, bool from_memory, AlsoAhead also) {
  const auto* panel = static_cast<const PanelBlock<W>*>(packed);
  const int64_t blocks = n_blocks(cols);
  F acc[M][2];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) acc[i][0] = acc[i][1] = zero();
  const uint8_t* q = reinterpret_cast<const uint8_t*>(q8_row(x, blocks * kBlock).q);
  for (int64_t b = 0; b < blocks; ++b) {
    const PanelBlock<W>& block = panel[b];
    if (from_memory) prefetch_panel<M>(reinterpret_cast<const uint8_t*>(&block), sizeof block);
    also.prefetch_for(b);
    __m512i products[M][2];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const auto* row = reinterpret_cast<const int32_t*>(x + static_cast<size_t>(i) * x_stride);
      // Q8Row::total is -8 sum x.
      const __m512i start = _mm512_slli_epi32(_mm512_set1_epi32(row[blocks + b]), W::kPanelFlip != 0 ? 4 : 0);
      products[i][0] = products[i][1] = start;
    }
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const __m512i w0 = group_of(block, g, 0), w1 = group_of(block, g, kW);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        int32_t four;
        __builtin_memcpy(&four, q + static_cast<size_t>(i) * x_stride + b * kBlock + 4 * g, sizeof four);
        const __m512i xv = _mm512_set1_epi32(four);
        products[i][0] = _mm512_dpbusd_epi32(products[i][0], w0, xv);
        products[i][1] = _mm512_dpbusd_epi32(products[i][1], w1, xv);
      }
    }
    const F s0 = load_f16(block.scale), s1 = load_f16(block.scale + kW);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const F d = set1(reinterpret_cast<const float*>(x + static_cast<size_t>(i) * x_stride)[b]);
      acc[i][0] = fma(_mm512_cvtepi32_ps(products[i][0]), mul(s0, d), acc[i][0]);
      acc[i][1] = fma(_mm512_cvtepi32_ps(products[i][1]), mul(s1, d), acc[i][1]);
    }
  }
  store_panel<M>(acc, y, y_stride, n, add_to_y);
}
