#include "engine/forward.h"

#include <array>
#include <cmath>

namespace hearth::engine {
namespace {

using model::Config;
using model::LayerWeights;

NormArgs norm_args(const Config& c, const model::Norm& n) {
  return {c.norm, n.weight, n.bias, c.norm_eps, c.n_embd};
}

RopeKvArgs rope_kv_args(const ForwardArgs& f, const LayerWeights& w, int64_t layer) {
  const Config& c = f.config;
  RopeKvArgs a;
  a.q = f.act.q, a.k = f.act.k, a.v = f.act.v;
  a.q_stride = c.n_head * c.head_dim;
  a.k_stride = a.v_stride = c.n_head_kv * c.head_dim;
  a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
  a.rope = c.rope, a.n_rot = c.n_rot, a.inv_freq = f.weights.inv_freq.data;
  a.attention_factor = c.rope_attention_factor;
  a.q_norm = w.q_norm, a.k_norm = w.k_norm, a.norm_eps = c.norm_eps;
  a.pos = f.act.pos;
  a.k_cache = f.kv.k(layer), a.v_cache = f.kv.v(layer), a.n_ctx = f.n_ctx;
  return a;
}

AttentionArgs attention_args(const ForwardArgs& f, int64_t layer) {
  const Config& c = f.config;
  AttentionArgs a;
  a.q = f.act.q, a.q_stride = c.n_head * c.head_dim;
  a.k_cache = f.kv.k(layer), a.v_cache = f.kv.v(layer), a.n_ctx = f.n_ctx;
  a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
  a.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
  a.window = c.sliding_window;
  a.pos = f.act.pos, a.max_kv = f.max_kv;
  return a;
}

const LayerWeights& weights_of(const ForwardArgs& f, int64_t layer) {
  return f.weights.layers[static_cast<size_t>(layer)];
}

}  // namespace

void attention_norm(const ForwardArgs& f, int64_t layer, const float* x, int64_t T) {
  f.device.norm(norm_args(f.config, weights_of(f, layer).attn_norm), x, T, f.act.normed);
}

void ffn_norm(const ForwardArgs& f, int64_t layer, const float* x, int64_t T) {
  f.device.norm(norm_args(f.config, weights_of(f, layer).ffn_norm), x, T, f.act.ffn_normed);
}

// y += Wo · attention(rope(Wq h), rope(Wk h), Wv h) + bo
void attention_block(const ForwardArgs& f, int64_t layer, int64_t T, float* y) {
  const LayerWeights& w = weights_of(f, layer);
  Activations& a = f.act;
  const std::array qkv = {MatmulPart{w.wq, w.bq, a.q}, MatmulPart{w.wk, w.bk, a.k}, MatmulPart{w.wv, w.bv, a.v}};
  f.device.matmul(qkv, a.normed, T);
  f.device.rope_kv(rope_kv_args(f, w, layer), T);
  f.device.attention(attention_args(f, layer), T, a.attn);
  const std::array out = {MatmulPart{.w = w.wo, .bias = w.bo, .y = y, .accumulate = true}};
  f.device.matmul(out, a.attn, T);
}

// y += Wd · (act(Wg h) ⊙ Wu h) + bd
void ffn_block(const ForwardArgs& f, int64_t layer, int64_t T, Vector down_bias, float* y) {
  const LayerWeights& w = weights_of(f, layer);
  if (f.sparse && T == 1) {
    const SparseArgs sparse{.threshold = f.threshold(layer), .n_active = f.act.n_active + layer};
    f.device.ffn_sparse(w.ffn, sparse, f.act.ffn_normed, down_bias, y);
  } else {
    f.device.ffn_dense(w.ffn, f.act.ffn_normed, T, down_bias, y);
  }
}

void forward_embedding(const ForwardArgs& f, int64_t T) {
  f.device.embed(f.weights.tok_embd, f.act.ids, f.weights.pos_embd, f.act.pos, f.config.position_offset, T, f.act.x);
}

namespace {

// x += attention(n_a(x)), then x += ffn(n_f(x)). The hot neurons' sum is added while the CPU computes the cold ones'.
void sequential_layer(const ForwardArgs& f, const LayerSplit& split, int64_t layer, int64_t T) {
  float* const x = f.act.x;
  const int64_t n = T * f.config.n_embd;
  if (split.attention_on_host) {
    f.device.post(*f.mailbox, x, n);
    f.device.collect(*f.mailbox, x, n);
    if (split.whole_on_host()) return;
  } else {
    attention_norm(f, layer, x, T);
    attention_block(f, layer, T, x);
  }
  if (split.has_cold) f.device.post(*f.mailbox, x, n);
  if (split.has_hot) {
    ffn_norm(f, layer, x, T);
    ffn_block(f, layer, T, weights_of(f, layer).ffn_down_bias, x);
  }
  if (split.has_cold) f.device.collect(*f.mailbox, x, n);
}

// x += attention(n_a(x)) + ffn(n_f(x)). What the CPU owns of the layer is one hand-off.
void parallel_layer(const ForwardArgs& f, const LayerSplit& split, int64_t layer, int64_t T) {
  float* const x = f.act.x;
  const int64_t n = T * f.config.n_embd;
  const bool asks = split.attention_on_host || split.has_cold;
  if (asks) f.device.post(*f.mailbox, x, n);
  if (split.has_hot) ffn_norm(f, layer, x, T);  // before x changes
  if (!split.attention_on_host) {
    attention_norm(f, layer, x, T);
    attention_block(f, layer, T, x);
  }
  if (split.has_hot) ffn_block(f, layer, T, weights_of(f, layer).ffn_down_bias, x);
  if (asks) f.device.collect(*f.mailbox, x, n);
}

}  // namespace

void forward_layers(const ForwardArgs& f, int64_t T) {
  for (int64_t layer = 0; layer < f.config.n_layer; ++layer) {
    const LayerSplit split = f.split != nullptr ? (*f.split)[static_cast<size_t>(layer)] : LayerSplit{};
    if (f.config.parallel_block) {
      parallel_layer(f, split, layer, T);
    } else {
      sequential_layer(f, split, layer, T);
    }
  }
}

void forward_head(const ForwardArgs& f, int64_t first, int64_t count) {
  const Config& c = f.config;
  f.device.norm(norm_args(c, f.weights.output_norm), f.act.x + first * c.n_embd, count, f.act.normed);
  const std::array head = {MatmulPart{f.weights.output, f.weights.output_bias, f.act.logits}};
  f.device.matmul(head, f.act.normed, count);
}

}  // namespace hearth::engine
