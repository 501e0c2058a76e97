#pragma once
// Launchers of all kernels. Each enqueues on gpu.stream and returns; shapes are as in core/device.h.
#include <functional>
#include <span>

#include "core/device.h"
#include "cuda/launch.cuh"

namespace hearth::cuda {

struct InputNorm;  // staged_input.cuh
struct OutputNorm;
// Enqueues a kernel that makes a vector x of one token; if `half` is set, the kernel leaves half of that norm of x.
using Maker = std::function<void(const Gpu& gpu, const OutputNorm* half)>;

// --- matvec.cu: few tokens ---
constexpr int kMaxParts = 4;
// parts: 1 to kMaxParts of one type and one number of columns. Of one token,
// norm: the input is this norm's result, which the kernel makes on the way (can_norm(); with quantised weights from
//   norm->unscaled, and with at least as many rows as columns);
// next: the kernel leaves half of this norm of its result (can_leave_norm()).
void matvec(const Gpu& gpu, std::span<const MatmulPart> parts, Act in, int64_t T, const InputNorm* norm = nullptr,
            const OutputNorm* next = nullptr);
bool can_norm(const Matrix& w);
bool can_leave_norm(const Gpu& gpu, const Matrix& w);

// --- ffn.cu ---
// Where the product of gate and up goes: f32 and, for quantised down, the 8-bit form.
// One token, gate and up in one pass, where ffn_fusable(). norm: as in matvec().
bool ffn_fusable(const FfnShard& shard);
void ffn_gate_up(const Gpu& gpu, const FfnShard& shard, Act in, Act hidden, const InputNorm* norm = nullptr);
// hidden[t][k] = act(gate[t][k] + bias) * up_act(up[t][k] + bias). `up` may be null; hidden may be gate.
void ffn_combine(const Gpu& gpu, const FfnShard& shard, const float* gate, const float* up, int64_t T, float* hidden);

// --- ffn_sparse.cu ---
struct SparseScratch {
  float* gate = nullptr;     // [n] activations of the gate, by candidate
  float* value = nullptr;    // [n] of the active neurons
  int32_t* ids = nullptr;    // [n]
  int32_t* count = nullptr;  // [1]
};
// Gate rows [begin, end) of a shard, without up and down.
FfnShard gate_rows(const FfnShard& shard, int64_t begin, int64_t end);
// Fills scratch.ids/value/count (and the optional outputs of `sparse`).
void ffn_select(const Gpu& gpu, const FfnShard& shard, const SparseArgs& sparse, Act in, const SparseScratch& scratch);
// The active ones of the predicted neurons, whose gates are in scratch.gate: only what ffn_select() does last.
void list_active(const Gpu& gpu, const SparseArgs& sparse, const SparseScratch& scratch);

// --- down.cu: y += bias + sum_i value[i] * down_t[ids[i]], i < count; ids and count null = all rows in order ---
// Scratch: partial sums, and counters that must be zero at first.
struct DownScratch {
  size_t partial_bytes = 0;
  size_t counter_bytes = 0;
};
DownScratch down_scratch(int64_t n_embd);
void down_rows(const Gpu& gpu, const Matrix& down_t, const float* value, const int32_t* ids, const int32_t* count,
               Vector bias, float* partial, unsigned* counters, float* y);

// --- norm.cu ---
void norm(const Gpu& gpu, const NormArgs& args, const float* x, int64_t T, Act out);
// The 8-bit form of rows of n activations.
void quantize_rows(const Gpu& gpu, const float* x, int64_t T, int64_t n, void* q8);

// --- rope_kv.cu ---
void rope_kv(const Gpu& gpu, const RopeKvArgs& args, int64_t T);

// --- attention_decode.cu: few tokens, the context split over blocks ---
// Scratch for up to max_tokens tokens: partial results, and counters that must be zero at first.
struct AttentionScratch {
  size_t partial_bytes = 0;
  size_t counter_bytes = 0;
};
AttentionScratch attention_scratch(const Gpu& gpu, int64_t n_head, int64_t n_head_kv, int64_t head_dim,
                                   int64_t max_tokens);
// rope: of the one token, to be done on the way (OpQueue::take_rope()), or null.
void attention_decode(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* partial, unsigned* counters, Act out,
                      const RopeKvArgs* rope);

// --- attention_prefill.cu: many tokens, tensor cores ---
void attention_prefill(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* out);

// --- embed_argmax.cu ---
void embed(const Gpu& gpu, const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
           int64_t position_offset, int64_t T, float* x);
constexpr int64_t kArgmaxBlocks = 64;
void argmax(const Gpu& gpu, const float* logits, int64_t n, unsigned long long* partial, int32_t* id);

// --- convert.cu: inputs of the tensor-core products ---
void convert_rows(const Gpu& gpu, const float* x, int64_t n, DType to, void* out);  // f16 (saturating) or bf16
void dequantize(const Gpu& gpu, const Matrix& w, int64_t first_row, int64_t n_rows, f16_t* out);
void add_bias(const Gpu& gpu, Vector bias, int64_t T, float* y, int64_t y_stride);  // y[t][r] += bias[r]

}  // namespace hearth::cuda
