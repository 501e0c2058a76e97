#pragma once
// What a device's operations need besides their operands: pieces of one allocation, as large as its limits ask for.
#include "core/device.h"
#include "cuda/exchange.cuh"
#include "cuda/launch.cuh"

namespace hearth::cuda {

// Batches of at most this many tokens go through the matvec kernels. For quantised weights these win until dequantising
// for the tensor cores is worth its traffic (it writes and reads 2 bytes a weight).
constexpr int64_t kMatvecTokensQuantized = 4;
constexpr int64_t kMatvecTokens = 1;
// Batches of at most this many tokens use the attention that splits the context.
constexpr int64_t kDecodeTokens = 8;

struct DeviceScratch {
  float* gate = nullptr;      // [max_tokens][n_ff]
  float* up = nullptr;        // [max_tokens][n_ff]
  void* hidden_q8 = nullptr;  // [few tokens][n_ff] in the 8-bit form
  float* attention = nullptr;
  unsigned* counters = nullptr;  // of the attention; zero between launches
  float* down = nullptr;
  unsigned* down_counters = nullptr;  // zero between launches
  void* norm = nullptr;               // for OpQueue::set_scratch()
  int32_t* ids = nullptr;             // [n_ff]
  int32_t* count = nullptr;
  uint32_t* mask = nullptr;     // [n_ff / 32] of neurons
  unsigned* arrived = nullptr;  // blocks that have written their part of the mask; zero between kernels
  Exchange exchange;            // of the predictor
  float* hint = nullptr;        // [n_ff] hidden vector of hints
  unsigned long long* argmax = nullptr;
  void *gemm_workspace = nullptr, *gemm_input = nullptr, *gemm_slab = nullptr;  // for Gemm::set_scratch()

  // Lays the pieces out from `base` on and returns their bytes together; without `base` only that.
  size_t place(const Gpu& gpu, const Limits& limits, std::byte* base);
};

}  // namespace hearth::cuda
