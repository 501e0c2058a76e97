// Dot products of weight rows with up to a few tokens. Part of every kernels_*.cpp, after body_weights.h.
//
// Each sum has one accumulator that runs over the columns in order, whatever the number of rows and tokens that a tile
// has: the result of a row and a token has the same bits in every tile. A tile of several rows or tokens has enough
// independent sums to hide the latency of an addition; one row and one token alone are still read faster than memory
// delivers them.

// R rows times T tokens. Prefetches R rows at `ahead`, unless null.
template <Elements W, int R, int T, bool kNear>
HEARTH_SIMD void dot_tile(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                          size_t x_stride, float* y, int64_t y_stride) {
  using Element = typename W::Element;
  constexpr int kLines = 128 / sizeof(Element), kStep = kLines > kW ? kLines : kW;
  F acc[R][T];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[r][t] = zero();
  }
  const auto add_columns = [&](auto get_w, auto get_x) __attribute__((always_inline)) {
    F wv[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      wv[r] = get_w(reinterpret_cast<const Element*>(w[r]));
      if constexpr (T > 1) wv[r] = keep(wv[r]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      F xv = get_x(reinterpret_cast<const float*>(x + static_cast<size_t>(t) * x_stride));
      // With one token, x is best read for every row: memory then delivers 29 GB/s to a core instead of 25 (Zen 4).
      if constexpr (R > 1 && T > 1) xv = keep(xv);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][t] = fma(wv[r], xv, acc[r][t]);
    }
  };
  const auto add_vector = [&](int64_t c) __attribute__((always_inline)) {
    add_columns(
        [c](const Element* p) __attribute__((always_inline)) { return W::get(p + c); },
        [c](const float* p) __attribute__((always_inline)) { return load(p + c); });
  };
  int64_t c = 0;
  for (; c + kStep <= cols; c += kStep) {
    if (ahead != nullptr) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        prefetch<kNear>(ahead[r], c * static_cast<int64_t>(sizeof(Element)), kStep * sizeof(Element));
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStep; i += kW) add_vector(c + i);
  }
  for (; c + kW <= cols; c += kW) add_vector(c);
  if (c < cols) {
    const int n = static_cast<int>(cols - c);
    add_columns(
        [ c, n ](const Element* p) __attribute__((always_inline)) { return W::get_n(p + c, n); },
        [ c, n ](const float* p) __attribute__((always_inline)) { return load_n(p + c, n); });
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) y[t * y_stride + r] = sum(acc[r][t]);
  }
}

// The same for quantised rows. A block's products are added up in integers, exactly, and then as
// sum += products * (d_w * d_x), block after block: what panels (body_panel.h) give, too, so that bits do not depend on
// whether weights lie in rows or in panels.
template <Blocks W, int R, int T, bool kNear>
HEARTH_SIMD void dot_tile(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                          size_t x_stride, float* y, int64_t y_stride) {
  static_assert(R == 4);  // rows share a vector of sums
  Four acc[T];
  Q8Row xs[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    xs[t] = q8_row(x + static_cast<size_t>(t) * x_stride, cols);
    acc[t] = zero_four();
  }
  const auto add_span = [&](int64_t b, int span) __attribute__((always_inline)) {
    typename W::Span wv[R];
    const uint8_t* at[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      at[r] = w[r] + b * W::kBytes;
      wv[r] = W::get(at[r], span);
    }
    const SpanScales scales = load_scales(at, W::kBytes, span);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const auto xv = load_input(wv[0], xs[t].q + kBlock * b, xs[t].offset + 8 * b, span);
      acc[t] = add_products(wv, xv, scales, xs[t].d + b, span, acc[t]);
    }
  };
  constexpr int kStep = (T == 1 ? 4 : 2) * kSpan;  // blocks between two requests for later ones
  const int64_t blocks = cols / kBlock;
  int64_t b = 0;
  for (; b + kStep <= blocks; b += kStep) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (ahead != nullptr) prefetch<kNear>(ahead[r], b * W::kBytes, kStep * W::kBytes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kStep; i += kSpan) add_span(b + i, kSpan);
  }
  for (; b + kSpan <= blocks; b += kSpan) add_span(b, kSpan);
  if (b < blocks) add_span(b, static_cast<int>(blocks - b));
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) store_four(y + t * y_stride, acc[t]);
}

// Rows at once. Of two consecutive ones, a core reads more from memory than of one (f16 15.5 instead of 14.4 GB/s,
// Sapphire Rapids).
constexpr int kRowsAtOnce = 4;
template <typename W>
constexpr int kConsecutive = Elements<W> ? 2 : 4;

// R rows, which are in the nearest caches after the first tokens, times T tokens, T <= kFewTokens: in tiles of up to
// four tokens, and as many rows as the registers hold.
template <typename W, int R, bool kOne, bool kNear>
HEARTH_SIMD void dot_group(const uint8_t* const* w, const uint8_t* const* ahead, int64_t cols, const uint8_t* x,
                           size_t x_stride, int64_t T, float* y, int64_t y_stride) {
  if constexpr (kOne) {
    dot_tile<W, R, 1, kNear>(w, ahead, cols, x, x_stride, y, y_stride);
  } else {
    constexpr int kRows = Elements<W> && R > kTileRows ? kTileRows : R;
    const int64_t first = T <= 4 ? T : (T + 1) / 2;
    // Each of two passes asks for half of the rows ahead, so that memory is busy during both.
    const uint8_t* part[2][R];
    for (int r = 0; r < R; ++r) part[0][r] = r % 2 == 0 ? ahead[r] : w[r], part[1][r] = r % 2 == 0 ? w[r] : ahead[r];
    if (first < T) ahead = part[0];
    for (int64_t t = 0; t < T; t += first, ahead = part[1]) {
      const uint8_t* xt = x + static_cast<size_t>(t) * x_stride;
#pragma GCC unroll 1
      for (int r = 0; r < R; r += kRows) {
        const uint8_t* const* next = ahead + r;
        const auto tile = [&]<int N>() __attribute__((always_inline)) {
          dot_tile<W, kRows, N, kNear>(w + r, next, cols, xt, x_stride, y + t * y_stride + r, y_stride);
        };
        const int64_t n = T - t < first ? T - t : first;
        if (n == 2) tile.template operator()<2>();
        if (n == 3) tile.template operator()<3>();
        if (n == 4) tile.template operator()<4>();
      }
    }
  }
}

// The first rows of a list are asked for beforehand: they are nobody's next.
template <typename W, int R, bool kOne, bool kNear>
void dot_all(const RowsView& rows, const RowsView* then, int64_t cols, const uint8_t* x, size_t x_stride, int64_t T,
             float* y, int64_t y_stride) {
  const Ahead later{rows, then};
  const auto row_bytes = static_cast<int64_t>(rows.row_bytes);
  const int64_t distance = R * pieces_ahead(R * row_bytes);
  for (int64_t r = 0; rows.ids != nullptr && r < (rows.n < distance ? rows.n : distance); ++r) {
    prefetch<kNear>(row_address(rows, r), 0, row_bytes);
  }
  const uint8_t *w[R] = {}, *ahead[R] = {};
  int64_t r = 0;
  for (; r + R <= rows.n; r += R) {
    later.group(r, R, distance, w, ahead);
    dot_group<W, R, kOne, kNear>(w, ahead, cols, x, x_stride, T, y + r, y_stride);
  }
  if (r == rows.n) return;
  // Fewer are filled up with the last one.
  const int left = static_cast<int>(rows.n - r);
  later.group(r, left, distance, w, ahead);
  for (int i = left; i < R; ++i) w[i] = w[left - 1], ahead[i] = ahead[left - 1];
  float sums[kFewTokens * R];
  dot_group<W, R, kOne, kNear>(w, ahead, cols, x, x_stride, T, sums, R);
  for (int64_t t = 0; t < T; ++t) {
    for (int i = 0; i < left; ++i) y[t * y_stride + r + i] = sums[t * R + i];
  }
}

template <typename W>
void dot_rows(RowsView rows, const RowsView* then, int64_t cols, const void* x, size_t x_stride, int64_t T, float* y,
              int64_t y_stride) {
  const auto* xb = static_cast<const uint8_t*>(x);
  constexpr int R = kRowsAtOnce;
  if (T > 1) return dot_all<W, R, false, false>(rows, then, cols, xb, x_stride, T, y, y_stride);
  if (rows.near) return dot_all<W, R, true, true>(rows, then, cols, xb, x_stride, 1, y, y_stride);
  if (rows.ids != nullptr) return dot_all<W, R, true, false>(rows, then, cols, xb, x_stride, 1, y, y_stride);
  dot_all<W, kConsecutive<W>, true, false>(rows, then, cols, xb, x_stride, 1, y, y_stride);
}
