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

template <Formats W, int R, bool kNear>
HEARTH_SIMD void axpy_group(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const float* v,
                            float* acc) {
  for (int64_t s = 0; s < cols / kColumns<W>; ++s) {
    Values<W> rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (W::kBlocks > 1 || s % (64 / W::kBytes) == 0) prefetch<kNear>(ahead[r], s * W::kBytes, W::kBytes);
      rows[r].read(w[r] + s * W::kBytes);
    }
#pragma GCC unroll 1
    for (int b = 0; b < W::kBlocks; ++b) {
      float* out = acc + s * kColumns<W> + b * kBlock;
      F a[kBlockVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kBlockVectors; ++i) a[i] = load(out + kW * i);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        F x[kBlockVectors];
        rows[r].get(b, x);
#pragma GCC unroll 8
        for (int i = 0; i < kBlockVectors; ++i) a[i] = fma(x[i], set1(v[r]), a[i]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kBlockVectors; ++i) store(out + kW * i, a[i]);
    }
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
template <Formats W>
HEARTH_SIMD int64_t bytes_of(int64_t cols) {
  return cols / kColumns<W> * W::kBytes;
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

// --- several tokens ---
// Blocks of rows that are asked for while the block before is used: each row is read from memory once, and then for all
// tokens by strips of columns, whose sums stay in registers over the rows of a block. Each sum takes the rows in order,
// as with one token.
constexpr int kStripRows = 16;
// factor[r][t]: with what token t takes row r; zeros where there is no such token.
struct alignas(64) StripFactors {
  static constexpr int kTokens = kFewTokens < kW ? kW : kFewTokens;
  float of[kStripRows][kTokens];
};
constexpr int kStripTokens = kW == 16 ? 8 : 4;  // times two vectors of columns

// T tokens, V vectors of columns from c on (one of n columns, where n < kW), of n_rows rows. A function of its own,
// whose sums the compiler then keeps in registers.
template <Elements W, int T, int V>
__attribute__((noinline)) void strip(const uint8_t* const* w, int n_rows, int64_t c, int n, const StripFactors& factors,
                                     int t0, float* acc, int64_t acc_stride) {
  F a[T][V];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
      const float* p = acc + t * acc_stride + c + i * kW;
      a[t][i] = n == kW ? load(p) : load_n(p, n);
    }
  }
  for (int r = 0; r < n_rows; ++r) {
    const auto* p = reinterpret_cast<const typename W::Element*>(w[r]) + c;
    F wv[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) wv[i] = keep(n == kW ? W::get(p + i * kW) : W::get_n(p + i * kW, n));
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const F factor = keep(set1(factors.of[r][t0 + t]));
#pragma GCC unroll 8
      for (int i = 0; i < V; ++i) a[t][i] = fma(wv[i], factor, a[t][i]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) {
      float* p = acc + t * acc_stride + c + i * kW;
      n == kW ? store(p, a[t][i]) : store_n(p, a[t][i], n);
    }
  }
}
// A block of columns of n_rows rows; get(r, out) gives row r's as vectors, to be multiplied with `factors`.
template <int T, typename Get>
__attribute__((noinline)) void strip_of_block(Get get, int n_rows, const StripFactors& factors, int t0, float* acc,
                                              int64_t acc_stride) {
  F a[T][kBlockVectors];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVectors; ++i) a[t][i] = load(acc + t * acc_stride + i * kW);
  }
  for (int r = 0; r < n_rows; ++r) {
    F w[kBlockVectors];
    get(r, w);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const F factor = keep(set1(factors.of[r][t0 + t]));
#pragma GCC unroll 8
      for (int i = 0; i < kBlockVectors; ++i) a[t][i] = fma(w[i], factor, a[t][i]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVectors; ++i) store(acc + t * acc_stride + i * kW, a[t][i]);
  }
}

// Calls visit.operator()<N>(t0) for T tokens, in groups of kMost and then of fewer.
template <int kMost, typename Visit>
HEARTH_SIMD void token_groups(int t0, int T, Visit visit) {
  while (T - t0 >= kMost) {
    visit.template operator()<kMost>(t0);
    t0 += kMost;
  }
  if constexpr (kMost > 1) token_groups<kMost / 2>(t0, T, visit);
}

template <Elements W>
HEARTH_SIMD void add_strips(const uint8_t* const* w, const uint8_t* const* ahead, int n_rows, int64_t cols,
                            const StripFactors& factors, int T, float* acc, int64_t acc_stride) {
  constexpr int V = 2;
  constexpr int64_t kBytes = V * kW * sizeof(typename W::Element);
  int64_t c = 0;
  for (; c + V * kW <= cols; c += V * kW) {
    for (int r = 0; r < n_rows; ++r) prefetch(ahead[r], c * static_cast<int64_t>(sizeof(typename W::Element)), kBytes);
    token_groups<kStripTokens>(
        0, T, [&]<int N>(int t0) __attribute__((always_inline)) {
          strip<W, N, V>(w, n_rows, c, kW, factors, t0, acc + t0 * acc_stride, acc_stride);
        });
  }
  for (; c < cols; c += kW) {
    const int n = cols - c < kW ? static_cast<int>(cols - c) : kW;
    for (int t = 0; t < T; ++t) strip<W, 1, 1>(w, n_rows, c, n, factors, t, acc + t * acc_stride, acc_stride);
  }
}
template <Blocks W>
HEARTH_SIMD void add_strips(const uint8_t* const* w, const uint8_t* const* ahead, int n_rows, int64_t cols,
                            const StripFactors& v, int T, float* acc, int64_t acc_stride) {
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    StripFactors factors;
    const bool next_line = b * W::kBytes / 64 != (b - 1) * W::kBytes / 64;
    for (int r = 0; r < n_rows; ++r) {
      if (next_line) prefetch(ahead[r], b * W::kBytes, 64);
      const F scale = set1(W::scale(w[r] + b * W::kBytes));
      for (int t = 0; t < StripFactors::kTokens; t += kW) store(factors.of[r] + t, mul(scale, load(v.of[r] + t)));
    }
    const auto get = [=](int r, F* out) __attribute__((always_inline)) {
      W::widen(w[r] + b * W::kBytes, out);
    };
    token_groups<2 * kStripTokens / kBlockVectors>(
        0, T, [&]<int N>(int t0) __attribute__((always_inline)) {
          strip_of_block<N>(get, n_rows, factors, t0, acc + b * kBlock + t0 * acc_stride, acc_stride);
        });
  }
}

template <Formats W>
HEARTH_SIMD void add_strips(const uint8_t* const* w, const uint8_t* const* ahead, int n_rows, int64_t cols,
                            const StripFactors& factors, int T, float* acc, int64_t acc_stride) {
  for (int64_t s = 0; s < cols / kColumns<W>; ++s) {
    Values<W> rows[kStripRows];
    for (int r = 0; r < n_rows; ++r) {
      prefetch(ahead[r], s * W::kBytes, W::kBytes);
      rows[r].read(w[r] + s * W::kBytes);
    }
    for (int b = 0; b < W::kBlocks; ++b) {
      alignas(64) float floats[kStripRows][kBlock];
      for (int r = 0; r < n_rows; ++r) {
        F x[kBlockVectors];
        rows[r].get(b, x);
        for (int i = 0; i < kBlockVectors; ++i) store(floats[r] + i * kW, x[i]);
      }
      const auto get = [row = &floats[0]](int r, F* out) __attribute__((always_inline)) {
        for (int i = 0; i < kBlockVectors; ++i) out[i] = load(row[r] + i * kW);
      };
      float* out = acc + s * kColumns<W> + b * kBlock;
      token_groups<2 * kStripTokens / kBlockVectors>(
          0, T, [&]<int N>(int t0) __attribute__((always_inline)) {
            strip_of_block<N>(get, n_rows, factors, t0, out + t0 * acc_stride, acc_stride);
          });
    }
  }
}

template <typename W>
void axpy_tokens(RowsView rows, int64_t cols, const float* v, int64_t v_stride, int64_t T, float* acc,
                 int64_t acc_stride) {
  const Ahead later{rows, nullptr};
  const int64_t bytes = bytes_of<W>(cols);
  for (int64_t r = 0; r < rows.n && r < kStripRows; ++r) prefetch(row_address(rows, r), 0, bytes);
  StripFactors factors = {};
  const uint8_t *w[kStripRows], *ahead[kStripRows];
  for (int64_t r = 0; r < rows.n; r += kStripRows) {
    const int n = rows.n - r < kStripRows ? static_cast<int>(rows.n - r) : kStripRows;
    later.group(r, n, kStripRows, w, ahead);
    for (int i = 0; i < n; ++i) {
      for (int64_t t = 0; t < T; ++t) factors.of[i][t] = v[t * v_stride + r + i];
    }
    add_strips<W>(w, ahead, n, cols, factors, static_cast<int>(T), acc, acc_stride);
  }
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

template <Formats W>
void to_float(const void* row, float* out, int64_t n) {
  Values<W> values;
  for (int64_t b = 0; b < n / kBlock; ++b) {
    if (b % W::kBlocks == 0) values.read(static_cast<const uint8_t*>(row) + b / W::kBlocks * W::kBytes);
    F x[kBlockVectors];
    values.get(static_cast<int>(b % W::kBlocks), x);
    for (int i = 0; i < kBlockVectors; ++i) store(out + kBlock * b + kW * i, x[i]);
  }
}
