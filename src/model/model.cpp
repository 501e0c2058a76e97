#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "core/error.h"
#include "model/architectures.h"
#include "model/bind_experts.h"
#include "model/bind_latent.h"
#include "model/predictors.h"
#include "model/sidecar.h"

namespace hearth::model {

// Binds the tensors of one file by name. Keeps the error texts in one place.
class Binder {
 public:
  explicit Binder(Model& model, const LoadOptions& options = {})
      : m_(model), file_(*model.file_), arch_(*find_architecture(model.config_.arch)), options_(options) {}

  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

  Matrix matrix(const std::string& name, int64_t rows, int64_t cols) const {
    const gguf::TensorInfo& t = require(name);
    if (!t.traits->computable()) {
      fail("'{}': tensor {} has type {}, which hearth cannot compute with; expected one of {}", file_.path().string(),
           name, t.traits->name, computable_names());
    }
    if (t.cols() != cols || t.rows() != rows) {
      fail("'{}': tensor {} is [{}, {}], expected [{}, {}] (columns, rows)", file_.path().string(), name, t.cols(),
           t.rows(), cols, rows);
    }
    return {t.traits->type, rows, cols, file_.data(t).data()};
  }
  Matrix optional_matrix(const std::string& name, int64_t rows, int64_t cols) const {
    return has(name) ? matrix(name, rows, cols) : Matrix{};
  }

  // Matrices of one shape in a tensor of three dimensions, one behind the other.
  Matrix stacked(const std::string& name, int64_t n, int64_t rows, int64_t cols) const {
    const gguf::TensorInfo& t = require(name);
    if (t.ne.size() != 3 || t.ne[0] != cols || t.ne[1] != rows || t.ne[2] != n) {
      fail("'{}': tensor {} is [{}], expected [{}, {}, {}]", file_.path().string(), name, fmt::join(t.ne, ", "), cols,
           rows, n);
    }
    return matrix(name, n * rows, cols);
  }
  std::byte* own_matrix(size_t bytes) { return m_.owned_matrices_.emplace_back(bytes).data(); }

  Vector vector(const std::string& name, int64_t n) { return flat_vector(name, 1, n); }
  // The rows of a matrix of parameters one behind the other.
  Vector flat_vector(const std::string& name, int64_t rows, int64_t cols) {
    const Matrix row = matrix(name, rows, cols);
    const int64_t n = rows * cols;
    const bool aligned = reinterpret_cast<uintptr_t>(row.data) % alignof(float) == 0;
    if (row.type == DType::f32 && aligned) return {static_cast<const float*>(row.data), n};
    std::vector<float> values(static_cast<size_t>(n));
    for (int64_t r = 0; r < rows; ++r) traits(row.type).to_float(row.row(r), values.data() + r * cols, cols);
    return own(std::move(values));
  }
  Vector optional_vector(const std::string& name, int64_t n) { return has(name) ? vector(name, n) : Vector{}; }

  // A layer's norm; none where the description names none.
  Norm norm(const std::string& layer, std::string_view name) {
    return name.empty() ? Norm{} : norm(layer + std::string(name));
  }
  Norm norm(const std::string& prefix) {
    const int64_t n = m_.config_.n_embd;
    Norm result{vector(prefix + ".weight", n), optional_vector(prefix + ".bias", n)};
    return result;
  }

  Vector own(std::vector<float> values) {
    m_.owned_vectors_.push_back(std::move(values));
    const auto& v = m_.owned_vectors_.back();
    return {v.data(), static_cast<int64_t>(v.size())};
  }

  void bind_all() {
    Config& c = m_.config_;
    Weights& w = m_.weights_;
    const gguf::TensorInfo& embd = require("token_embd.weight");
    c.n_vocab = embd.rows();
    w.tok_embd = matrix("token_embd.weight", c.n_vocab, c.n_embd);
    if (c.rope == RopeKind::none) bind_positions();
    w.output_norm = scaled(norm("output_norm"), c.logit_scale);
    w.output = has("output.weight") ? matrix("output.weight", c.n_vocab, c.n_embd) : w.tok_embd;
    w.output_bias = optional_vector("output.bias", c.n_vocab);
    if (w.output_bias && c.logit_scale != 1) {
      fail("'{}': a scale of the logits beside output.bias is not supported", file_.path().string());
    }
    if (c.rope != RopeKind::none) w.inv_freq = own(rope_frequencies());
    w.layers.resize(static_cast<size_t>(c.n_layer));
    for (int64_t l = 0; l < c.n_layer; ++l) bind_layer(l, w.layers[static_cast<size_t>(l)]);
  }

 private:
  const gguf::TensorInfo& require(const std::string& name) const {
    const gguf::TensorInfo* t = file_.find_tensor(name);
    if (t == nullptr) fail("'{}': tensor {} is missing; is the file complete?", file_.path().string(), name);
    return *t;
  }

  void bind_positions() {
    Config& c = m_.config_;
    const gguf::TensorInfo& t = require("position_embd.weight");
    m_.weights_.pos_embd = matrix("position_embd.weight", t.rows(), c.n_embd);
    const int64_t usable = t.rows() - c.position_offset;
    if (usable < 1) fail("'{}': position_embd.weight has {} rows, too few", file_.path().string(), t.rows());
    c.n_ctx_train = std::min(c.n_ctx_train, usable);
  }

  Norm scaled(Norm norm, float factor) {
    for (Vector* v : {&norm.weight, &norm.bias}) {
      if (!*v || factor == 1) continue;
      std::vector<float> values(v->data, v->data + v->n);
      for (float& x : values) x *= factor;
      *v = own(std::move(values));
    }
    return norm;
  }

  // The frequencies of every rope, one behind the other. A tensor of divisors is llama3's scaling, or Phi-3's.
  std::vector<float> rope_frequencies() {
    const Config& c = m_.config_;
    std::vector<float> all;
    for (const Rope& rope : c.ropes) {
      const Vector divisors = rope.factors.empty() ? Vector{} : vector(rope.factors, c.n_rot / 2);
      for (int64_t i = 0; i < divisors.n; ++i) {
        if (!(divisors.data[i] > 0) || !std::isfinite(divisors.data[i])) {
          fail("'{}': {}[{}] is {}, expected a positive number", file_.path().string(), rope.factors, i,
               divisors.data[i]);
        }
      }
      const auto f = model::rope_frequencies(rope, c.n_rot, {divisors.data, static_cast<size_t>(divisors.n)});
      all.insert(all.end(), f.begin(), f.end());
    }
    return all;
  }

  void bind_layer(int64_t layer, LayerWeights& l) {
    const std::string p = fmt::format("blk.{}.", layer);
    m_.config_.latent ? LatentBinder(*this, m_.config_, p).bind(l) : bind_attention(p, l);
    if (m_.config_.experts.in_layer(layer)) {
      ExpertBinder(*this, file_, m_.config_, p).bind(l);
    } else {
      bind_ffn(p, l);
    }
    bind_predictor(p, l.predictor);
    l.attn_norm = norm(p, arch_.attn_norm);
    l.attn_post_norm = norm(p, arch_.attn_post_norm), l.ffn_post_norm = norm(p, arch_.ffn_post_norm);
    if (!m_.config_.parallel_block) {
      l.ffn_norm = norm(p, arch_.ffn_norm);
    } else {  // llama.cpp's names for Falcon: attn_norm feeds the FFN; attn_norm_2, where it exists (40B), the
              // attention
      l.ffn_norm = l.attn_norm;
      if (has(p + "attn_norm_2.weight")) l.attn_norm = norm(p + "attn_norm_2");
    }
  }

  void bind_attention(const std::string& p, LayerWeights& l) {
    const Config& c = m_.config_;
    const int64_t n_q = c.n_head * c.head_dim, n_kv = c.n_head_kv * c.head_dim;
    if (has(p + "attn_qkv.weight")) {  // fused: q's rows, then k's, then v's
      const Matrix qkv = matrix(p + "attn_qkv.weight", n_q + 2 * n_kv, c.n_embd);
      l.wq = qkv.slice_rows(0, n_q);
      l.wk = qkv.slice_rows(n_q, n_kv);
      l.wv = qkv.slice_rows(n_q + n_kv, n_kv);
      if (const Vector b = optional_vector(p + "attn_qkv.bias", n_q + 2 * n_kv)) {
        l.bq = {b.data, n_q};
        l.bk = {b.data + n_q, n_kv};
        l.bv = {b.data + n_q + n_kv, n_kv};
      }
    } else {
      l.wq = matrix(p + "attn_q.weight", n_q, c.n_embd);
      l.wk = matrix(p + "attn_k.weight", n_kv, c.n_embd);
      l.wv = matrix(p + "attn_v.weight", n_kv, c.n_embd);
      l.bq = optional_vector(p + "attn_q.bias", n_q);
      l.bk = optional_vector(p + "attn_k.bias", n_kv);
      l.bv = optional_vector(p + "attn_v.bias", n_kv);
    }
    l.wo = matrix(p + "attn_output.weight", c.n_embd, n_q);
    l.bo = optional_vector(p + "attn_output.bias", c.n_embd);
    l.q_norm = head_norm(p + "attn_q_norm.weight", n_q);
    l.k_norm = head_norm(p + "attn_k_norm.weight", n_kv);
    l.sinks = optional_vector(p + "attn_sinks.weight", c.n_head);
  }

  // The norm of every head, or of all at once.
  Vector head_norm(const std::string& name, int64_t all) {
    if (!has(name)) return {};
    return vector(name, require(name).cols() == all ? all : m_.config_.head_dim);
  }

  void bind_ffn(const std::string& p, LayerWeights& l) {
    const Config& c = m_.config_;
    FfnShard& f = l.ffn;
    f.act = c.ffn.act;
    f.act_threshold = c.ffn.act_threshold;
    f.up_relu = c.ffn.up_relu;
    if (arch_.fused_gate_up) {
      const Matrix both = matrix(p + "ffn_up.weight", 2 * c.n_ff, c.n_embd);
      f.gate = both.slice_rows(0, c.n_ff), f.up = both.slice_rows(c.n_ff, c.n_ff);
    } else if (c.ffn.gated) {
      f.gate = matrix(p + "ffn_gate.weight", c.n_ff, c.n_embd);
      f.gate_bias = optional_vector(p + "ffn_gate.bias", c.n_ff);
      f.up = matrix(p + "ffn_up.weight", c.n_ff, c.n_embd);
      f.up_bias = optional_vector(p + "ffn_up.bias", c.n_ff);
    } else {  // ungated families: the first matrix decides which neurons are active, as a gate does
      f.gate = matrix(p + "ffn_up.weight", c.n_ff, c.n_embd);
      f.gate_bias = optional_vector(p + "ffn_up.bias", c.n_ff);
    }
    if (has(p + "ffn_down_t.weight")) {
      f.down_t = matrix(p + "ffn_down_t.weight", c.n_ff, c.n_embd);
    } else {
      f.down = matrix(p + "ffn_down.weight", c.n_embd, c.n_ff);
    }
    const std::string t_bias = p + "ffn_down_t.bias";
    l.ffn_down_bias = optional_vector(has(t_bias) ? t_bias : p + "ffn_down.bias", c.n_embd);
  }

  // PowerInfer's predictor: score = fc2 relu(fc1 x), and a neuron is computed unless score <
  // powerinfer.sparse_threshold (SJTU-IPADS/PowerInfer, llama.cpp: llm_build_ffn_sparse). x is the residual stream
  // before the FFN's norm: after the attention's sum in build_llama_variants, the layer's input in build_falcon. Files
  // with GGUF's own magic are not PowerInfer's: theirs reads the FFN's normed input (`hearth synth --predictor-rank`),
  // unless hearth.predictor.input says otherwise.
  void bind_predictor(const std::string& p, LayerPredictor& predictor) {
    if (!has(p + "fc1.weight") && !has(p + "fc2.weight")) return;
    const Config& c = m_.config_;
    const int64_t rank = require(p + "fc1.weight").rows();
    predictor.weights.fc1 = matrix(p + "fc1.weight", rank, c.n_embd);
    predictor.weights.fc2 = matrix(p + "fc2.weight", c.n_ff, rank);
    predictor.weights.fc1_bias = optional_vector(p + "fc1.bias", rank);
    predictor.weights.relu = true;
    predictor.weights.threshold = predictor_threshold();
    predictor.method = "powerinfer";
    predictor.input = predictor_input();
  }

  // One for all layers: below the key's value by the least that floats allow, because `score == threshold` counts.
  Vector predictor_threshold() {
    if (predictor_threshold_) return predictor_threshold_;
    const float t = file_.get<float>(std::string(kScoreThresholdKey)).value_or(0);
    if (!std::isfinite(t)) {
      fail("'{}': the predictors' threshold ({}) is {}, expected a number", file_.path().string(), kScoreThresholdKey,
           t);
    }
    predictor_threshold_ = own(std::vector<float>(static_cast<size_t>(m_.config_.n_ff), below_score(t)));
    return predictor_threshold_;
  }

  PredictorInput predictor_input() const {
    const auto said = file_.get<std::string>("hearth.predictor.input");
    if (!said) return file_.powerinfer() ? PredictorInput::residual : PredictorInput::ffn_input;
    for (const PredictorInput input : {PredictorInput::ffn_input, PredictorInput::residual}) {
      if (*said == to_string(input)) return input;
    }
    fail("'{}': hearth.predictor.input is '{}', expected ffn_input or residual", file_.path().string(), *said);
  }

  Model& m_;
  const gguf::File& file_;
  const Architecture& arch_;
  LoadOptions options_;
  Vector predictor_threshold_;
};

const char* to_string(PredictorInput input) {
  switch (input) {
    case PredictorInput::ffn_input:
      return "ffn_input";
    case PredictorInput::residual:
      return "residual";
  }
  return "?";
}

Model Model::load(const std::filesystem::path& path, const LoadOptions& options) {
  Model m;
  m.file_ = std::make_unique<gguf::File>(gguf::File::open(path));
  m.config_ = read_config(*m.file_, options.activation);
  m.transpose_down_ = options.transpose_down;
  Binder(m, options).bind_all();
  return m;
}

namespace {

// Calls f on every distinct matrix (a tied head is the embedding).
template <typename F>
void for_each_distinct(const Weights& weights, F&& f) {
  Weights copy = weights;
  if (copy.output.data == copy.tok_embd.data) copy.output = {};
  copy.for_each_matrix(f);
}

}  // namespace

size_t Model::weight_bytes() const {
  size_t total = 0;
  for_each_distinct(weights_, [&](const Matrix& m) { total += m.bytes(); });
  return total;
}

size_t Model::parameters() const {
  size_t total = 0;
  for_each_distinct(weights_, [&](const Matrix& m) { total += static_cast<size_t>(m.rows * m.cols); });
  return total;
}

bool Model::quantized() const {
  bool any = false;
  for_each_distinct(weights_, [&](const Matrix& m) { any |= is_quantized(m.type); });
  return any;
}

std::string Model::type_name() const {
  std::map<DType, size_t> bytes;
  for (const LayerWeights& l : weights_.layers) {
    const auto count = [&](const Matrix* m) { *m ? bytes[m->type] += m->bytes() : 0; };
    for (const Matrix* m : l.attention()) count(m);
    for (const Matrix* m : {&l.ffn.gate, &l.ffn.up, &l.ffn.down, &l.ffn.down_t}) count(m);
    for (const Expert& e : l.experts) bytes[e.ffn.gate.type] += e.bytes();
  }
  const auto most = std::max_element(bytes.begin(), bytes.end(), [](auto& a, auto& b) { return a.second < b.second; });
  return traits(most->first).name;
}

void Model::release_tensors(const std::string& prefix) const {
  for (const gguf::TensorInfo& t : file_->tensors()) {
    if (t.name.starts_with(prefix)) file_->dont_need(t);
  }
}

void Model::release_file() const {
  release_tensors("");
}

void Model::release_attention(int64_t layer) {
  release_tensors(fmt::format("blk.{}.attn_", layer));
}

void Model::drop_predictors() {
  for (LayerWeights& layer : weights_.layers) layer.predictor = {};
}

void Model::set_predictors(const std::vector<LayerPredictor>& layers, std::shared_ptr<const void> owner) {
  HEARTH_CHECK(layers.size() == weights_.layers.size());
  for (size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].weights) weights_.layers[l].predictor = layers[l];
  }
  predictor_owners_.push_back(std::move(owner));
}

}  // namespace hearth::model
