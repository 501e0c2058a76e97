#include "engine/forward.h"

#include <array>

#include "core/error.h"
#include "core/latent_attention.h"

namespace hearth::engine {

using model::Config;
using model::LayerWeights;

NormArgs Forward::norm_args(const model::Norm& n) const {
  return {c_.config.norm, n.weight, n.bias, c_.config.norm_eps, c_.config.n_embd};
}

Input Forward::input(const model::Norm& norm, const float* x, Act result) const {
  if (norm.weight) return Input(norm_args(norm), x, result);
  c_.device.copy(result.x, x, static_cast<size_t>(size()) * sizeof(float));
  c_.device.quantize(result, shape_.T, c_.config.n_embd);
  return Input(result);
}

// In place, all heads of a token at once.
void Forward::norm_heads(Vector weight, int64_t n, float* rows) const {
  if (weight.n != n || n == c_.config.head_dim) return;
  c_.device.norm({NormKind::rms, weight, {}, c_.config.qk_norm_eps, n}, rows, shape_.T, {rows, nullptr});
}

AttentionArgs Forward::attention_args(int64_t l) const {
  const Config& c = c_.config;
  const LayerWeights& w = layer(l);
  AttentionArgs a;
  a.q = c_.act.q, a.k = c_.act.k, a.v = c_.act.v;
  a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
  if (const int own = c.layer(l).rope; c.rope != RopeKind::none && own >= 0) {
    const int rope = own + (c_.long_context ? 1 : 0);
    a.rope = c.rope, a.n_rot = c.n_rot, a.inv_freq = c_.weights.inv_freq.data + rope * (c.n_rot / 2);
    a.attention_factor = c.ropes[static_cast<size_t>(rope)].attention_factor;
  }
  if (w.q_norm.n == c.head_dim) a.q_norm = w.q_norm;  // others are of all heads at once
  if (w.k_norm.n == c.head_dim) a.k_norm = w.k_norm;
  a.latent_norm = w.latent.norm;
  a.norm_eps = c.qk_norm_eps;
  a.cache = c_.kv.layer(l);
  a.rows = {c_.act.pos, c_.act.slot, c_.act.pages, c_.act.pages_stride, shape_.runs};
  a.scale = c.attention_scale;
  a.soft_cap = c.attention_soft_cap, a.sinks = w.sinks;
  a.window = c.layer(l).window;
  a.max_kv = shape_.max_kv;
  return a;
}

void Forward::embed(float* x) const {
  c_.device.embed(c_.weights.tok_embd, c_.act.ids, c_.weights.pos_embd, c_.act.pos, c_.config.position_offset, shape_.T,
                  x);
  if (c_.config.embedding_scale != 1) c_.device.scale(c_.config.embedding_scale, size(), x);
}

void Forward::head(const float* x, int64_t first, int64_t count) const {
  const Input in(norm_args(c_.weights.output_norm), x + first * c_.config.n_embd, c_.act.normed);
  const std::array head = {MatmulPart{c_.weights.output, c_.weights.output_bias, c_.act.logits}};
  c_.device.matmul(head, in, count);
  if (c_.config.logit_soft_cap > 0) {
    c_.device.soft_cap(c_.config.logit_soft_cap, count * c_.config.n_vocab, c_.act.logits);
  }
}

void Forward::join(int64_t l, Half half, float* sum, float* y) const {
  const LayerWeights& w = layer(l);
  c_.device.add_norm(norm_args(half == Half::ffn ? w.ffn_post_norm : w.attn_post_norm), sum, shape_.T, y);
}

void Forward::norm(int64_t l, Half half, const float* x) const {
  const bool ffn = half == Half::ffn;
  const Input in =
      input(ffn ? layer(l).ffn_norm : layer(l).attn_norm, x, ffn ? c_.act.ffn_input(l, shape_.T) : c_.act.normed);
  if (in.normed()) c_.device.norm(in.norm, in.x, shape_.T, in.act);
}

void Forward::project(const LayerWeights& w, const Input& in) const {
  const Activations& a = c_.act;
  const std::array qkv = {MatmulPart{w.wq, w.bq, a.q}, MatmulPart{w.wk, w.bk, a.k}, MatmulPart{w.wv, w.bv, a.v}};
  c_.device.matmul(qkv, in, shape_.T);
  norm_heads(w.q_norm, w.wq.rows, a.q), norm_heads(w.k_norm, w.wk.rows, a.k);
}

// A key is (rotated, latent), so a head's query becomes (rotated, what its other elements ask of the latent).
void Forward::project_latents(const LayerWeights& w, const Input& in) const {
  const Config& c = c_.config;
  const Activations& a = c_.act;
  const bool through = static_cast<bool>(w.latent.q_a);
  const std::array all = {MatmulPart{.w = through ? w.latent.q_a : w.wq, .y = through ? a.q_latent : a.q_heads},
                          MatmulPart{.w = w.wk, .y = a.k + c.n_rot, .y_stride = c.head_dim},
                          MatmulPart{.w = w.latent.k_rotated, .y = a.k, .y_stride = c.head_dim}};
  c_.device.matmul(all, in, shape_.T);
  if (through) {
    const NormArgs norm{NormKind::rms, w.latent.q_a_norm, {}, c.qk_norm_eps, c.latent.n_q_latent};
    const std::array queries = {MatmulPart{.w = w.wq, .y = a.q_heads}};
    c_.device.matmul(queries, Input(norm, a.q_latent, a.q_latent_normed), shape_.T);
  }
  c_.device.latent_attention()->head_products(
      {.w = w.latent.k_b, .n_head = c.n_head, .n_tail = c.n_rot, .x = a.q_heads, .y = a.q}, shape_.T);
}

void Forward::attend(int64_t l, Reads reads, const float* x, float* y, const NextNorm* next) const {
  const LayerWeights& w = layer(l);
  Activations& a = c_.act;
  const Input in = reads == Reads::normed ? Input(a.normed) : input(w.attn_norm, x, a.normed);
  if (!c_.config.latent) {
    project(w, in);
    c_.device.attention(attention_args(l), shape_.T, a.attn);
  } else {
    project_latents(w, in);
    c_.device.attention(attention_args(l), shape_.T, {a.latents, nullptr});
    const int64_t n_head = c_.config.n_head;
    c_.device.latent_attention()->head_products({.w = w.latent.v_b, .n_head = n_head, .x = a.latents, .y = a.attn.x},
                                                shape_.T);
    c_.device.quantize(a.attn, shape_.T, c_.config.n_attended());
  }
  const std::array out = {MatmulPart{.w = w.wo, .bias = w.bo, .y = y, .accumulate = true}};
  c_.device.matmul(out, a.attn, shape_.T, next);
}

Input Forward::ffn_input(int64_t l, Reads reads, const float* x) const {
  const Act rows = c_.act.ffn_input(l, shape_.T);
  return reads == Reads::normed ? Input(rows) : input(layer(l).ffn_norm, x, rows);
}

Act Forward::predictor_input(const model::LayerPredictor& predictor, int64_t l, const float* x) const {
  if (predictor.input != model::PredictorInput::residual) return c_.act.ffn_input(l, shape_.T);
  const Act in{const_cast<float*>(x), c_.act.x_q8};  // inputs of operations are only read
  const Predictor& p = predictor.weights;
  if (is_quantized(p.fc1 ? p.fc1.type : p.fc2.type)) c_.device.quantize(in, shape_.T, c_.config.n_embd);
  return in;
}

void Forward::predict(int64_t l, Reads reads, const float* x, const PredictArgs& args) const {
  const model::LayerPredictor& predictor = layer(l).predictor;
  const Input in = reads == Reads::residual ? Input(predictor_input(predictor, l, x)) : ffn_input(l, reads, x);
  c_.device.sparse_ffn()->predict(predictor.weights, in, shape_.T, args);
}

void Forward::ffn_dense(int64_t l, const Input& in, Vector bias, float* y, const NextNorm* next) const {
  c_.device.ffn_dense(layer(l).ffn, in, shape_.T, bias, y, next);
}

void Forward::ffn_sparse(int64_t l, SparseArgs sparse, const Input& in, Vector bias, float* y,
                         const NextNorm* next) const {
  sparse.threshold = c_.thresholds.of(l);
  sparse.n_active = c_.act.n_active + l * kFewTokens;
  c_.device.sparse_ffn()->ffn_sparse(layer(l).ffn, sparse, in, shape_.T, bias, y, next);
}

void Forward::route(int64_t l, Reads reads, const float* x) const {
  const Act residual{const_cast<float*>(x), nullptr};  // routers are not quantised
  const Input in = reads == Reads::residual ? Input(residual) : ffn_input(l, reads, x);
  c_.device.expert_ffn()->route(layer(l).router, in, shape_.T, c_.act.choice(l, shape_.T));
}

void Forward::ffn_experts(int64_t l, const ExpertChoice& choice, const Input& in, bool skips, float* y) const {
  const LayerWeights& w = layer(l);
  ExpertSet set{w.experts, w.router.shared, w.expert_table};
  if (skips) set.threshold = c_.thresholds.of(l), set.n_active = c_.act.n_active + l * kFewTokens;
  c_.device.expert_ffn()->ffn_experts(set, choice, in, shape_.T, y);
}

NextNorm Forward::next_ffn(int64_t l, bool predicts) const {
  const LayerWeights& w = layer(l);
  const Predictor& p = w.predictor.weights;
  return {norm_args(w.ffn_norm), predicts ? (p.fc1 ? p.fc1 : p.fc2) : w.ffn.gate, false};
}
NextNorm Forward::next_attention(int64_t l) const {
  return {norm_args(layer(l).attn_norm), *layer(l).attention()[0], true};
}
NextNorm Forward::next_head() const {
  return {norm_args(c_.weights.output_norm), c_.weights.output, true};
}

}  // namespace hearth::engine
