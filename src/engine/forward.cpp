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

// x += Wo · attention(rope(Wq h), rope(Wk h), Wv h) + bo
void attention_block(const ForwardArgs& f, const LayerWeights& w, int64_t layer, int64_t T) {
  Activations& a = f.act;
  const std::array qkv = {MatmulPart{w.wq, w.bq, a.q}, MatmulPart{w.wk, w.bk, a.k}, MatmulPart{w.wv, w.bv, a.v}};
  f.device.matmul(qkv, a.normed, T);
  f.device.rope_kv(rope_kv_args(f, w, layer), T);
  f.device.attention(attention_args(f, layer), T, a.attn);
  const std::array out = {MatmulPart{.w = w.wo, .bias = w.bo, .y = a.x, .accumulate = true}};
  f.device.matmul(out, a.attn, T);
}

// x += Wd · (act(Wg h) ⊙ Wu h) + bd
void ffn_block(const ForwardArgs& f, const LayerWeights& w, int64_t layer, int64_t T) {
  Activations& a = f.act;
  if (f.sparse && T == 1) {
    const SparseArgs sparse{.threshold = f.sparse_threshold, .n_active = a.n_active + layer};
    f.device.ffn_sparse(w.ffn, sparse, a.ffn_normed, w.ffn_down_bias, a.x);
  } else {
    f.device.ffn_dense(w.ffn, a.ffn_normed, T, w.ffn_down_bias, a.x);
  }
}

}  // namespace

void forward_layers(const ForwardArgs& f, int64_t T) {
  const Config& c = f.config;
  Device& d = f.device;
  Activations& a = f.act;
  d.embed(f.weights.tok_embd, a.ids, f.weights.pos_embd, a.pos, c.position_offset, T, a.x);
  for (int64_t layer = 0; layer < c.n_layer; ++layer) {
    const LayerWeights& w = f.weights.layers[static_cast<size_t>(layer)];
    d.norm(norm_args(c, w.attn_norm), a.x, T, a.normed);
    if (c.parallel_block) {
      d.norm(norm_args(c, w.ffn_norm), a.x, T, a.ffn_normed);
      attention_block(f, w, layer, T);
    } else {
      attention_block(f, w, layer, T);
      d.norm(norm_args(c, w.ffn_norm), a.x, T, a.ffn_normed);
    }
    ffn_block(f, w, layer, T);
  }
}

void forward_head(const ForwardArgs& f, int64_t first, int64_t count) {
  const Config& c = f.config;
  f.device.norm(norm_args(c, f.weights.output_norm), f.act.x + first * c.n_embd, count, f.act.normed);
  const std::array head = {MatmulPart{f.weights.output, f.weights.output_bias, f.act.logits}};
  f.device.matmul(head, f.act.normed, count);
}

}  // namespace hearth::engine
