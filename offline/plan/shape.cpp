#include "offline/plan/shape.h"

#include <algorithm>

#include "engine/kv_cache.h"
#include "model/predictors.h"

namespace hearth::offline {
namespace {

uint64_t bytes_of(const Matrix& m) {
  return m ? m.bytes() : 0;
}
uint64_t bytes_of(const Vector& v) {
  return static_cast<uint64_t>(v.n) * sizeof(float);
}
uint64_t bias_bytes(const Vector& v) {
  return v ? sizeof(float) : 0;
}

LayerShape layer_shape(const model::Config& c, const model::LayerWeights& w) {
  LayerShape l;
  l.n_ff = w.ffn.n();
  for (const Matrix* m : w.attention()) l.attention_bytes += bytes_of(*m);
  for (const Vector* v :
       {&w.bq, &w.bk, &w.bv, &w.bo, &w.attn_norm.weight, &w.attn_norm.bias, &w.ffn_norm.weight, &w.ffn_norm.bias,
        &w.q_norm, &w.k_norm, &w.sinks, &w.latent.q_a_norm, &w.latent.norm, &w.attn_post_norm.weight,
        &w.attn_post_norm.bias, &w.ffn_post_norm.weight, &w.ffn_post_norm.bias, &w.ffn_down_bias}) {
    l.small_bytes += bytes_of(*v);
  }
  l.kv_token_bytes = engine::KvCache::layer_page_bytes(c) / kPagePositions;
  if (w.router) {
    l.experts = true, l.shared_expert = w.router.shared, l.n_ff = std::ssize(w.experts), l.n_used = static_cast<double>(w.router.n_named());
    l.gpu_experts = std::ranges::all_of(w.experts, &hearth::gpu_computes);
    l.attention_bytes += bytes_of(w.router.w) + bytes_of(w.router.shared_gate);
    l.small_bytes += bytes_of(w.router.bias) + bytes_of(w.router.correction);
    for (const Expert& e : w.experts) {
      const uint64_t bytes = e.bytes() + bytes_of(e.ffn.gate_bias) + bytes_of(e.ffn.up_bias) + bytes_of(e.down_bias);
      l.expert_bytes += bytes, l.up_down_bytes = std::max(l.up_down_bytes, bytes);
    }
    return l;
  }
  l.gate_bytes = w.ffn.gate.row_size() + bias_bytes(w.ffn.gate_bias);
  l.copies_linked = is_quantized(w.ffn.gate.type);
  const Matrix& down = w.ffn.down_t ? w.ffn.down_t : w.ffn.down;
  l.up_down_bytes = down.bytes() / static_cast<uint64_t>(l.n_ff);
  if (w.ffn.up) l.up_down_bytes += w.ffn.up.row_size() + bias_bytes(w.ffn.up_bias);
  return l;
}

}  // namespace

uint64_t ModelShape::weight_bytes() const {
  uint64_t sum = small_bytes + embedding_bytes + (tied_head ? 0 : output_bytes);
  for (const LayerShape& l : layers) sum += l.attention_bytes + l.small_bytes + l.ffn_bytes();
  return sum;
}

ModelShape shape_of(const model::Model& model) {
  const model::Config& c = model.config();
  const model::Weights& w = model.weights();
  ModelShape s;
  s.name = c.name, s.fingerprint = model::fingerprint(model.file()), s.type_name = model.type_name();
  s.config = c;
  s.learned_positions = static_cast<bool>(w.pos_embd);
  s.sparse_family = c.ffn.sparse();
  s.quantized = model.quantized();
  s.tied_head = model.tied_head();
  s.embedding_bytes = bytes_of(w.tok_embd) + bytes_of(w.pos_embd);
  s.output_bytes = bytes_of(w.output);
  s.small_bytes =
      bytes_of(w.output_norm.weight) + bytes_of(w.output_norm.bias) + bytes_of(w.output_bias) + bytes_of(w.inv_freq);
  for (size_t i = 0; i < w.layers.size(); ++i) {
    LayerShape l = layer_shape(c, w.layers[i]);
    l.by_neuron = !model.why_not_by_neuron(static_cast<int64_t>(i));
    l.predictor_bytes = model::predictor_bytes(w.layers[i].predictor);
    l.can_look_ahead = i > 0 && l.predictor_bytes > 0;
    s.layers.push_back(l);
  }
  return s;
}

void set_named_per_active(ModelShape& shape, const model::Sidecar& sidecar) {
  std::vector<model::StoredPredictor> stored;
  if (sidecar.file != nullptr && model::has_predictors(*sidecar.file)) {
    stored = model::read_predictors(*sidecar.file, sidecar.n_embd, sidecar.n_ff);
  }
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    const bool own = l < stored.size() && stored[l].predictor.weights;
    if (!own) {
      shape.layers[l].named_per_active = sidecar.statistics.layers[l].named.per_active();
    } else if (const model::PredictorFigures& f = stored[l].figures; f.tokens > 0 && f.density > 0) {
      shape.layers[l].named_per_active = static_cast<double>(f.predicted_density) / static_cast<double>(f.density);
    }
  }
}

}  // namespace hearth::offline
