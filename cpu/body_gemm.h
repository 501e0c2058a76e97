// Matrix products on packed panels. Part of every kernels_*.cpp; needs its simd_*.h and body_dot.h.

constexpr int kNr = 2 * kW;

// Rows [j, j + kW) of the panel, from kW rows of weights: columns [k0, k0 + kc).
template <Elements W>
HEARTH_SIMD void pack_row_group(const uint8_t* const* w, int n_rows, int64_t k0, int64_t kc, float* out) {
  using Element = typename W::Element;
  for (int64_t k = 0; k < kc; k += kW) {
    const int n = kc - k < kW ? static_cast<int>(kc - k) : kW;
    F v[kW];
    for (int i = 0; i < kW; ++i) {
      const Element* p = i < n_rows ? reinterpret_cast<const Element*>(w[i]) + k0 + k : nullptr;
      v[i] = p == nullptr ? zero() : n == kW ? W::get(p) : W::get_n(p, n);
    }
    transpose(v);
    for (int i = 0; i < n; ++i) store(out + (k + i) * kNr, v[i]);
  }
}

template <typename W>
void pack_rows(const void* w, size_t row_bytes, int64_t r0, int n_rows, int64_t k0, int64_t kc, float* out) {
  for (int j = 0; j < kNr; j += kW) {
    const uint8_t* rows[kW] = {};
    for (int i = 0; i < kW && j + i < n_rows; ++i) {
      rows[i] = static_cast<const uint8_t*>(w) + static_cast<size_t>(r0 + j + i) * row_bytes;
    }
    const int n = n_rows - j < 0 ? 0 : n_rows - j < kW ? n_rows - j : kW;
    pack_row_group<W>(rows, n, k0, kc, out + j);
  }
}

// The place of (k, c) in panels of kc rows.
HEARTH_SIMD float* in_panel(float* out, int64_t kc, int64_t k, int64_t c) {
  return out + (c / kNr * kc + k) * kNr + c % kNr;
}

template <Elements W>
void pack_cols(const void* w, size_t row_bytes, int64_t k0, int64_t kc, int64_t c0, int64_t n_cols, float* out) {
  const int64_t padded = (n_cols + kNr - 1) / kNr * kNr;
  for (int64_t k = 0; k < kc; ++k) {
    const uint8_t* row = static_cast<const uint8_t*>(w) + static_cast<size_t>(k0 + k) * row_bytes;
    const auto* p = reinterpret_cast<const typename W::Element*>(row) + c0;
    for (int64_t c = 0; c < padded; c += kW) {
      const int64_t left = n_cols - c;
      const F v = left >= kW ? W::get(p + c) : left > 0 ? W::get_n(p + c, static_cast<int>(left)) : zero();
      store(in_panel(out, kc, k, c), v);
    }
  }
}

template <Blocks W>
void pack_cols(const void* w, size_t row_bytes, int64_t k0, int64_t kc, int64_t c0, int64_t n_cols, float* out) {
  for (int64_t k = 0; k < kc; ++k) {
    const uint8_t* row = static_cast<const uint8_t*>(w) + static_cast<size_t>(k0 + k) * row_bytes;
    for (int64_t c = 0; c < n_cols; c += kBlock) {
      const uint8_t* block = row + (c0 + c) / kBlock * W::kBytes;
      const F d = set1(W::scale(block));
      F q[kBlockVectors];
      W::widen(block, q);
      for (int i = 0; i < kBlockVectors; ++i) store(in_panel(out, kc, k, c + kW * i), mul(q[i], d));
    }
  }
}

template <Formats W>
void pack_cols(const void* w, size_t row_bytes, int64_t k0, int64_t kc, int64_t c0, int64_t n_cols, float* out) {
  for (int64_t k = 0; k < kc; ++k) {
    const uint8_t* row = static_cast<const uint8_t*>(w) + static_cast<size_t>(k0 + k) * row_bytes;
    Values<W> values;
    for (int64_t c = 0; c < n_cols; c += kBlock) {
      const int64_t block = (c0 + c) / kBlock;
      if (c == 0 || block % W::kBlocks == 0) values.read(row + block / W::kBlocks * W::kBytes);
      F x[kBlockVectors];
      values.get(static_cast<int>(block % W::kBlocks), x);
      for (int i = 0; i < kBlockVectors; ++i) store(in_panel(out, kc, k, c + kW * i), x[i]);
    }
  }
}

// M tokens by two vectors of columns, all accumulators in registers.
template <int M>
void gemm_tile_m(int64_t kc, const float* a, const float* b, float* c, int64_t ldc, bool add_to_c) {
  F acc[M][2];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) acc[i][0] = acc[i][1] = zero();
  for (int64_t k = 0; k < kc; ++k, a += kMr, b += kNr) {
    const F b0 = load(b), b1 = load(b + kW);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const F x = set1(a[i]);
      acc[i][0] = fma(x, b0, acc[i][0]);
      acc[i][1] = fma(x, b1, acc[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    float* row = c + i * ldc;
    store(row, add_to_c ? add(load(row), acc[i][0]) : acc[i][0]);
    store(row + kW, add_to_c ? add(load(row + kW), acc[i][1]) : acc[i][1]);
  }
}

template <int M>
void gemm_tile_upto(int m, int64_t kc, const float* a, const float* b, float* c, int64_t ldc, bool add_to_c) {
  if (m == M) return gemm_tile_m<M>(kc, a, b, c, ldc, add_to_c);
  if constexpr (M > 1) gemm_tile_upto<M - 1>(m, kc, a, b, c, ldc, add_to_c);
}

void gemm_tile(int64_t kc, const float* a, const float* b, float* c, int64_t ldc, int m, int n, bool add_to_c) {
  if (n == kNr) return gemm_tile_upto<kMr>(m, kc, a, b, c, ldc, add_to_c);
  float tile[kMr * kNr];
  gemm_tile_upto<kMr>(m, kc, a, b, tile, kNr, false);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) c[i * ldc + j] = tile[i * kNr + j] + (add_to_c ? c[i * ldc + j] : 0.0f);
  }
}
