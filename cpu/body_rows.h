// Operations on single rows: norms, quantisation, activations, exponentials. Part of every kernels_*.cpp.

// Calls op(offset, n) for the whole vectors of a row and then once for the rest, with n < kW.
template <typename Op>
HEARTH_SIMD void for_vectors(int64_t n, Op op) {
  int64_t i = 0;
  for (; i + kW <= n; i += kW) op(i, kW);
  if (i < n) op(i, static_cast<int>(n - i));
}
HEARTH_SIMD F get(const float* p, int n) {
  return n == kW ? load(p) : load_n(p, n);
}
HEARTH_SIMD void put(float* p, F x, int n) {
  n == kW ? store(p, x) : store_n(p, x, n);
}

// e^x with a relative error below 3e-7 on [-87, 88]; 0 below, e^88 above; NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; the polynomial is Cephes' expf (minimax, degree 7).
HEARTH_SIMD F exp(F x) {
  const F lowest = set1(-87.0f);
  const F y = min(set1(88.0f), max(lowest, x));  // the second operand wins when one is NaN
  const F n = round(mul(y, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  const F e = mul(add(fma(mul(p, r), r, r), set1(1.0f)), exp2_int(n));
  return if_greater(lowest, x, zero(), e);
}

// erf with an absolute error below 4e-7: Abramowitz and Stegun 7.1.26 (1.5e-7) and rounding.
HEARTH_SIMD F erf(F x) {
  const F a = abs(x), t = div(set1(1.0f), fma(a, set1(0.3275911f), set1(1.0f)));
  F p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F y = sub(set1(1.0f), mul(mul(p, t), exp(mul(a, sub(zero(), a)))));
  return if_greater(zero(), x, sub(zero(), y), y);
}

// tanh with a relative error below 5e-7: below 0.625 Cephes' tanhf (an odd polynomial), above 1 - 2 / (e^2a + 1).
HEARTH_SIMD F tanh(F x) {
  const F a = abs(x), square = mul(x, x);
  F p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const F small = fma(mul(p, square), x, x);
  const F large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(a, a)), set1(1.0f))));
  return if_greater(set1(0.625f), a, small, if_greater(zero(), x, sub(zero(), large), large));
}

constexpr int kClampedSilu = 6;  // hearth::Activation
HEARTH_SIMD F activate_vector(int act, F threshold, F z) {
  switch (act) {
    case 0:
      return if_greater(z, zero(), z, zero());  // relu
    case 1:
      return if_greater(z, threshold, z, zero());  // fat_relu
    case 2:
      return if_greater(z, zero(), mul(z, z), zero());  // relu2
    case 3:
      return div(z, add(set1(1.0f), exp(sub(zero(), z))));  // silu
    case 4:
      return mul(mul(set1(0.5f), z), add(set1(1.0f), erf(mul(z, set1(0.70710678118654752f)))));  // gelu
    case 5: {  // gelu_tanh: 1 + tanh(u) = 2 / (1 + e^-2u)
      const F u = mul(z, fma(mul(z, z), set1(-0.071354816f), set1(-1.5957691f)));
      return div(z, add(set1(1.0f), exp(u)));
    }
    default: {  // clamped_silu
      const F x = if_greater(z, threshold, threshold, z);
      return div(x, add(set1(1.0f), exp(mul(x, set1(-1.702f)))));
    }
  }
}

void activate(int act, float threshold, const float* z, const float* up, bool up_relu, int64_t n, float* value) {
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) {
        F v = activate_vector(act, set1(threshold), get(z + i, k));
        if (up != nullptr) {
          F u = get(up + i, k);
          if (up_relu) u = if_greater(u, zero(), u, zero());
          if (act == kClampedSilu) {
            const F low = set1(-threshold), high = set1(threshold);
            u = add(if_greater(u, high, high, if_greater(low, u, low, u)), set1(1.0f));
          }
          v = mul(v, u);
        }
        put(value + i, v, k);
      });
}

// scale * (x - shift) * weight + bias
HEARTH_SIMD void scale_row(const float* x, float shift, float factor, const float* weight, const float* bias, int64_t n,
                           float* y) {
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) {
        F v = mul(mul(sub(get(x + i, k), set1(shift)), set1(factor)), get(weight + i, k));
        if (bias != nullptr) v = add(v, get(bias + i, k));
        put(y + i, v, k);
      });
}

void rms_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y) {
  F squares = zero();
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) {
        const F v = get(x + i, k);
        squares = fma(v, v, squares);
      });
  scale_row(x, 0.0f, 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps), weight, bias, n, y);
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y) {
  F total = zero(), squares = zero();
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) { total = add(total, get(x + i, k)); });
  const float mean = sum(total) / static_cast<float>(n);
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) {
        F v = sub(get(x + i, k), set1(mean));
        if (k < kW) {  // the padding is not x
          float lanes[kW] = {};
          store_n(lanes, v, k);
          v = load(lanes);
        }
        squares = fma(v, v, squares);
      });
  scale_row(x, mean, 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps), weight, bias, n, y);
}

// The bits are compared as integers, where infinities and NaN are the largest of all: a block that holds one gets d =
// NaN.
void quantize_block(const float* x, int8_t* q, float* d, int32_t* offset, int32_t* total, int32_t* half) {
  const uint32_t amax_bits = largest_magnitude(x);
  float amax;
  __builtin_memcpy(&amax, &amax_bits, sizeof amax);
  const bool finite = amax_bits < 0x7F800000u;
  *d = finite ? amax / 127.0f : __builtin_nanf("");
  const float inverse = finite && amax > 0.0f ? 127.0f / amax : 0.0f;
  const F low = set1(-127.0f), high = set1(127.0f);
  F rounded[kBlockVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kBlockVectors; ++i) {
    rounded[i] = finite ? min(high, max(low, round(mul(load(x + i * kW), set1(inverse))))) : zero();
  }
  *total = store_q8(rounded, q, offset);
  *half = offset[0] + offset[1] + offset[2] + offset[3];
}

void quantize(const float* x, int64_t n, void* out) {
  const Q8Row row = q8_row(out, n);
  for (int64_t b = 0; b < n_blocks(n); ++b) {
    const int64_t left = n - b * kBlock;
    float padded[kBlock] = {};
    if (left < kBlock) __builtin_memcpy(padded, x + b * kBlock, static_cast<size_t>(left) * sizeof(float));
    quantize_block(left < kBlock ? padded : x + b * kBlock, row.q + b * kBlock, row.d + b, row.offset + 8 * b,
                   row.total + b, row.half + b);
  }
}

void to_f16(const float* x, int64_t n, uint16_t* y) {
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) { store_f16_n(y + i, get(x + i, k), k); });
}
void add_row(const float* x, int64_t n, float* y) {
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) { put(y + i, add(get(y + i, k), get(x + i, k)), k); });
}
void scale_by(float factor, int64_t n, float* y) {
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) { put(y + i, mul(get(y + i, k), set1(factor)), k); });
}
void soft_cap(float cap, int64_t n, float* y) {
  for_vectors(
      n, [&](int64_t i, int k) __attribute__((always_inline)) {
        put(y + i, mul(tanh(mul(get(y + i, k), set1(1.0f / cap))), set1(cap)), k);
      });
}
void axpy_row(float factor, const float* x, int64_t n, float* y) {
  for_vectors(
      n, [&](int64_t i, int k)
             __attribute__((always_inline)) { put(y + i, fma(get(x + i, k), set1(factor), get(y + i, k)), k); });
}

float max_row(const float* x, int64_t n) {
  float m = -__builtin_inff();
  int64_t i = 0;
  F v = set1(m);
  for (; i + kW <= n; i += kW) v = max(v, load(x + i));
  if (i > 0) m = largest(v);
  for (; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

float exp_sum(float* x, int64_t n, float largest_x) {
  F total = zero();
  int64_t i = 0;
  for (; i + kW <= n; i += kW) {
    const F e = exp(sub(load(x + i), set1(largest_x)));
    store(x + i, e);
    total = add(total, e);
  }
  float rest = 0;
  if (i < n) {
    const int k = static_cast<int>(n - i);
    store_n(x + i, exp(sub(load_n(x + i, k), set1(largest_x))), k);
    for (; i < n; ++i) rest += x[i];
  }
  return sum(total) + rest;
}

void rotate(float* head, const float* cos, const float* sin, int64_t half, bool neox) {
  if (neox) {
    for (int64_t i = 0; i < half; ++i) {
      const float x = head[i], y = head[i + half];
      head[i] = x * cos[i] - y * sin[i];
      head[i + half] = x * sin[i] + y * cos[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float x = head[2 * i], y = head[2 * i + 1];
    head[2 * i] = x * cos[i] - y * sin[i];
    head[2 * i + 1] = x * sin[i] + y * cos[i];
  }
}

// H heads by V vectors of columns: each row of v is converted once for all heads.
template <int H, int V>
HEARTH_SIMD void weighted_sum_tile(const uint16_t* v, int64_t v_stride, int64_t n, const float* p, int64_t p_stride,
                                   float* o, int64_t o_stride) {
  F acc[H][V];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) acc[h][i] = zero();
  }
  for (int64_t j = 0; j < n; ++j) {
    F row[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) row[i] = load_f16(v + j * v_stride + i * kW);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const F factor = set1(p[h * p_stride + j]);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) acc[h][i] = fma(factor, row[i], acc[h][i]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) store(o + h * o_stride + i * kW, acc[h][i]);
  }
}

template <int H>
HEARTH_SIMD void weighted_sum_heads(const uint16_t* v, int64_t v_stride, int64_t d, int64_t n, const float* p,
                                    int64_t p_stride, float* o, int64_t o_stride) {
  constexpr int V = kW == 8 ? 2 : 4;  // H * V accumulators within the registers of the instruction set
  int64_t c = 0;
  for (; c + V * kW <= d; c += V * kW) weighted_sum_tile<H, V>(v + c, v_stride, n, p, p_stride, o + c, o_stride);
  for (; c + kW <= d; c += kW) weighted_sum_tile<H, 1>(v + c, v_stride, n, p, p_stride, o + c, o_stride);
  if (c == d) return;
  const int rest = static_cast<int>(d - c);
  for (int h = 0; h < H; ++h) {
    F acc = zero();
    for (int64_t j = 0; j < n; ++j) acc = fma(set1(p[h * p_stride + j]), load_f16_n(v + j * v_stride + c, rest), acc);
    store_n(o + h * o_stride + c, acc, rest);
  }
}

void weighted_sum(const uint16_t* v, int64_t v_stride, int64_t d, int64_t n, const float* p, int64_t p_stride,
                  int n_heads, float* o, int64_t o_stride) {
  int h = 0;
  for (; h + 4 <= n_heads; h += 4)
    weighted_sum_heads<4>(v, v_stride, d, n, p + h * p_stride, p_stride, o + h * o_stride, o_stride);
  for (; h + 2 <= n_heads; h += 2)
    weighted_sum_heads<2>(v, v_stride, d, n, p + h * p_stride, p_stride, o + h * o_stride, o_stride);
  for (; h < n_heads; ++h)
    weighted_sum_heads<1>(v, v_stride, d, n, p + h * p_stride, p_stride, o + h * o_stride, o_stride);
}

uint64_t read_all(const void* data, size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  uint64_t x = 0;
  for (size_t i = 0; i + 256 <= bytes; i += 256) x ^= xor_all(p + i);
  return x;
}
