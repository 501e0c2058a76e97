// Dot products and sums of weight rows. Part of every kernels_*.cpp; needs its simd_*.h.

HEARTH_SIMD uint16_t read_u16(const uint8_t* p) {
  uint16_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

// How each weight type is read: one vector at a time, or one block of 32 at a time.
struct WeightF32 {
  using Element = float;
  HEARTH_SIMD F get(const Element* p) { return load(p); }
  HEARTH_SIMD F get_n(const Element* p, int n) { return load_n(p, n); }
};
struct WeightF16 {
  using Element = uint16_t;
  HEARTH_SIMD F get(const Element* p) { return load_f16(p); }
  HEARTH_SIMD F get_n(const Element* p, int n) { return load_f16_n(p, n); }
};
struct WeightBF16 {
  using Element = uint16_t;
  HEARTH_SIMD F get(const Element* p) { return load_bf16(p); }
  HEARTH_SIMD F get_n(const Element* p, int n) { return load_bf16_n(p, n); }
};
struct WeightQ8_0 {
  static constexpr int kBytes = 34;
  HEARTH_SIMD float scale(const uint8_t* block) { return from_f16(read_u16(block)); }
  HEARTH_SIMD BlockQ8 get(const uint8_t* block) { return load_q8_0(block + 2); }
  HEARTH_SIMD void widen(const uint8_t* block, F* out) { widen_q8_0(block + 2, out); }
};
struct WeightQ4_0 {
  static constexpr int kBytes = 18;
  HEARTH_SIMD float scale(const uint8_t* block) { return from_f16(read_u16(block)); }
  HEARTH_SIMD BlockQ4 get(const uint8_t* block) { return load_q4_0(block + 2); }
  HEARTH_SIMD void widen(const uint8_t* block, F* out) { widen_q4_0(block + 2, out); }
};
constexpr int kBlockVectors = kBlock / kW;
template <typename W>
concept InBlocks = requires {
  W::kBytes;
};

HEARTH_SIMD Q8Row q8_row(const void* row, int64_t n) {
  const int64_t blocks = n_blocks(n);
  auto* d = static_cast<float*>(const_cast<void*>(row));
  auto* total = reinterpret_cast<int32_t*>(d + blocks);
  return {d, total, total + blocks, reinterpret_cast<int8_t*>(total + 9 * blocks)};
}

HEARTH_SIMD const uint8_t* row_address(const RowsView& rows, int64_t r) {
  const auto index = static_cast<size_t>(rows.ids != nullptr ? rows.ids[r] : r);
  return static_cast<const uint8_t*>(rows.w) + index * rows.row_bytes;
}

// The first lines of rows [r, r + 4), so that rows in random places do not start with a wait for memory.
HEARTH_SIMD void prefetch_rows(const RowsView& rows, int64_t r) {
  if (rows.ids == nullptr) return;  // the hardware follows consecutive rows by itself
  for (int64_t i = r; i < r + 4 && i < rows.n; ++i) {
    const uint8_t* p = row_address(rows, i);
    for (int line = 0; line < 8; ++line) __builtin_prefetch(p + 64 * line);
  }
}

// R rows times T tokens. Each sum has one accumulator that runs over the columns in order, whatever R and T are.
template <typename W, int R, int T>
requires(!InBlocks<W>) HEARTH_SIMD void dot_tile(const uint8_t* const* w, int64_t cols, const uint8_t* x,
                                                 size_t x_stride, float* y, int64_t y_stride) {
  using Element = typename W::Element;
  F acc[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  int64_t c = 0;
  for (; c + kW <= cols; c += kW) {
    F wv[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) wv[r] = W::get(reinterpret_cast<const Element*>(w[r]) + c);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const F xv = load(reinterpret_cast<const float*>(x + static_cast<size_t>(t) * x_stride) + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][t] = fma(wv[r], xv, acc[r][t]);
    }
  }
  if (c < cols) {
    const int n = static_cast<int>(cols - c);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const F xv = load_n(reinterpret_cast<const float*>(x + static_cast<size_t>(t) * x_stride) + c, n);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        acc[r][t] = fma(W::get_n(reinterpret_cast<const Element*>(w[r]) + c, n), xv, acc[r][t]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) y[t * y_stride + r] = sum(acc[r][t]);
  }
}

template <typename W, int R, int T>
requires InBlocks<W> HEARTH_SIMD void dot_tile(const uint8_t* const* w, int64_t cols, const uint8_t* x, size_t x_stride,
                                               float* y, int64_t y_stride) {
  F8 acc[R][T];
  Q8Row xs[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    xs[t] = q8_row(x + static_cast<size_t>(t) * x_stride, cols);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r][t] = zero8();
  }
  for (int64_t b = 0; b < cols / kBlock; ++b) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint8_t* block = w[r] + b * W::kBytes;
      const auto wv = W::get(block);
      const float d = W::scale(block);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        acc[r][t] = fma8(dot(wv, xs[t].q + kBlock * b, xs[t].offset + 8 * b), d * xs[t].d[b], acc[r][t]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) y[t * y_stride + r] = sum8(acc[r][t]);
  }
}

// R rows times any number of tokens, four at a time.
template <typename W, int R>
HEARTH_SIMD void dot_group(const uint8_t* const* w, int64_t cols, const uint8_t* x, size_t x_stride, int64_t T,
                           float* y, int64_t y_stride) {
  for (int64_t t = 0; t < T; t += 4) {
    const uint8_t* xt = x + static_cast<size_t>(t) * x_stride;
    float* yt = y + t * y_stride;
    switch (T - t) {
      case 1:
        dot_tile<W, R, 1>(w, cols, xt, x_stride, yt, y_stride);
        break;
      case 2:
        dot_tile<W, R, 2>(w, cols, xt, x_stride, yt, y_stride);
        break;
      case 3:
        dot_tile<W, R, 3>(w, cols, xt, x_stride, yt, y_stride);
        break;
      default:
        dot_tile<W, R, 4>(w, cols, xt, x_stride, yt, y_stride);
        break;
    }
  }
}

template <typename W>
void dot_rows(RowsView rows, int64_t cols, const void* x, size_t x_stride, int64_t T, float* y, int64_t y_stride) {
  const auto* xb = static_cast<const uint8_t*>(x);
  const uint8_t* w[4];
  int64_t r = 0;
  if (T == 1) {
    for (; r + 4 <= rows.n; r += 4) {
      prefetch_rows(rows, r + 4);
      for (int i = 0; i < 4; ++i) w[i] = row_address(rows, r + i);
      dot_tile<W, 4, 1>(w, cols, xb, x_stride, y + r, y_stride);
    }
  } else {
    for (; r + kRowsSmallT <= rows.n; r += kRowsSmallT) {
      prefetch_rows(rows, r + kRowsSmallT);
      for (int i = 0; i < kRowsSmallT; ++i) w[i] = row_address(rows, r + i);
      dot_group<W, kRowsSmallT>(w, cols, xb, x_stride, T, y + r, y_stride);
    }
  }
  for (; r < rows.n; ++r) {
    w[0] = row_address(rows, r);
    dot_group<W, 1>(w, cols, xb, x_stride, T, y + r, y_stride);
  }
}

// acc += R rows with factors v, one row after the other.
template <typename W, int R>
requires(!InBlocks<W>) HEARTH_SIMD void axpy_group(const uint8_t* const* w, int64_t cols, const float* v, float* acc) {
  using Element = typename W::Element;
  F factor[R];
  for (int r = 0; r < R; ++r) factor[r] = set1(v[r]);
  int64_t c = 0;
  for (; c + kW <= cols; c += kW) {
    F a = load(acc + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a = fma(W::get(reinterpret_cast<const Element*>(w[r]) + c), factor[r], a);
    store(acc + c, a);
  }
  if (c < cols) {
    const int n = static_cast<int>(cols - c);
    F a = load_n(acc + c, n);
    for (int r = 0; r < R; ++r) a = fma(W::get_n(reinterpret_cast<const Element*>(w[r]) + c, n), factor[r], a);
    store_n(acc + c, a, n);
  }
}

template <typename W, int R>
requires InBlocks<W> HEARTH_SIMD void axpy_group(const uint8_t* const* w, int64_t cols, const float* v, float* acc) {
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    F a[kBlockVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kBlockVectors; ++i) a[i] = load(acc + kBlock * b + kW * i);
#pragma GCC unroll 4
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

template <typename W>
void axpy_rows(RowsView rows, int64_t cols, const float* v, float* acc) {
  const uint8_t* w[4];
  int64_t r = 0;
  for (; r + 4 <= rows.n; r += 4) {
    prefetch_rows(rows, r + 4);
    for (int i = 0; i < 4; ++i) w[i] = row_address(rows, r + i);
    axpy_group<W, 4>(w, cols, v + r, acc);
  }
  for (; r < rows.n; ++r) {
    w[0] = row_address(rows, r);
    axpy_group<W, 1>(w, cols, v + r, acc);
  }
}

template <typename W>
requires(!InBlocks<W>) void to_float(const void* row, float* out, int64_t n) {
  const auto* w = static_cast<const typename W::Element*>(row);
  int64_t c = 0;
  for (; c + kW <= n; c += kW) store(out + c, W::get(w + c));
  if (c < n) store_n(out + c, W::get_n(w + c, static_cast<int>(n - c)), static_cast<int>(n - c));
}

template <typename W>
requires InBlocks<W>
void to_float(const void* row, float* out, int64_t n) {
  for (int64_t b = 0; b < n / kBlock; ++b) {
    const uint8_t* block = static_cast<const uint8_t*>(row) + b * W::kBytes;
    F q[kBlockVectors];
    W::widen(block, q);
    for (int i = 0; i < kBlockVectors; ++i) store(out + kBlock * b + kW * i, mul(q[i], set1(W::scale(block))));
  }
}
