// Sums of weight rows with factors, and rows as floats. Part of every kernels_*.cpp, after body_weights.h.

// acc += R rows with factors v, one row after the other; prefetches the R rows at `ahead`.
template <Elements W, int R, bool kNear>
HEARTH_SIMD void axpy_group(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const float* v,
                            float* acc) {
  using Element = typename W::Element;
  constexpr int64_t kLine = 64 / sizeof(Element);
  F factor[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) factor[r] = set1(v[r]);
  int64_t c = 0;
  for (; c + kW <= cols; c += kW) {
    if (c % kLine == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) prefetch<kNear>(ahead[r], c * static_cast<int64_t>(sizeof(Element)), 64);
    }
    F a = load(acc + c);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) a = fma(W::get(reinterpret_cast<const Element*>(w[r]) + c), factor[r], a);
    store(acc + c, a);
  }
  if (c < cols) {
    const int n = static_cast<int>(cols - c);
    F a = load_n(acc + c, n);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) a = fma(W::get_n(reinterpret_cast<const Element*>(w[r]) + c, n), factor[r], a);
    store_n(acc + c, a, n);
  }
}

template <Blocks W, int R, bool kNear>
HEARTH_SIMD void axpy_group(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const float* v,
                            float* acc) {
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    if (b % (64 / W::kBytes) == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) prefetch<kNear>(ahead[r], b * W::kBytes, 64);
    }
    F a[kBlockVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVectors; ++i) a[i] = load(acc + kBlock * b + kW * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint8_t* block = w[r] + b * W::kBytes;
      const F factor = set1(W::scale(block) * v[r]);
      F q[kBlockVectors];
      W::widen(block, q);
#pragma GCC unroll 8
      for (int i = 0; i < kBlockVectors; ++i) a[i] = fma(q[i], factor, a[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVectors; ++i) store(acc + kBlock * b + kW * i, a[i]);
  }
}

// Bytes of a row that `cols` columns are.
template <Elements W>
HEARTH_SIMD int64_t bytes_of(int64_t cols) {
  return cols * static_cast<int64_t>(sizeof(typename W::Element));
}
template <Blocks W>
HEARTH_SIMD int64_t bytes_of(int64_t cols) {
  return cols / kBlock * W::kBytes;
}

// Eight rows share one load and store of acc. Of short parts of rows in memory, several groups are asked for ahead, and
// the first at once; more of them than one group would push each other out of the first-level cache, where parts of
// rows of 4 KiB or a multiple of it lie in a few sets.
template <typename W, bool kNear>
HEARTH_SIMD void add_rows(const RowsView& rows, const RowsView* then, int64_t cols, const float* v, float* acc) {
  constexpr int kRows = 8;
  const Ahead later{rows, then};
  const int64_t bytes = bytes_of<W>(cols), distance = kRows * (kNear ? 1 : pieces_ahead(kRows * bytes));
  for (int64_t r = 0; r < rows.n && r < distance; ++r) prefetch<kNear>(row_address(rows, r), 0, bytes);
  const uint8_t *w[kRows], *ahead[kRows];
  int64_t r = 0;
  for (; r + kRows <= rows.n; r += kRows) {
    later.group(r, kRows, distance, w, ahead);
    axpy_group<W, kRows, kNear>(w, ahead, cols, v + r, acc);
  }
  for (; r + kRows / 2 <= rows.n; r += kRows / 2) {
    later.group(r, kRows / 2, distance, w, ahead);
    axpy_group<W, kRows / 2, kNear>(w, ahead, cols, v + r, acc);
  }
  for (; r < rows.n; ++r) {
    later.group(r, 1, distance, w, ahead);
    axpy_group<W, 1, kNear>(w, ahead, cols, v + r, acc);
  }
}
template <typename W>
void axpy_rows(RowsView rows, const RowsView* then, int64_t cols, const float* v, float* acc) {
  if (rows.near) return add_rows<W, true>(rows, then, cols, v, acc);
  add_rows<W, false>(rows, then, cols, v, acc);
}

template <Elements W>
void to_float(const void* row, float* out, int64_t n) {
  const auto* w = static_cast<const typename W::Element*>(row);
  int64_t c = 0;
  for (; c + kW <= n; c += kW) store(out + c, W::get(w + c));
  if (c < n) store_n(out + c, W::get_n(w + c, static_cast<int>(n - c)), static_cast<int>(n - c));
}

template <Blocks W>
void to_float(const void* row, float* out, int64_t n) {
  for (int64_t b = 0; b < n / kBlock; ++b) {
    const uint8_t* block = static_cast<const uint8_t*>(row) + b * W::kBytes;
    F q[kBlockVectors];
    W::widen(block, q);
    for (int i = 0; i < kBlockVectors; ++i) store(out + kBlock * b + kW * i, mul(q[i], set1(W::scale(block))));
  }
}
