#include "cpu/product_rate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <vector>

#include "core/buffer.h"
#include "core/tensor.h"
#include "cpu/cpu.h"

namespace hearth::cpu {

double measure_product_rate(ThreadTeam& team, DType weights) {
  // A layer's width, and a batch beyond which the rate hardly rises: reading the weights is hidden by the arithmetic.
  constexpr int64_t kRows = 4096, kCols = 4096, kTokens = 64;
  constexpr int kRuns = 3;
  const auto device = make_device(team);
  Limits limits;
  limits.max_tokens = kTokens;
  limits.max_cols = limits.max_rows = limits.n_ff = limits.n_embd = kRows;
  limits.quantized_weights = is_quantized(weights);
  device->reserve(limits);
  Matrix w{weights, kRows, kCols, nullptr};
  const HostBuffer data(w.bytes());
  // Any defined values; written, because untouched pages would all be one page of zeros.
  std::memset(const_cast<std::byte*>(data.data()), 1, data.bytes());
  w.data = data.data();
  std::vector<float> x(kTokens * kCols, 1.0f), y(kTokens * kRows);
  std::vector<std::byte> q8(kTokens * device->q8_bytes(kCols));
  const Act in{x.data(), is_quantized(weights) ? q8.data() : nullptr};
  device->quantize(in, kTokens, kCols);
  const std::array parts = {MatmulPart{.w = w, .bias = {}, .y = y.data()}};
  double best = 0;
  for (int run = -1; run < kRuns; ++run) {  // one to warm up
    const auto begin = std::chrono::steady_clock::now();
    device->matmul(parts, in, kTokens);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (run >= 0) best = std::max(best, 2.0 * kRows * kCols * kTokens / seconds.count());
  }
  return best;
}

}  // namespace hearth::cpu
