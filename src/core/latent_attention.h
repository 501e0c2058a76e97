#pragma once
// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1). Keys and values of all heads are products of one
// latent a position. They are never made: what would make them is absorbed into queries and results, so that the cache
// holds a position's rotated elements and its latent, once for all heads (AttentionArgs::latent_norm).
#include <cstdint>

#include "core/ops.h"

namespace hearth {

// y[t][h] = the last n_tail elements of x[t][h], then w[h] times those before them.
struct HeadProducts {
  Matrix w;  // [n_head * rows][cols], head after head
  int64_t n_head = 0, n_tail = 0;
  const float* x = nullptr;  // [T][n_head][cols + n_tail]
  float* y = nullptr;        // [T][n_head][n_tail + rows]
  constexpr int64_t rows() const { return w.rows / n_head; }
  constexpr int64_t x_stride() const { return w.cols + n_tail; }
  constexpr int64_t y_stride() const { return n_tail + rows(); }
};

// Devices that compute it. Up to kFewTokens tokens, a token's results have the same bits whatever the others are.
class LatentAttention {
 public:
  // Quantised weights read the 8-bit form of each head's elements, which the device makes on the way.
  virtual void head_products(const HeadProducts& products, int64_t T) = 0;

 protected:
  ~LatentAttention() = default;
};

}  // namespace hearth
