#pragma once
// Arguments of the operations of core/device.h. Shapes are written [rows][cols], row-major; T is the number of tokens
// (rows of activations) in the call. Pointers and views are in the device's own address space.
#include <cstdint>
#include <optional>
#include <span>

#include "core/tensor.h"

namespace hearth {

// Batches of at most this many tokens may skip neurons, and a token's results have the same bits in any of them,
// whatever the other tokens are.
constexpr int64_t kFewTokens = 8;

enum class NormKind { rms, layer };

// Functions of the gate's pre-activation z. `fat_relu`: z > threshold ? z : 0 (ProSparse). `relu2`: relu(z)^2.
// `gelu_tanh`: GELU's approximation by a hyperbolic tangent (Hendrycks and Gimpel 2016).
// `clamped_silu` (gpt-oss): z' sigmoid(kClampedSiluAlpha z'), z' = min(z, threshold); it makes u' + 1 of the other
// factor u, with u' = u between -threshold and threshold.
enum class Activation { relu, fat_relu, relu2, silu, gelu, gelu_tanh, clamped_silu };
constexpr float kClampedSiluAlpha = 1.702f;

enum class RopeKind { none, interleaved, neox };  // pairs (2i, 2i+1), or (i, i + n_rot/2)

// The largest shapes the engine will ask for.
struct Limits {
  int64_t max_tokens = 1;  // T
  int64_t max_context = 1;
  int64_t max_cols = 1;  // longest row of any matrix
  int64_t max_rows = 1;  // most rows of any matrix (without the output head)
  int64_t n_vocab = 1;
  int64_t n_ff = 1;
  int64_t n_embd = 1;
  int64_t n_head = 1, n_head_kv = 1, head_dim = 1;
  // For mixtures: experts of a layer, the shared one among them; those named for a token; neurons of the largest one.
  int64_t n_experts = 0, n_named = 0, n_ff_expert = 0;
  bool quantized_weights = false;
};

struct NormArgs {
  NormKind kind = NormKind::rms;
  Vector weight, bias;  // [n]; bias may be empty
  float eps = 1e-5f;
  int64_t n = 0;
  // y = (x - mean) / sqrt(var + eps) * weight + bias, or x / sqrt(mean(x^2) + eps) * weight
};

// An operation's input: rows that are there, or the norm of rows, which the operation does itself, on the way or
// before. Then `act` is where the norm's result goes; later operations read it there.
struct Input {
  Act act;                   // [T][n]
  NormArgs norm;             // with x
  const float* x = nullptr;  // [T][norm.n]: the rows to be normed; null: act is read as it is
  Input(Act rows) : act(rows) {}
  Input(const NormArgs& args, const float* rows, Act result) : act(result), norm(args), x(rows) {}
  bool normed() const { return x != nullptr; }
};

// The norm that will be done of an operation's result y, by the operation that reads y next, and the first matrix that
// that one reads: a device may prepare it. Nothing else depends on it, and nobody writes y in between.
struct NextNorm {
  NormArgs norm;
  Matrix reader;
  bool is_product = false;  // the reader is a matmul(); otherwise a predictor, or the gates of an FFN
};

// One product of a group that shares its input: y[t][r] (+)= sum_c w[r][c] x[t][c] + bias[r].
struct MatmulPart {
  Matrix w;
  Vector bias;              // w.rows elements, or empty
  float* y = nullptr;       // [T][y_stride]
  int64_t y_stride = 0;     // elements between the rows of y; 0 = w.rows
  bool accumulate = false;  // add to y (the residual add)
};

// --- attention over a paged cache ---

constexpr int64_t kPagePositions = 128;  // of a page of the cache

// One layer's part of the pages. Page p begins at k + p * stride, its values at v + p * stride; each is
// [n_head_kv][kPagePositions][head_dim].
struct KvPages {
  f16_t* k = nullptr;
  f16_t* v = nullptr;
  int64_t stride = 0;  // elements between two pages
};

// Rows of a batch that are consecutive positions of one sequence.
struct BatchRun {
  int64_t first_row = 0, n_rows = 0;
  int64_t first_position = 0;
};

// Where the T tokens of a batch belong. Position p of token t's sequence is in page
// pages[slot[t] * pages_stride + p / kPagePositions], at p % kPagePositions.
struct BatchRows {
  const int32_t* pos = nullptr;    // [T]
  const int32_t* slot = nullptr;   // [T]: the row of the table
  const int32_t* pages = nullptr;  // [slots][pages_stride]
  int64_t pages_stride = 0;
  // All rows in order. For more than kFewTokens; others are read from the device's memory alone.
  std::span<const BatchRun> runs = {};
};

// Per-head q/k norm (Qwen3), rotary embedding, the write of k and v into the cache, and then causal attention of the T
// tokens over what the cache holds. Token t sees positions max(0, pos[t] - window + 1) .. pos[t] of its sequence, those
// of the batch among them; window 0 = all. Query head h uses kv head h / (n_head / n_head_kv).
struct AttentionArgs {
  float* q = nullptr;        // [T][n_head][head_dim]; contents undefined afterwards
  float* k = nullptr;        // [T][n_head_kv][head_dim]; the same
  const float* v = nullptr;  // [T][n_head_kv][head_dim]
  int64_t n_head = 0, n_head_kv = 0, head_dim = 0;
  RopeKind rope = RopeKind::none;
  int64_t n_rot = 0;                // rotated elements of a head, even; the rest pass through
  const float* inv_freq = nullptr;  // [n_rot / 2], scaling already applied
  float attention_factor = 1.0f;    // multiplies cos and sin (YaRN-like scalings; 1 otherwise)
  Vector q_norm, k_norm;            // [head_dim], or empty
  // [head_dim - n_rot], or empty. Set: multi-head latent attention (core/latent_attention.h), of one kv head whose k is
  // rotated elements and a latent, which is normed by this and is the value, too. v and cache.v are not used.
  Vector latent_norm;
  float norm_eps = 1e-6f;
  KvPages cache;
  BatchRows rows;
  float scale = 1.0f;     // multiplies q.k
  float soft_cap = 0.0f;  // c: a score s becomes c tanh(s / c); 0: it stays
  Vector sinks;           // [n_head], or empty: another score of each head, which takes its share and has no value
  int64_t window = 0;
  int64_t max_kv = 0;  // upper bound of every pos[t] + 1: fixes grids, results do not depend on it
  // Elements of a head's values and results; rows of values in the cache are head_dim apart.
  int64_t value_dim() const { return latent_norm ? latent_norm.n : head_dim; }
  const f16_t* values() const { return latent_norm ? cache.k + head_dim - latent_norm.n : cache.v; }
};

// --- feed-forward network ---

// The neurons of one FFN layer that one device owns. Row k of each matrix is the device's neuron k.
//   value_k = act(gate_k . h + gate_bias_k) * up_act(up_k . h + up_bias_k)     (without `up`: the first factor alone)
//   y      += sum_k value_k * down_t[k]
// OPT, Falcon and other ungated families keep their first matrix in `gate`.
struct FfnShard {
  Matrix gate, up;  // [n][n_embd]
  Matrix down_t;    // [n][n_embd]: transposed down; what sparse kernels need
  Matrix down;      // [n_embd][n]: as other programs store it; dense only. Exactly one of down_t, down is set.
  Vector gate_bias, up_bias;
  Activation act = Activation::silu;
  float act_threshold = 0.0f;  // fat_relu's, clamped_silu's
  bool up_relu = false;        // dReLU: up_act = relu
  int64_t n() const { return gate.rows; }
};

// How to tell from a layer's input which of its neurons will fire, without reading their gate rows.
//   h = fc1 in + fc1_bias, relu'd if `relu`;   score = fc2 h;   neuron k is predicted when score[k] > threshold[k]
// Without fc1, fc2 multiplies the input itself: a low-bit copy of the gate.
struct Predictor {
  Matrix fc1;         // [rank][n_embd], or empty
  Vector fc1_bias;    // [rank], or empty
  bool relu = false;  // between the two
  Matrix fc2;         // [n][rank]; without fc1 [n][n_embd]
  Vector threshold;   // [n]
  int64_t n() const { return threshold.n; }
  explicit operator bool() const { return static_cast<bool>(threshold); }
};

// Lists of neurons, one for each token, in the device's memory: token t's ids are ids[t * stride ...], ascending, and
// count[t] of them. Made and read by one device: it may keep a mask of its own in the memory of the ids instead (the
// CUDA device does, cuda/neuron_mask.cuh).
struct NeuronLists {
  int32_t* ids = nullptr;
  int32_t* count = nullptr;
  int64_t stride = 0;
};

}  // namespace hearth
