#include "predictor/products.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace hearth::predictor {
namespace {
constexpr int64_t kMaxTokens = 256;  // rows of x multiplied at once: both sides of a tile stay in the cache
}

Products::Products(Device& device, int64_t max_cols) : device_(device) {
  HEARTH_CHECK(device.is_host(), "fitting multiplies in host memory");
  Limits limits;
  limits.max_tokens = kMaxTokens;
  limits.max_cols = limits.max_rows = limits.n_embd = limits.n_ff = std::max(max_cols, kTokensAtOnce);
  device_.reserve(limits);
}

void Products::multiply(const Matrix& w, const float* x, int64_t T, float* out) {
  HEARTH_CHECK(!is_quantized(w.type));
  for (int64_t t = 0; t < T; t += kMaxTokens) {
    const std::array part = {MatmulPart{.w = w, .bias = {}, .y = out + t * w.rows}};
    device_.matmul(part, {const_cast<float*>(x) + t * w.cols, nullptr}, std::min(kMaxTokens, T - t));
  }
  device_.synchronize();
}

void transpose(const float* in, int64_t rows, int64_t cols, float* out) {
  constexpr int64_t tile = 32;
  for (int64_t r0 = 0; r0 < rows; r0 += tile) {
    for (int64_t c0 = 0; c0 < cols; c0 += tile) {
      for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r) {
        for (int64_t c = c0; c < std::min(cols, c0 + tile); ++c) out[c * rows + r] = in[r * cols + c];
      }
    }
  }
}

std::vector<float> dequantized(const Matrix& m, int64_t first, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count * m.cols));
  for (int64_t r = 0; r < count; ++r) traits(m.type).to_float(m.row(first + r), values.data() + r * m.cols, m.cols);
  return values;
}

}  // namespace hearth::predictor
