// Rows of the formats of body_formats.h: dot products, and weights as floats. Part of every kernels_*.cpp.

// One row.
struct RowReader {
  const uint8_t* p;
  HEARTH_SIMD_MEMBER Bytes32 bytes(int at) const {
    Bytes32 v;
    __builtin_memcpy(&v, p + at, sizeof v);
    return v;
  }
  HEARTH_SIMD_MEMBER Bytes32 nibbles(int at) const { return load_nibbles(p + at); }
  HEARTH_SIMD_MEMBER Bytes32 bits(int at) const { return load_bits(p + at); }
  HEARTH_SIMD_MEMBER Bytes32 lookup(Bytes32 index, const uint8_t* table) const { return look_up(index, table); }
  HEARTH_SIMD_MEMBER float f16(int at) const { return from_f16(read_u16(p + at)); }
  HEARTH_SIMD_MEMBER float negative_f16(int at) const { return -f16(at); }
  HEARTH_SIMD_MEMBER float e8m0(int at) const { return from_e8m0(p[at]); }
  HEARTH_SIMD_MEMBER uint32_t word(int at) const {
    uint32_t x;
    __builtin_memcpy(&x, p + at, sizeof x);
    return x;
  }
  HEARTH_SIMD_MEMBER uint32_t half(int at) const { return read_u16(p + at); }
  // 2^(e - 128): MXFP4's quants are twice the values of the format.
  HEARTH_SIMD float from_e8m0(uint8_t e) {
    const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1u) << 23;
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
};

// The scales of four rows.
struct FourReader {
  const uint8_t* const* rows;
  int64_t at0;
  HEARTH_SIMD_MEMBER RowReader row(int r) const { return {rows[r] + at0}; }
  HEARTH_SIMD_MEMBER Words4 word(int at) const {
    return Words4{row(0).word(at), row(1).word(at), row(2).word(at), row(3).word(at)};
  }
  HEARTH_SIMD_MEMBER Words4 half(int at) const {
    return Words4{row(0).half(at), row(1).half(at), row(2).half(at), row(3).half(at)};
  }
  HEARTH_SIMD_MEMBER Four f16(int at) const {
    return four(row(0).f16(at), row(1).f16(at), row(2).f16(at), row(3).f16(at));
  }
  HEARTH_SIMD_MEMBER Four negative_f16(int at) const {
    return four(row(0).negative_f16(at), row(1).negative_f16(at), row(2).negative_f16(at), row(3).negative_f16(at));
  }
  HEARTH_SIMD_MEMBER Four e8m0(int at) const {
    return four(row(0).e8m0(at), row(1).e8m0(at), row(2).e8m0(at), row(3).e8m0(at));
  }
};

template <Formats W>
constexpr int64_t kColumns = 32 * W::kBlocks;  // of a super-block

// Byte i of the words, by row, as floats.
HEARTH_SIMD Four byte_of(Words4 x, int i) {
  return to_four((x >> (8 * i)) & 255u);
}

// Scales and minima of a super-block of four rows.
template <Formats W>
struct FourScales {
  Four d, dmin;
  uint32_t scale[4][4];  // [word][row]
  Words4 min[4];
  HEARTH_LARGE_MEMBER explicit FourScales(FourReader r) {
    d = d_of<W>(r);
    if constexpr (W::kMin) dmin = dmin_of<W>(r);
    if constexpr (W::kGroups > 0) {
      Words4 words[4] = {};
      W::scales(r, words, min);
      __builtin_memcpy(scale, words, sizeof scale);
    }
  }
  // The scales of the span of blocks that begins with b, from the lowest byte on.
  HEARTH_SIMD_MEMBER uint32_t span(int r, int b) const {
    const int group = b * W::kGroups;
    return scale[group / 4][r] >> (group % 4 * 8);
  }
  // Sum over the groups of block b of min * (-8 * sum of x), for each of four rows, exact.
  HEARTH_SIMD_MEMBER Four minima(int b, int32_t total, int32_t half) const {
    if constexpr (W::kGroups == 0) return set1_four(static_cast<float>(total));
    if constexpr (W::kGroups == 1) return mul(byte_of(min[b / 4], b % 4), set1_four(static_cast<float>(total)));
    const Words4 both = min[b / 2];
    return fma(byte_of(both, b % 2 * 2), set1_four(static_cast<float>(half)),
               mul(byte_of(both, b % 2 * 2 + 1), set1_four(static_cast<float>(total - half))));
  }
};

// Four rows times T tokens. A block's products, times the integer scales of its groups, are added up in integers,
// exactly; then sum += products * (d d_x), and sum += minima * (dmin d_x / 8), block after block. Panels
// (body_formats_panel.h) do the same: bits do not depend on whether weights lie in rows or in panels.
template <Formats W, int R, int T, bool kNear>
HEARTH_SIMD void dot_tile(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                          size_t x_stride, float* y, int64_t y_stride) {
  static_assert(R == 4);
  Four acc[T];
  Q8Row xs[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    xs[t] = q8_row(x + static_cast<size_t>(t) * x_stride, cols);
    acc[t] = zero_four();
  }
  // Blocks [b, b + span) of the super-block, block `at` of the row being its first.
  const auto add_span = [&](const Chunk* wv, const Lanes* lanes, const FourScales<W>* const* of, int b, int64_t at,
                            int span) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const ChunkInput xv = chunk_input<W::kOffset>(xs[t].q + kBlock * at, xs[t].offset + 8 * at, span);
      Four sums[kSpan];
      chunk_sums<W::kOffset, W::kGroups>(wv, xv, lanes, sums);
#pragma GCC unroll 2
      for (int i = 0; i < kSpan; ++i) {
        if (i >= span) break;
        const float dx = xs[t].d[at + i];
        acc[t] = fma(sums[i], mul(of[i]->d, set1_four(dx)), acc[t]);
        if constexpr (W::kMin) {
          const Four minima = of[i]->minima(b + i, xs[t].total[at + i], xs[t].half[at + i]);
          acc[t] = fma(minima, mul(of[i]->dmin, set1_four(0.125f * dx)), acc[t]);
        }
      }
    }
  };
  const int64_t supers = cols / kColumns<W>;
  if constexpr (W::kBlocks > 1) {
    for (int64_t s = 0; s < supers; ++s) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (ahead != nullptr) prefetch<kNear>(ahead[r], s * W::kBytes, W::kBytes);
      }
      const FourScales<W> scales(FourReader{w, s * W::kBytes});
      const FourScales<W>* of[2] = {&scales, &scales};
#pragma GCC unroll 1
      for (int b = 0; b < W::kBlocks; b += kSpan) {
        Chunk wv[R];
        Lanes lanes[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const RowReader row{w[r] + s * W::kBytes};
          wv[r] = chunk_of(W::quants(row, b), kSpan > 1 ? W::quants(row, b + 1) : Bytes32{});
          lanes[r] = scale_lanes<W::kGroups>(scales.span(r, b));
        }
        add_span(wv, lanes, of, b, s * W::kBlocks + b, kSpan);
      }
    }
  } else {
    for (int64_t s = 0; s < supers; s += kSpan) {
      const int span = supers - s < kSpan ? static_cast<int>(supers - s) : kSpan;
      const int64_t second = (s + span - 1) * W::kBytes;
      const FourScales<W> scales[2] = {FourScales<W>(FourReader{w, s * W::kBytes}),
                                       FourScales<W>(FourReader{w, second})};
      const FourScales<W>* of[2] = {&scales[0], &scales[1]};
      Chunk wv[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (ahead != nullptr) prefetch<kNear>(ahead[r], s * W::kBytes, kSpan * W::kBytes);
        const Bytes32 first = W::quants(RowReader{w[r] + s * W::kBytes}, 0);
        wv[r] = chunk_of(first, kSpan > 1 ? W::quants(RowReader{w[r] + second}, 0) : Bytes32{});
      }
      add_span(wv, nullptr, of, 0, s, span);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) store_four(y + t * y_stride, acc[t]);
}

// The weights of a super-block of one row, as floats.
template <Formats W>
struct Values {
  RowReader row = {nullptr};
  float scale[W::kGroups == 0 ? 1 : 16], min[W::kGroups == 0 ? 1 : 16];
  HEARTH_LARGE_MEMBER void read(const uint8_t* super) {
    row.p = super;
    const float d = d_of<W>(row);
    float dmin = 0.0f;
    if constexpr (W::kMin) dmin = dmin_of<W>(row);
    if constexpr (W::kGroups == 0) {
      scale[0] = d, min[0] = dmin;
    } else {
      uint32_t words[4] = {}, mins[4] = {};
      W::scales(row, words, mins);
      times_bytes(words, d, scale);
      if constexpr (W::kMin) times_bytes(mins, dmin, min);
    }
  }
  // Block b.
  HEARTH_LARGE_MEMBER void get(int b, F* out) const {
    widen_bytes<W::kOffset>(W::quants(row, b), out);
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVectors; ++i) {
      const int group = W::kGroups == 2 ? 2 * b + 2 * i / kBlockVectors : W::kGroups * b;
      out[i] = mul(out[i], set1(scale[group]));
      if constexpr (W::kMin) out[i] = sub(out[i], set1(min[group]));
    }
  }
};
