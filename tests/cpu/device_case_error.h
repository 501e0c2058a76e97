#pragma once
// Shared by the case files: the error model of f32 arithmetic, and limits for the devices under test.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/device_case.h"

namespace hearth::test {

inline constexpr double kUlp = 0x1p-24;      // half a unit in the last place of f32, relative
inline constexpr double kHalfUlp = 0x1p-11;  // the same of f16

// Relative error of a sum of n products in f32, against the sum of magnitudes.
inline double gamma(int64_t n) {
  return (static_cast<double>(n) / 4 + 16) * kUlp;
}

inline std::vector<double> as_double(const std::vector<float>& v) {
  return {v.begin(), v.end()};
}

// The 8-bit form, as values (core/tensor.h, Act::q8): blocks of 32 with d = max / 127.
inline std::vector<double> rounded_to_q8(const float* x, int64_t n) {
  std::vector<double> out(static_cast<size_t>(n));
  for (int64_t b = 0; b < n; b += 32) {
    float amax = 0;
    for (int64_t i = b; i < std::min(n, b + 32); ++i) amax = std::max(amax, std::fabs(x[i]));
    const float d = amax / 127.0f, inverse = amax > 0 ? 127.0f / amax : 0.0f;
    for (int64_t i = b; i < std::min(n, b + 32); ++i) {
      out[static_cast<size_t>(i)] = static_cast<double>(d) * std::nearbyint(x[i] * inverse);
    }
  }
  return out;
}

// Token t of x as products with weights of this type see it.
inline std::vector<double> seen(const std::vector<float>& x, int64_t t, int64_t n, DType weights) {
  const float* row = x.data() + t * n;
  return is_quantized(weights) ? rounded_to_q8(row, n) : std::vector<double>(row, row + n);
}

struct Sum {
  double value = 0, magnitude = 0;
  double error(int64_t n) const { return gamma(n) * magnitude + 2 * kUlp * std::fabs(value); }
};
inline Sum product(const Weights& w, int64_t r, const std::vector<double>& x) {
  Sum s;
  for (int64_t c = 0; c < w.cols; ++c) {
    const double p = static_cast<double>(w.values[static_cast<size_t>(r * w.cols + c)]) * x[static_cast<size_t>(c)];
    s.value += p;
    s.magnitude += std::fabs(p);
  }
  return s;
}

inline double bytes_of(const Weights& w) {
  return static_cast<double>(w.data.size());
}

inline std::vector<float> poison(size_t n) {
  return std::vector<float>(n, std::nanf(""));
}

inline Limits limits_for(int64_t T, int64_t rows, int64_t cols) {
  Limits l;
  l.max_tokens = T;
  l.max_rows = l.n_vocab = rows;
  l.max_cols = l.n_embd = cols;
  l.max_context = 1;
  l.n_head = l.n_head_kv = std::max<int64_t>(1, cols / 32);  // Bound::activations
  l.head_dim = 32;
  return l;
}
}  // namespace hearth::test
