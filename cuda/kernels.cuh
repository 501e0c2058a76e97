#pragma once
// Launchers of all kernels. Each enqueues on gpu.stream and returns; shapes are as in core/ops.h.
#include <span>

#include "core/latent_attention.h"
#include "cuda/launch.cuh"

namespace hearth::cuda {

struct InputNorm;  // staged_input.cuh
struct OutputNorm;

// Operations on few tokens have a token dimension (token_grid()), up to kFewTokens: a token's result has the same bits
// as alone.

// --- matvec.cu: few tokens ---
constexpr int kMaxParts = 4;
inline int64_t y_stride(const MatmulPart& part) {
  return part.y_stride != 0 ? part.y_stride : part.w.rows;
}
// parts: 1 to kMaxParts of one type and one number of columns.
// norm: the input is this norm's result, which the kernel makes on the way (can_norm(); with quantised weights from
//   norm->unscaled, and with at least as many rows as columns);
// next: the kernel leaves half of this norm of its result (can_leave_norm()).
void matvec(const Gpu& gpu, std::span<const MatmulPart> parts, Act in, int64_t T, const InputNorm* norm = nullptr,
            const OutputNorm* next = nullptr);
bool can_norm(const Matrix& w);
bool can_leave_norm(const Gpu& gpu, const Matrix& w);

// --- ffn.cu ---
// Where the product of gate and up goes: f32 and, for quantised down, the 8-bit form.
// Few tokens, gate and up in one pass, where ffn_fusable(). norm: as in matvec().
bool ffn_fusable(const FfnShard& shard);
void ffn_gate_up(const Gpu& gpu, const FfnShard& shard, Act in, int64_t T, Act hidden, const InputNorm* norm = nullptr);
// hidden[t][k] = act(gate[t][k] + bias) * up_act(up[t][k] + bias). `up` may be null; hidden may be gate.
void ffn_combine(const Gpu& gpu, const FfnShard& shard, const float* gate, const float* up, int64_t T, float* hidden);

// --- down.cu: few tokens ---
// Scratch for T tokens: partial sums, and counters that must be zero at first.
struct DownScratch {
  size_t partial_bytes = 0;
  size_t counter_bytes = 0;
};
DownScratch down_scratch(int64_t n_embd, int64_t T);
// y[t] += bias + sum_k value[t][k] down_t[k], over all rows.
void down_rows(const Gpu& gpu, const Matrix& down_t, const float* value, int64_t T, Vector bias, float* partial,
               unsigned* counters, float* y);
// One token: y += bias + sum_i value[i] * down_t[ids[i]], i < count.
void down_listed_rows(const Gpu& gpu, const Matrix& down_t, const float* value, const int32_t* ids,
                      const int32_t* count, Vector bias, float* partial, unsigned* counters, float* y);

// --- norm.cu ---
void norm(const Gpu& gpu, const NormArgs& args, const float* x, int64_t T, Act out);
void add(const Gpu& gpu, const float* x, int64_t n, float* y);  // y[i] += x[i]
void scale(const Gpu& gpu, float factor, int64_t n, float* x);  // x[i] *= factor
void soft_cap(const Gpu& gpu, float cap, int64_t n, float* x);  // x[i] = cap tanh(x[i] / cap)
// The 8-bit form of rows of n activations.
void quantize_rows(const Gpu& gpu, const float* x, int64_t T, int64_t n, void* q8);

// --- attention.cu: rotary embedding, the write to the cache, and attention ---
// Scratch for up to max_tokens (at most kFewTokens) tokens: partial results, and counters that must be zero at first.
struct AttentionScratch {
  size_t partial_bytes = 0;
  size_t counter_bytes = 0;
};
AttentionScratch attention_scratch(const Gpu& gpu, int64_t n_head, int64_t n_head_kv, int64_t head_dim,
                                   int64_t max_tokens);
// out.q8 is made too where it is set. Few tokens' kernels read args.rows while the operation before may still run, and
// again after it: what rows.pos, slot and pages point to must be numbers of some batch, or zeroes, at any time.
void attention(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* partial, unsigned* counters, Act out);

// attention_latent.cu
void head_products(const Gpu& gpu, const HeadProducts& products, int64_t T);

// --- embed_argmax.cu ---
void embed(const Gpu& gpu, const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
           int64_t position_offset, int64_t T, float* x);
constexpr int64_t kArgmaxBlocks = 64;
// Rows of logits [T][n]; partial: [T][kArgmaxBlocks].
void argmax(const Gpu& gpu, const float* logits, int64_t n, int64_t T, unsigned long long* partial, int32_t* ids);

// --- convert.cu: inputs of the tensor-core products ---
void convert_rows(const Gpu& gpu, const float* x, int64_t n, DType to, void* out);  // f16 (saturating) or bf16
void dequantize(const Gpu& gpu, const Matrix& w, int64_t first_row, int64_t n_rows, f16_t* out);
void add_bias(const Gpu& gpu, Vector bias, int64_t T, float* y, int64_t y_stride);  // y[t][r] += bias[r]

}  // namespace hearth::cuda
