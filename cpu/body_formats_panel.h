// Panels of the formats of body_formats.h. Part of kernels_avx512.cpp, after body_panel.h.
//
// A panel is kPanelRows rows, super-block by super-block, with as many bytes as in a file: byte `at` of a super-block of
// 32 rows begins at 32 * at, and units of a field (Field::unit) of all rows lie side by side. A unit of four bytes is
// four columns of a row, so that one instruction multiplies four columns of 16 rows with four activations.
using Bytes64 = uint16_t __attribute__((vector_size(64)));
using Words16 = uint32_t __attribute__((vector_size(64)));

// Columns [4 g, 4 g + 4) of a block, of 16 rows.
struct PanelReader {
  const uint8_t* super;  // of the first of the rows
  int g;
  HEARTH_SIMD_MEMBER Bytes64 unit(int at) const {
    return reinterpret_cast<Bytes64>(_mm512_loadu_si512(super + kPanelRows * at));
  }
  HEARTH_SIMD_MEMBER Bytes64 bytes(int at) const { return unit(at + 4 * g); }
  HEARTH_SIMD_MEMBER Bytes64 nibbles(int at) const { return (unit(at + 4 * (g % 4)) >> (g / 4 * 4)) & kByte4; }
  HEARTH_SIMD_MEMBER Bytes64 bits(int at) const {
    const Words16 four = (reinterpret_cast<Words16>(unit(at)) >> (4 * g)) & 15u;
    return reinterpret_cast<Bytes64>((four | (four << 7) | (four << 14) | (four << 21)) & 0x01010101u);
  }
  HEARTH_SIMD_MEMBER Bytes64 lookup(Bytes64 index, const uint8_t* table) const {
    const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    return reinterpret_cast<Bytes64>(_mm512_shuffle_epi8(all, reinterpret_cast<__m512i>(index)));
  }
};

// The scales of 16 rows.
struct PanelScaleReader {
  const uint8_t* panel;
  int first_row;
  HEARTH_SIMD_MEMBER const uint8_t* at(int byte, int unit) const {
    return panel + kPanelRows * byte + first_row * unit;
  }
  HEARTH_SIMD_MEMBER Words16 word(int byte) const { return reinterpret_cast<Words16>(_mm512_loadu_si512(at(byte, 4))); }
  HEARTH_SIMD_MEMBER __m256i halves(int byte) const {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(byte, 2)));
  }
  HEARTH_SIMD_MEMBER Words16 half(int byte) const {
    return reinterpret_cast<Words16>(_mm512_cvtepu16_epi32(halves(byte)));
  }
  HEARTH_SIMD_MEMBER F f16(int byte) const { return _mm512_cvtph_ps(halves(byte)); }
  HEARTH_SIMD_MEMBER F negative_f16(int byte) const { return sub(set1(-0.0f), f16(byte)); }
  HEARTH_SIMD_MEMBER F e8m0(int byte) const {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at(byte, 1))));
    const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    const __m512i bits = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(bits, _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), small));
  }
};

template <Formats W>
void panel_pack(const void* w, size_t row_bytes, int n_rows, int64_t cols, void* panel) {
  auto* out = static_cast<uint8_t*>(panel);
  for (int64_t s = 0; s < cols / kColumns<W>; ++s, out += kPanelRows * W::kBytes) {
    const auto super = [&](int row) __attribute__((always_inline)) {
      return static_cast<const uint8_t*>(w) + static_cast<size_t>(row) * row_bytes + s * W::kBytes;
    };
    if (n_rows < kPanelRows) __builtin_memset(out, 0, static_cast<size_t>(kPanelRows * W::kBytes));
    for (const Field& f : W::kFields) {
      int done = 0;
      // 64 bytes of 16 rows: a square of words to transpose.
      for (; f.unit == 4 && done + 64 <= f.bytes && n_rows == kPanelRows; done += 64) {
        for (int half = 0; half < kPanelRows; half += kW) {
          F rows[kW];
          for (int i = 0; i < kW; ++i) rows[i] = _mm512_castsi512_ps(_mm512_loadu_si512(super(half + i) + f.at + done));
          transpose(rows);
          for (int i = 0; i < kW; ++i) _mm512_storeu_ps(out + kPanelRows * (f.at + done + 4 * i) + 4 * half, rows[i]);
        }
      }
      for (; done < f.bytes; done += f.unit) {
        for (int row = 0; row < n_rows; ++row) {
          __builtin_memcpy(out + kPanelRows * (f.at + done) + f.unit * row, super(row) + f.at + done,
                           static_cast<size_t>(f.unit));
        }
      }
    }
  }
}

template <Formats W>
void panel_row(const void* panel, int row, int64_t cols, float* out) {
  const auto* super = static_cast<const uint8_t*>(panel);
  for (int64_t s = 0; s < cols / kColumns<W>; ++s, super += kPanelRows * W::kBytes) {
    uint8_t block[W::kBytes];
    for (const Field& f : W::kFields) {
      for (int i = f.at; i < f.at + f.bytes; i += f.unit)
        __builtin_memcpy(block + i, super + kPanelRows * i + f.unit * row, static_cast<size_t>(f.unit));
    }
    to_float<W>(block, out + s * kColumns<W>, kColumns<W>);
  }
}

// Byte i of each word, with its sign.
HEARTH_SIMD __m512i signed_byte(Words16 x, int i) {
  return _mm512_srai_epi32(_mm512_sll_epi32(reinterpret_cast<__m512i>(x), _mm_cvtsi32_si128(24 - 8 * i)), 24);
}

// M tokens times the rows of the panel, in the order of dot_tile().
template <Formats W, int M>
HEARTH_SIMD void panel_tile(const void* packed, int64_t cols, const uint8_t* x, size_t x_stride, float* y,
                            int64_t y_stride, int n, bool add_to_y, bool from_memory, AlsoAhead also) {
  constexpr int kGroupsOf = W::kGroups == 2 ? 2 : 1, kFours = 8 / kGroupsOf;  // groups of a block, columns of each
  F acc[M][2];
  Q8Row xs[M];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    acc[i][0] = acc[i][1] = zero();
    xs[i] = q8_row(x + static_cast<size_t>(i) * x_stride, cols);
  }
  const auto* super = static_cast<const uint8_t*>(packed);
  int64_t at = 0;  // block of the row
  for (int64_t s = 0; s < cols / kColumns<W>; ++s, super += kPanelRows * W::kBytes) {
    F d[2], dmin[2];
    Words16 scale[2][4], min[2][4];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const PanelScaleReader reader{super, v * kW};
      d[v] = d_of<W>(reader);
      if constexpr (W::kMin) dmin[v] = dmin_of<W>(reader);
      if constexpr (W::kGroups > 0) W::scales(reader, scale[v], min[v]);
    }
#pragma GCC unroll 1
    for (int b = 0; b < W::kBlocks; ++b, ++at) {
      if (from_memory) {
        constexpr int64_t kPiece = kPanelRows * W::kBytes / W::kBlocks;
        // Formats with groups of 16 jump between their fields, too often for the hardware's prefetching.
        prefetch_panel<W::kGroups == 2 ? 2 : M>(super + b * kPiece, kPiece);
      }
      also.prefetch_for(at);
      __m512i sums[M][2];
#pragma GCC unroll 2
      for (int group = 0; group < kGroupsOf; ++group) {
        __m512i products[M][2];
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          __m512i start = _mm512_setzero_si512();
          if constexpr (W::kOffset != 0) {
            const int32_t eights = kGroupsOf == 1 ? xs[i].total[at]
                                   : group == 0   ? xs[i].half[at]
                                                  : xs[i].total[at] - xs[i].half[at];
            start = less_offset<W::kOffset>(_mm512_set1_epi32(eights));
          }
          products[i][0] = products[i][1] = start;
        }
#pragma GCC unroll 8
        for (int g = group * kFours; g < (group + 1) * kFours; ++g) {
          const auto w0 = reinterpret_cast<__m512i>(W::quants(PanelReader{super, g}, b));
          const auto w1 = reinterpret_cast<__m512i>(W::quants(PanelReader{super + 4 * kW, g}, b));
#pragma GCC unroll 8
          for (int i = 0; i < M; ++i) {
            int32_t four;
            __builtin_memcpy(&four, xs[i].q + at * kBlock + 4 * g, sizeof four);
            const __m512i xv = _mm512_set1_epi32(four);
            products[i][0] = _mm512_dpbusd_epi32(products[i][0], w0, xv);
            products[i][1] = _mm512_dpbusd_epi32(products[i][1], w1, xv);
          }
        }
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          __m512i factor = _mm512_setzero_si512();
          if constexpr (W::kGroups > 0) {
            const int at_scale = b * W::kGroups + group;
            factor = signed_byte(scale[v][at_scale / 4], at_scale % 4);
          }
#pragma GCC unroll 8
          for (int i = 0; i < M; ++i) {
            const __m512i scaled = W::kGroups > 0 ? _mm512_mullo_epi32(products[i][v], factor) : products[i][v];
            sums[i][v] = group == 0 ? scaled : _mm512_add_epi32(sums[i][v], scaled);
          }
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        F first = zero(), second = zero();  // minima of the block's groups
        if constexpr (W::kMin && W::kGroups > 0) {
          first = _mm512_cvtepi32_ps(signed_byte(min[v][b * W::kGroups / 4], b * W::kGroups % 4));
          if (W::kGroups == 2) second = _mm512_cvtepi32_ps(signed_byte(min[v][b / 2], b % 2 * 2 + 1));
        }
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          const float dx = xs[i].d[at];
          acc[i][v] = fma(_mm512_cvtepi32_ps(sums[i][v]), mul(d[v], set1(dx)), acc[i][v]);
          if constexpr (W::kMin) {
            const auto total = static_cast<float>(xs[i].total[at]), half = static_cast<float>(xs[i].half[at]);
            F minima = set1(total);
            if constexpr (W::kGroups == 1) minima = mul(first, set1(total));
            if constexpr (W::kGroups == 2) minima = fma(first, set1(half), mul(second, set1(total - half)));
            acc[i][v] = fma(minima, mul(dmin[v], set1(0.125f * dx)), acc[i][v]);
          }
        }
      }
    }
  }
  store_panel<M>(acc, y, y_stride, n, add_to_y);
}

template <typename W>
constexpr int most_tokens() {
  if constexpr (Formats<W>) {
    return W::kGroups == 2 ? 4 : 6;
  } else {
    return 6;
  }
}

// panel_tile() of m tokens, m <= M.
template <typename W, int M, typename... Args>
void panel_tile_upto(int64_t m, Args... args) {
  if (m == M) return panel_tile<W, M>(args...);
  if constexpr (M > 1) panel_tile_upto<W, M - 1>(m, args...);
}
