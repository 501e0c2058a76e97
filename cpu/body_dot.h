// Dot products of weight rows with one or several tokens. Part of every kernels_*.cpp, after body_weights.h.

// R rows times T tokens. Each sum has one accumulator that runs over the columns in order. Prefetches R rows at
// `ahead`, if set.
template <Elements W, int R, int T>
HEARTH_SIMD void dot_tile(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                          size_t x_stride, float* y, int64_t y_stride) {
  using Element = typename W::Element;
  constexpr int64_t kLine = 64 / sizeof(Element);
  F acc[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  int64_t c = 0;
  for (; c + kW <= cols; c += kW) {
    if (ahead != nullptr && c % kLine == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) prefetch(ahead[r], c * static_cast<int64_t>(sizeof(Element)), 64);
    }
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

template <Blocks W, int R, int T>
HEARTH_SIMD void dot_tile(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                          size_t x_stride, float* y, int64_t y_stride) {
  F8 acc[R][T];
  Q8Row xs[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    xs[t] = q8_row(x + static_cast<size_t>(t) * x_stride, cols);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r][t] = zero8();
  }
  for (int64_t b = 0; b < cols / kBlock; ++b) {
    if (ahead != nullptr && b % (64 / W::kBytes) == 0) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) prefetch(ahead[r], b * W::kBytes, 64);
    }
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
HEARTH_SIMD void dot_group(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                           size_t x_stride, int64_t T, float* y, int64_t y_stride) {
  for (int64_t t = 0; t < T; t += 4, ahead = nullptr) {
    const uint8_t* xt = x + static_cast<size_t>(t) * x_stride;
    float* yt = y + t * y_stride;
    switch (T - t) {
      case 1:
        dot_tile<W, R, 1>(w, ahead, cols, xt, x_stride, yt, y_stride);
        break;
      case 2:
        dot_tile<W, R, 2>(w, ahead, cols, xt, x_stride, yt, y_stride);
        break;
      case 3:
        dot_tile<W, R, 3>(w, ahead, cols, xt, x_stride, yt, y_stride);
        break;
      default:
        dot_tile<W, R, 4>(w, ahead, cols, xt, x_stride, yt, y_stride);
        break;
    }
  }
}

// R rows times one token, with four accumulators each: the additions need not wait for each other. The rows share the
// loads of x, and each is summed the same way whatever R is. Prefetches as many bytes at each `ahead`.
template <Elements W, int R, bool kNear>
HEARTH_SIMD void dot_one_token(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const void* x,
                               float* y) {
  using Element = typename W::Element;
  constexpr int kStep = 4 * kW;
  const auto* xf = static_cast<const float*>(x);
  const auto element = [&](int r, int64_t c) __attribute__((always_inline)) {
    return reinterpret_cast<const Element*>(w[r]) + c;
  };
  F acc[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[r][i] = zero();
  }
  int64_t c = 0;
  for (; c + kStep <= cols; c += kStep) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      prefetch<kNear>(ahead[r], c * static_cast<int64_t>(sizeof(Element)), kStep * sizeof(Element));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const F xv = load(xf + c + i * kW);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][i] = fma(W::get(element(r, c + i * kW)), xv, acc[r][i]);
    }
  }
  for (; c + kW <= cols; c += kW) {
    const F xv = load(xf + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r][0] = fma(W::get(element(r, c)), xv, acc[r][0]);
  }
  if (c < cols) {
    const int n = static_cast<int>(cols - c);
    const F xv = load_n(xf + c, n);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r][1] = fma(W::get_n(element(r, c), n), xv, acc[r][1]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) y[r] = sum(add(add(acc[r][0], acc[r][1]), add(acc[r][2], acc[r][3])));
}

template <Blocks W, int R, bool kNear>
HEARTH_SIMD void dot_one_token(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const void* x,
                               float* y) {
  const Q8Row xq = q8_row(x, cols);
  F8 acc[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[r][i] = zero8();
  }
  const int64_t blocks = cols / kBlock;
  const auto block_dot = [&](int r, int64_t b) __attribute__((always_inline)) {
    return dot(W::get(w[r] + b * W::kBytes), xq.q + kBlock * b, xq.offset + 8 * b);
  };
  int64_t b = 0;
  for (; b + 4 <= blocks; b += 4) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      prefetch<kNear>(ahead[r], b * W::kBytes, 4 * W::kBytes);
      float scales[4];  // through memory: loads broadcast for free
      scales4(w[r] + b * W::kBytes, W::kBytes, xq.d + b, scales);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[r][i] = fma8(block_dot(r, b + i), scales[i], acc[r][i]);
    }
  }
  for (; b < blocks; ++b) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      acc[r][0] = fma8(block_dot(r, b), W::scale(w[r] + b * W::kBytes) * xq.d[b], acc[r][0]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) y[r] = (sum8(acc[r][0]) + sum8(acc[r][1])) + (sum8(acc[r][2]) + sum8(acc[r][3]));
}

// One token, kMost rows at once. With kAsks the first rows are asked for beforehand: they are nobody's next.
template <typename W, int kMost, bool kNear, bool kAsks>
HEARTH_SIMD void dot_rows_one(const RowsView& rows, const RowsView* then, int64_t cols, const void* x, float* y) {
  const Ahead later{rows, then};
  const auto row_bytes = static_cast<int64_t>(rows.row_bytes);
  const int64_t distance = kMost * pieces_ahead(kMost * row_bytes);
  for (int64_t r = 0; kAsks && r < (rows.n < distance ? rows.n : distance); ++r) {
    prefetch<kNear>(row_address(rows, r), 0, row_bytes);
  }
  const uint8_t *w[kMost], *ahead[kMost];
  int64_t r = 0;
  for (; r + kMost <= rows.n; r += kMost) {
    later.group(r, kMost, distance, w, ahead);
    dot_one_token<W, kMost, kNear>(w, ahead, cols, x, y + r);
  }
  if constexpr (kMost > 2) {
    if (r + 2 <= rows.n) {
      later.group(r, 2, distance, w, ahead);
      dot_one_token<W, 2, kNear>(w, ahead, cols, x, y + r);
      r += 2;
    }
  }
  if constexpr (kMost > 1) {
    if (r < rows.n) {
      later.group(r, 1, distance, w, ahead);
      dot_one_token<W, 1, kNear>(w, ahead, cols, x, y + r);
    }
  }
}
// Consecutive rows at once: of two, a core reads more from memory than of one (f16 15.5 instead of 14.4 GB/s, Q8_0 14.1
// instead of 13.5, Sapphire Rapids); four-bit rows are bound by arithmetic, which two are slower at (11.6 and 12.6).
template <typename W>
constexpr int kConsecutive = 2;
template <>
constexpr int kConsecutive<WeightQ4_0> = 1;

template <typename W>
void dot_rows(RowsView rows, const RowsView* then, int64_t cols, const void* x, size_t x_stride, int64_t T, float* y,
              int64_t y_stride) {
  if (T == 1 && rows.ids == nullptr) return dot_rows_one<W, kConsecutive<W>, false, false>(rows, nullptr, cols, x, y);
  if (T == 1 && rows.near) return dot_rows_one<W, 4, true, true>(rows, then, cols, x, y);
  if (T == 1) return dot_rows_one<W, 4, false, true>(rows, then, cols, x, y);
  const auto* xb = static_cast<const uint8_t*>(x);
  const Ahead later{rows, then};
  const uint8_t *w[kRowsSmallT], *ahead[kRowsSmallT];
  int64_t r = 0;
  for (; r + kRowsSmallT <= rows.n; r += kRowsSmallT) {
    bool all = true;
    for (int i = 0; i < kRowsSmallT; ++i) {
      w[i] = row_address(rows, r + i);
      ahead[i] = later.row(r + kRowsSmallT + i);
      all = all && ahead[i] != nullptr;
    }
    dot_group<W, kRowsSmallT>(w, all ? ahead : nullptr, cols, xb, x_stride, T, y + r, y_stride);
  }
  for (; r < rows.n; ++r) {
    w[0] = row_address(rows, r);
    dot_group<W, 1>(w, nullptr, cols, xb, x_stride, T, y + r, y_stride);
  }
}
