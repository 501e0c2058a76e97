#include "predictor/products.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/error.h"

namespace hearth::predictor {
namespace {

constexpr int64_t kMaxTokens = 256;    // rows of a multiplied at once: both sides of a tile stay in the cache
constexpr int64_t kMaxDepth = 4096;    // longest sum of one product; longer ones are added up
constexpr int64_t kMaxColumns = 4096;  // of b packed at once
constexpr int64_t kRowsPerPiece = 16;  // of a thread's share in copying
constexpr int64_t kAdamPiece = 4096;   // values a thread updates at once

bool covers(const Block& a, const Block& b) {
  return a.rows == b.rows && a.cols == b.cols && a.stride == a.cols && b.stride == b.cols;
}

}  // namespace

int64_t tile_rows(int64_t cols) {
  return std::max<int64_t>(64, kTileValues / cols / 64 * 64);
}

HostProducts::HostProducts(Device& device, ThreadTeam& team) : device_(device), team_(team) {
  HEARTH_CHECK(device.is_host(), "these products are computed in host memory");
  Limits limits;
  limits.max_tokens = kMaxTokens;
  limits.max_cols = limits.max_rows = limits.n_embd = limits.n_ff = std::max(kMaxDepth, kMaxColumns);
  device_.reserve(limits);
}

float* HostProducts::allocate_values(int64_t n) {
  auto* values = new float[static_cast<size_t>(n)]();
  count(n);
  return values;
}
void HostProducts::release_values(float* data, int64_t n) {
  delete[] data;
  uncount(n);
}

void HostProducts::write(const Matrix& host, const Block& to) {
  HEARTH_CHECK(host.rows == to.rows && host.cols == to.cols);
  const auto to_float = traits(host.type).to_float;
  team_.for_chunks(host.rows, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) to_float(host.row(r), to.data + r * to.stride, to.cols);
  });
}

void HostProducts::read(const Block& from, float* host, int64_t stride) {
  const int64_t step = stride == 0 ? from.cols : stride;
  team_.for_chunks(from.rows, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(host + r * step, from.data + r * from.stride, static_cast<size_t>(from.cols) * sizeof(float));
    }
  });
}

const float* HostProducts::packed(const Operand& x, int64_t first, int64_t n, int64_t k, int64_t n_k, float scale,
                                  std::vector<float>& scratch) {
  const Block& b = x.block;
  if (!x.transposed && scale == 1.0f && b.stride == n_k) return b.data + first * b.stride + k;
  scratch.resize(static_cast<size_t>(n * n_k));
  team_.for_chunks(n, kRowsPerPiece, [&](int64_t begin, int64_t end, int) {
    if (x.transposed) {  // a few rows of the result at a time, so that each line of b is used whole
      for (int64_t c = 0; c < n_k; ++c) {
        const float* from = b.data + (k + c) * b.stride + first;
        for (int64_t r = begin; r < end; ++r) scratch[static_cast<size_t>(r * n_k + c)] = scale * from[r];
      }
    } else {
      for (int64_t r = begin; r < end; ++r) {
        const float* from = b.data + (first + r) * b.stride + k;
        float* to = scratch.data() + r * n_k;
        for (int64_t c = 0; c < n_k; ++c) to[c] = scale * from[c];
      }
    }
  });
  return scratch.data();
}

void HostProducts::multiply(const Operand& a, const Operand& b, const Block& c, ProductForm form) {
  const int64_t rows = a.rows(), cols = b.cols(), depth = a.cols();
  HEARTH_CHECK(b.rows() == depth && c.rows == rows && c.cols == cols && depth > 0, "a product of {} x {} and {} x {}",
               rows, depth, b.rows(), cols);
  const Operand columns{b.block, !b.transposed};  // the device multiplies rows by rows
  for (int64_t k = 0; k < depth; k += kMaxDepth) {
    const int64_t n_k = std::min(kMaxDepth, depth - k);
    for (int64_t col = 0; col < cols; col += kMaxColumns) {
      const int64_t n_cols = std::min(kMaxColumns, cols - col);
      const Matrix w{DType::f32, n_cols, n_k, packed(columns, col, n_cols, k, n_k, 1.0f, packed_b_)};
      for (int64_t row = 0; row < rows; row += kMaxTokens) {
        const int64_t n_rows = std::min(kMaxTokens, rows - row);
        const float* x = packed(a, row, n_rows, k, n_k, form.scale, packed_a_);
        const std::array parts = {MatmulPart{.w = w,
                                             .bias = {},
                                             .y = c.data + row * c.stride + col,
                                             .y_stride = c.stride,
                                             .accumulate = form.accumulate || k > 0}};
        device_.matmul(parts, Act{const_cast<float*>(x), nullptr}, n_rows);
      }
    }
  }
  device_.synchronize();
}

void HostProducts::adam(const Block& value, const Block& gradient, const Block& first, const Block& second,
                        const AdamStep& s) {
  HEARTH_CHECK(covers(value, gradient) && covers(value, first) && covers(value, second));
  const auto t = static_cast<float>(s.step);
  const float c1 = 1 - std::pow(s.beta1, t), c2 = 1 - std::pow(s.beta2, t);
  team_.for_chunks(value.rows * value.cols, kAdamPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const float g = gradient.data[i];
      const float m = s.beta1 * first.data[i] + (1 - s.beta1) * g;
      const float v = s.beta2 * second.data[i] + (1 - s.beta2) * g * g;
      first.data[i] = m, second.data[i] = v;
      value.data[i] -= s.rate * (m / c1 / (std::sqrt(v / c2) + s.epsilon) + s.decay * value.data[i]);
    }
  });
}

TokenProducts::TokenProducts(const Matrix& x, Products& products, size_t resident_bytes, int64_t tokens_at_once)
    : x_(x), products_(products), tokens_at_once_(std::min(tokens_at_once, tile_rows(x.cols))) {
  if (static_cast<size_t>(x.rows * x.cols) * sizeof(float) <= resident_bytes) resident_ = products.upload(x);
}

void TokenProducts::multiply(const Matrix& w, float* out) const {
  const bool resident = resident_->data != nullptr;
  const OwnedBlock weights = products_.upload(w);
  const int64_t at_once = std::min({x_.rows, tile_rows(w.rows), tokens_at_once_});
  const OwnedBlock product = products_.allocate(w.rows, at_once);
  const OwnedBlock visiting = resident ? OwnedBlock() : products_.allocate(at_once, x_.cols);
  for (int64_t t = 0; t < x_.rows; t += at_once) {
    const int64_t count = std::min(at_once, x_.rows - t);
    if (!resident) products_.write(x_.slice_rows(t, count), visiting->row_part(0, count));
    const Block tokens = resident ? resident_->row_part(t, count) : visiting->row_part(0, count);
    const Block part = product->part(0, 0, w.rows, count);
    products_.multiply(weights, transposed(tokens), part);
    products_.read(part, out + t, x_.rows);
  }
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
