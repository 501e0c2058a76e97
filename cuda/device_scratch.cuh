#pragma once
// The scratch that a device's operations need: pieces of one allocation, as large as its limits ask for.
#include "core/ops.h"
#include "cuda/exchange.cuh"
#include "cuda/launch.cuh"

namespace hearth::cuda {

// Few tokens (up to kFewTokens) and batches go through different kernels.
struct DeviceScratch {
  float* gate = nullptr;      // [max_tokens][n_ff]
  float* up = nullptr;        // [max_tokens][n_ff]
  void* hidden_q8 = nullptr;  // [few tokens][n_ff] in the 8-bit form
  float* attention = nullptr;
  size_t attention_bytes = 0;
  unsigned* counters = nullptr;  // of the attention; zero between launches
  float* down = nullptr;
  unsigned* down_counters = nullptr;     // zero between launches
  std::byte* norm = nullptr;             // [few tokens] what products leave for norms, kUnscaledNormBytes each
  int32_t* candidates = nullptr;         // [n_ff]
  int32_t* ids = nullptr;                // [n_ff]
  int32_t* counts = nullptr;             // of candidates, of ids
  uint32_t* mask = nullptr;              // [few tokens][n_ff / 32] of neurons
  Exchange exchange;                     // of the predictor
  float* hint = nullptr;                 // [n_ff] hidden vector of hints
  float* expert_logits = nullptr;        // [max_tokens][n_experts]
  unsigned* expert_arrived = nullptr;    // [few tokens] zero between launches
  float* expert_values = nullptr;        // [few tokens][n_named * n_ff_expert]
  void* expert_values_q8 = nullptr;      // the same in the 8-bit form
  int32_t* expert_groups = nullptr;      // PairGroups of expert_tokens()
  void* expert_hidden = nullptr;         // [expert_tokens() * n_named][n_ff_expert] in f16
  unsigned long long* argmax = nullptr;  // [few tokens][kArgmaxBlocks]
  void *gemm_workspace = nullptr, *gemm_input = nullptr, *gemm_slab = nullptr;  // for Gemm::set_scratch()

  // Tokens of a prompt whose experts are computed at once: their sums are in the workspace of the matrix products.
  static int64_t expert_tokens(const Limits& limits);

  // Lays the pieces out from `base` on and returns their bytes together; without `base` only that.
  size_t place(const Gpu& gpu, const Limits& limits, std::byte* base);
};

}  // namespace hearth::cuda
