#pragma once
// Matrix products in f32 on a host device's kernels, of any size: what fitting consists of.
#include <cstdint>
#include <vector>

#include "core/device.h"

namespace hearth::predictor {

constexpr int64_t kTokensAtOnce = 4096;  // of sums over tokens

class Products {
 public:
  // `device`, a host device nobody else uses (it is told its limits here), must outlive the object. max_cols: longest
  // row of any product, and no less than kTokensAtOnce.
  Products(Device& device, int64_t max_cols);

  // out[t][r] = sum_c w[r][c] x[t][c]; w f32, f16 or bf16, out [T][w.rows].
  void multiply(const Matrix& w, const float* x, int64_t T, float* out);
  // The same for f32 values: a [n][k], b [m][k], out [m][n].
  void multiply(const float* a, int64_t n, const float* b, int64_t m, int64_t k, float* out) {
    multiply({DType::f32, n, k, a, nullptr}, b, m, out);
  }

 private:
  Device& device_;
};

// out [cols][rows] of in [rows][cols].
void transpose(const float* in, int64_t rows, int64_t cols, float* out);
// Rows [first, first + count) as f32, whatever their type.
std::vector<float> dequantized(const Matrix& m, int64_t first, int64_t count);

}  // namespace hearth::predictor
