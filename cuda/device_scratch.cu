#include "cuda/device_scratch.cuh"

#include <algorithm>

#include "cuda/gemm.cuh"
#include "cuda/kernels.cuh"
#include "cuda/layout.h"
#include "cuda/sparse.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

size_t DeviceScratch::place(const Gpu& gpu, const Limits& l, std::byte* base) {
  size_t total = 0;
  const auto take = [&](auto*& piece, size_t bytes) {
    if (base != nullptr) piece = reinterpret_cast<std::decay_t<decltype(piece)>>(base + total);
    total += aligned(bytes);
  };
  const auto each = [](int64_t n, size_t bytes) { return static_cast<size_t>(n) * bytes; };
  const int64_t T = l.max_tokens, n_ff = round_up(l.n_ff, 32), widest = std::max({l.max_cols, l.n_ff, l.n_embd});
  take(gate, each(T * n_ff, 4));
  take(up, each(T * n_ff, 4));
  take(hidden_q8, each(std::min(T, kMatvecTokensQuantized), static_cast<size_t>(q8_row_bytes(n_ff))));
  const AttentionScratch attend = attention_scratch(gpu, l.n_head, l.n_head_kv, l.head_dim, std::min(T, kDecodeTokens));
  take(attention, attend.partial_bytes);
  take(counters, attend.counter_bytes);
  const DownScratch rows = down_scratch(l.n_embd);
  take(down, std::max(rows.partial_bytes, ffn_list_bytes(gpu, l.n_embd)));
  take(down_counters, rows.counter_bytes);
  take(norm, kUnscaledNormBytes);
  take(mask, each(n_ff / 32, 4));
  take(arrived, 4);
  take(exchange.words, each(kMaxFusedRank, 8));
  take(exchange.numbers, each(gpu.multiprocessors, 4));
  take(hint, each(n_ff, 4));
  take(ids, each(n_ff, 4));
  take(count, 4);
  take(argmax, each(kArgmaxBlocks, 8));
  if (T <= kMatvecTokens) return total;
  take(gemm_workspace, Gemm::kWorkspaceBytes);
  take(gemm_input, each(T * widest, 2));
  take(gemm_slab, l.quantized_weights ? std::max(Gemm::kSlabBytes, each(widest, 2)) : 0);
  return total;
}

}  // namespace hearth::cuda
