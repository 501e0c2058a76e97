#include "cuda/device_scratch.cuh"

#include <algorithm>

#include "cuda/cuda.h"
#include "cuda/experts.cuh"
#include "cuda/gemm.cuh"
#include "cuda/info.cuh"
#include "cuda/kernels.cuh"
#include "cuda/layout.h"
#include "cuda/sparse.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

int64_t DeviceScratch::expert_tokens(const Limits& l) {
  if (l.n_named == 0) return 0;
  const auto sums = static_cast<int64_t>(Gemm::kWorkspaceBytes) / (l.n_named * l.n_embd * 4);
  return std::clamp<int64_t>(sums, 1, l.max_tokens);
}

size_t DeviceScratch::place(const Gpu& gpu, const Limits& l, std::byte* base) {
  size_t total = 0;
  const auto take = [&](auto*& piece, size_t bytes) {
    if (base != nullptr) piece = reinterpret_cast<std::decay_t<decltype(piece)>>(base + total);
    total += aligned(bytes);
  };
  const auto each = [](int64_t n, size_t bytes) { return static_cast<size_t>(n) * bytes; };
  const int64_t T = l.max_tokens, few = std::min(T, kFewTokens);
  const int64_t n_ff = round_up(l.n_ff, 32), widest = std::max({l.max_cols, l.n_ff, l.n_embd});
  take(gate, each(T * n_ff, 4));
  take(up, each(T * n_ff, 4));
  take(hidden_q8, each(few, static_cast<size_t>(q8_row_bytes(n_ff))));
  const AttentionScratch attend = attention_scratch(gpu, l.n_head, l.n_head_kv, l.head_dim, few);
  take(attention, attend.partial_bytes);
  attention_bytes = attend.partial_bytes;
  take(counters, attend.counter_bytes);
  const DownScratch rows = down_scratch(l.n_embd, few);
  const size_t sums = std::max(rows.partial_bytes, ffn_list_bytes(gpu, l.n_embd, few));
  // Few tokens' sums and many tokens' products are never made at the same time.
  const bool has_gemm = T > kFewTokens;
  take(down, has_gemm ? std::max(sums, Gemm::kWorkspaceBytes) : sums);
  gemm_workspace = has_gemm ? down : nullptr;
  take(down_counters, rows.counter_bytes);
  take(norm, each(few, static_cast<size_t>(kUnscaledNormBytes)));
  take(mask, each(few * n_ff / 32, 4));
  take(exchange.words, each(kMaxFusedRank, 8));
  take(exchange.numbers, each(gpu.multiprocessors, 4));
  take(hint, each(n_ff, 4));
  take(candidates, each(n_ff, 4));
  take(ids, each(n_ff, 4));
  take(counts, 8);
  take(argmax, each(few * kArgmaxBlocks, 8));
  const int64_t values = l.n_named * l.n_ff_expert;
  take(expert_logits, each(T * l.n_experts, 4));
  take(expert_arrived, each(few, 4));
  take(expert_values, each(few * values, 4));
  take(expert_values_q8, l.quantized_weights ? each(few, static_cast<size_t>(q8_row_bytes(values))) : 0);
  if (!has_gemm) return total;
  const int64_t pairs = expert_tokens(l) * l.n_named;
  take(expert_groups, l.n_experts > 0 ? each(PairGroups::words(pairs, l.n_experts), 4) : 0);
  take(expert_hidden, each(pairs * l.n_ff_expert, 2));
  take(gemm_input, each(T * widest, 2));
  take(gemm_slab, l.quantized_weights ? std::max(Gemm::kSlabBytes, each(widest, 2)) : 0);
  return total;
}

size_t scratch_bytes(const GpuInfo& info, const Limits& limits) {
  activate(info.index);  // how many blocks of a kernel it holds is asked of it
  Gpu gpu;
  gpu.index = info.index, gpu.multiprocessors = info.multiprocessors;
  return DeviceScratch().place(gpu, limits, nullptr);
}

size_t q8_bytes(int64_t n) {
  return static_cast<size_t>(q8_row_bytes(n));
}

}  // namespace hearth::cuda
