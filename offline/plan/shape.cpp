#include "offline/plan/shape.h"

#include <algorithm>

#include "engine/kv_cache.h"
#include "engine/placement.h"
#include "model/predictors.h"
#include "offline/plan/frequencies.h"

namespace hearth::offline {
namespace {

uint64_t bytes_of(const Vector& v) {
  return static_cast<uint64_t>(v.n) * sizeof(float);
}
uint64_t bias_bytes(const Vector& v) {
  return v ? sizeof(float) : 0;
}

// Sums what matrices take in the file and on the GPU.
struct BothBytes {
  const MatrixBytes& on_gpu;
  uint64_t file = 0, gpu = 0;
  void add(const Matrix& m) {
    if (m) file += m.bytes(), gpu += on_gpu(m);
  }
  void add(const Vector& v) {
    if (v) add(Matrix{DType::f32, 1, v.n, v.data});
  }
  std::optional<uint64_t> other() const { return gpu != file ? std::optional(gpu) : std::nullopt; }
};

// A row among many of such rows, so that the alignment of their matrix is no part of it.
uint64_t row_on_gpu(const MatrixBytes& on_gpu, Matrix m) {
  constexpr int64_t kRows = 4096;
  m.rows = kRows;
  return on_gpu(m) / kRows;
}

// In eighths of a routed expert, rounded to whole blocks. A GPU gets the down projection transposed back.
std::vector<LayerShape::ExpertCut> cuts_of(const model::Model& model, const model::LayerWeights& w,
                                           const MatrixBytes& on_gpu) {
  constexpr int64_t kParts = 8, kBlock = engine::kExpertBlock;
  std::vector<LayerShape::ExpertCut> cuts;
  const FfnShard& f = w.experts.front().ffn;
  if (!model.config().ffn.sparse() || std::ranges::any_of(w.experts, [](const Expert& e) { return !e.ffn.down_t; })) {
    return cuts;
  }
  for (int64_t part = 1; part < kParts; ++part) {
    const int64_t n = (f.n() * part / kParts + kBlock / 2) / kBlock * kBlock;
    if (n == 0 || n >= f.n() || (!cuts.empty() && cuts.back().neurons == n)) continue;
    BothBytes b{on_gpu};
    for (const Matrix* m : {&f.gate, &f.up}) b.add(*m ? m->slice_rows(0, n) : *m);
    b.add(Matrix{model::standard_type(f.down_t), f.down_t.cols, n, f.down_t.data});
    for (const Vector* v : {&f.gate_bias, &f.up_bias}) b.add(*v ? Vector{v->data, n} : *v);
    b.add(w.experts.front().down_bias);
    cuts.push_back({static_cast<int32_t>(n), b.gpu});
  }
  return cuts;
}

// Experts are all alike, but for a shared one.
void set_experts(const model::Model& model, size_t layer, const MatrixBytes& on_gpu, LayerShape& l) {
  const model::LayerWeights& w = model.weights().layers[layer];
  l.experts = true, l.shared_expert = w.router.shared;
  l.n_ff = std::ssize(w.experts), l.n_used = static_cast<double>(w.router.n_named());
  l.gpu_experts = hearth::gpu_computes(ExpertSet(w.experts, w.router.shared));
  l.can_stream = l.gpu_experts && w.some_ffn().down;
  l.small_bytes += bytes_of(w.router.bias) + bytes_of(w.router.correction) + w.experts.size() * kExpertTableBytes;
  BothBytes largest{on_gpu};
  for (size_t id = 0; id < w.experts.size(); ++id) {
    const Expert& e = w.experts[id];
    BothBytes b{on_gpu};
    for (const Matrix* m : {&e.ffn.gate, &e.ffn.up, &e.ffn.down}) b.add(*m);
    if (const Matrix& t = e.ffn.down_t) {  // which GPUs do not take
      const Matrix stored = model.stored_down(layer, id);
      b.file += t.bytes();
      b.gpu += on_gpu(stored ? stored : Matrix{model::standard_type(t), t.cols, t.rows, t.data});
    }
    for (const Vector* v : {&e.ffn.gate_bias, &e.ffn.up_bias, &e.down_bias}) b.add(*v);
    l.expert_bytes += b.file;
    uint64_t weights = 0;
    for (const Matrix* m : {&e.ffn.gate, &e.ffn.up, &e.ffn.down}) weights += static_cast<uint64_t>(m->rows * m->cols);
    l.expert_weights = std::max(l.expert_weights, weights);
    if (e.ffn.down_t)
      l.skippable_bytes = std::max<uint64_t>(l.skippable_bytes, e.ffn.up.bytes() + e.ffn.down_t.bytes());
    largest.file = std::max(largest.file, b.file), largest.gpu = std::max(largest.gpu, b.gpu);
  }
  l.up_down_bytes = largest.file, l.gpu_neuron_bytes = largest.other();
  if (l.gpu_experts) l.cuts = cuts_of(model, w, on_gpu);
}

void set_neurons(const model::LayerWeights& w, const MatrixBytes& on_gpu, LayerShape& l) {
  const FfnShard& f = w.ffn;
  l.n_ff = f.n();
  l.gate_bytes = f.gate.row_size() + bias_bytes(f.gate_bias);
  l.copies_linked = is_quantized(f.gate.type);
  const Matrix& down = f.down_t ? f.down_t : f.down;
  const auto n = static_cast<uint64_t>(l.n_ff);
  l.up_down_bytes = down.bytes() / n;
  uint64_t gpu = row_on_gpu(on_gpu, f.gate) + bias_bytes(f.gate_bias);
  gpu += f.down_t ? row_on_gpu(on_gpu, down) : (on_gpu(down) + n - 1) / n;
  if (f.up) {
    l.up_down_bytes += f.up.row_size() + bias_bytes(f.up_bias);
    gpu += row_on_gpu(on_gpu, f.up) + bias_bytes(f.up_bias);
  }
  if (gpu != l.neuron_bytes()) l.gpu_neuron_bytes = gpu;
}

LayerShape layer_shape(const model::Model& model, size_t layer, const MatrixBytes& on_gpu) {
  const model::Config& c = model.config();
  const model::LayerWeights& w = model.weights().layers[layer];
  LayerShape l;
  BothBytes attention{on_gpu};
  for (const Matrix* m : w.attention()) attention.add(*m);
  attention.add(w.router.w), attention.add(w.router.shared_gate);
  l.attention_bytes = attention.file, l.gpu_attention_bytes = attention.other();
  for (const Vector* v :
       {&w.bq, &w.bk, &w.bv, &w.bo, &w.attn_norm.weight, &w.attn_norm.bias, &w.ffn_norm.weight, &w.ffn_norm.bias,
        &w.q_norm, &w.k_norm, &w.sinks, &w.latent.q_a_norm, &w.latent.norm, &w.attn_post_norm.weight,
        &w.attn_post_norm.bias, &w.ffn_post_norm.weight, &w.ffn_post_norm.bias, &w.ffn_down_bias}) {
    l.small_bytes += bytes_of(*v);
  }
  l.kv_token_bytes = engine::KvCache::layer_page_bytes(c) / kPagePositions;
  w.router ? set_experts(model, layer, on_gpu, l) : set_neurons(w, on_gpu, l);
  return l;
}

}  // namespace

uint64_t ModelShape::weight_bytes() const {
  uint64_t sum = small_bytes + embedding_bytes + (tied_head ? 0 : output_bytes);
  for (const LayerShape& l : layers) sum += l.attention_bytes + l.small_bytes + l.ffn_bytes();
  return sum;
}

ModelShape shape_of(const model::Model& model, const MatrixBytes& on_gpu) {
  const model::Config& c = model.config();
  const model::Weights& w = model.weights();
  ModelShape s;
  s.name = c.name, s.fingerprint = model::fingerprint(model.file()), s.type_name = model.type_name();
  s.config = c;
  s.learned_positions = static_cast<bool>(w.pos_embd);
  s.sparse_family = c.ffn.sparse();
  s.quantized = model.quantized();
  s.tied_head = model.tied_head();
  BothBytes embedding{on_gpu}, output{on_gpu};
  embedding.add(w.tok_embd), embedding.add(w.pos_embd), output.add(w.output);
  s.embedding_bytes = embedding.file, s.gpu_embedding_bytes = embedding.other();
  s.output_bytes = output.file, s.gpu_output_bytes = output.other();
  s.small_bytes =
      bytes_of(w.output_norm.weight) + bytes_of(w.output_norm.bias) + bytes_of(w.output_bias) + bytes_of(w.inv_freq);
  for (size_t i = 0; i < w.layers.size(); ++i) {
    LayerShape l = layer_shape(model, i, on_gpu);
    l.by_neuron = !model.why_not_by_neuron(static_cast<int64_t>(i));
    const model::LayerPredictor& predictor = w.layers[i].predictor;
    l.predictor_bytes = model::predictor_bytes(predictor);
    BothBytes matrices{on_gpu};
    matrices.add(predictor.weights.fc1), matrices.add(predictor.weights.fc2);
    if (matrices.other()) l.gpu_predictor_bytes = l.predictor_bytes - matrices.file + matrices.gpu;
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

void set_active_inside(ModelShape& shape, const model::Sidecar& sidecar, std::span<const float> thresholds) {
  if (std::ranges::none_of(shape.layers, &LayerShape::experts)) return;
  const model::TunedThresholds* const tuned = tuned_for(&sidecar, thresholds);
  const double left = tuned != nullptr ? 1.0 : density_left(&sidecar, thresholds).value_or(1);
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    if (!shape.layers[l].experts) continue;
    double& active = shape.layers[l].active_inside;
    active = left * (shape.sparse_family ? sidecar.statistics.layers[l].inside.mean().value_or(1) : 1.0);
    if (tuned != nullptr && !tuned->inside.empty()) active = tuned->inside[l].mean().value_or(active);
    if (shape.sparse_family) shape.layers[l].inside = sidecar.statistics.layers[l].inside_counts;
  }
}

}  // namespace hearth::offline
