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
  f.device.norm(norm_args(f.config, weights_of(f, layer).ffn_norm), x, T, f.act.ffn_input(layer, T));
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
void ffn_dense_block(const ForwardArgs& f, int64_t layer, int64_t T, Vector down_bias, float* y) {
  FfnShard shard = weights_of(f, layer).ffn;
  shard.gate.rows = shard.n_whole();  // without the lone gate rows behind them
  f.device.ffn_dense(shard, f.act.ffn_input(layer, T), T, down_bias, y);
}

void ffn_sparse_block(const ForwardArgs& f, int64_t layer, const SparseArgs& sparse, Act in, Vector down_bias,
                      float* y) {
  f.device.ffn_sparse(weights_of(f, layer).ffn, sparse, in, down_bias, y);
}

namespace {

// What a predictor reads: the residual stream before the FFN's norm, or the FFN's input in `layer`.
Act predictor_input(const ForwardArgs& f, const model::LayerPredictor& predictor, int64_t layer, const float* x) {
  if (predictor.input != model::PredictorInput::residual) return f.act.ffn_input(layer, 1);
  const Act in{const_cast<float*>(x), f.act.x_q8};  // inputs of operations are only read
  const Predictor& p = predictor.weights;
  if (is_quantized(p.fc1 ? p.fc1.type : p.fc2.type)) f.device.quantize(in, 1, f.config.n_embd);
  return in;
}

}  // namespace

void predict_neurons(const ForwardArgs& f, int64_t layer, const float* x, const HandOff& hand_off) {
  const LayerWeights& w = weights_of(f, layer);
  const bool looks_back = w.predictor.input == model::PredictorInput::previous_ffn_input;
  const Act in = predictor_input(f, w.predictor, looks_back ? layer - 1 : layer, x);
  f.device.predict(w.predictor.weights, in,
                   {.n_first = w.ffn.n(),
                    .first = f.act.predicted,
                    .rest = {},
                    .hand_off = hand_off,
                    .n_linked = f.split[static_cast<size_t>(layer)].linked.n(),
                    .linked = f.act.linked});
}

SparseArgs sparse_args(const ForwardArgs& f, int64_t layer) {
  SparseArgs sparse{.threshold = f.threshold(layer), .n_active = f.act.n_active + layer};
  if (f.split[static_cast<size_t>(layer)].selection == Selection::predictor) {
    sparse.predicted = f.act.predicted.ids;
    sparse.n_predicted = f.act.predicted.count;
  }
  return sparse;
}

bool streams_cold(const ForwardArgs& f, int64_t layer, int64_t T) {
  const LayerSplit& split = f.split[static_cast<size_t>(layer)];
  return split.has_cold && !split.whole_on_host() && f.stream != nullptr && f.stream->streams(layer, T);
}

bool asks_cpu(const ForwardArgs& f, int64_t layer, int64_t T) {
  const LayerSplit& split = f.split[static_cast<size_t>(layer)];
  const bool rests = split.rests && f.sparse && T == 1;
  return split.has_cold && !rests && !streams_cold(f, layer, T);
}

bool skips_neurons(const ForwardArgs& f, int64_t layer, int64_t T) {
  return f.sparse && T == 1 && f.split[static_cast<size_t>(layer)].selection != Selection::all;
}

bool adds_answer(const ForwardArgs& f, int64_t layer, int64_t T) {
  return skips_neurons(f, layer, T) && f.split[static_cast<size_t>(layer)].has_rows() && !f.config.parallel_block &&
         asks_cpu(f, layer, T);
}

void forward_embedding(const ForwardArgs& f, int64_t T) {
  f.device.embed(f.weights.tok_embd, f.act.ids, f.weights.pos_embd, f.act.pos, f.config.position_offset, T, f.act.x);
}

bool hands_over_input(const ForwardArgs& f, int64_t layer) {
  const LayerSplit& split = f.split[static_cast<size_t>(layer)];
  if (!f.sparse || (f.config.parallel_block && split.attention_on_host)) return false;
  return split.n_lone_gates > 0 || (split.selection == Selection::predictor && split.predictor_on_main);
}

bool next_looks_back(const ForwardArgs& f, int64_t layer, bool on_main) {
  if (layer + 1 >= f.config.n_layer) return false;
  const LayerSplit& next = f.split[static_cast<size_t>(layer + 1)];
  return next.selection == Selection::predictor && next.predictor_on_main == on_main &&
         weights_of(f, layer + 1).predictor.input == model::PredictorInput::previous_ffn_input;
}

bool hints_next(const ForwardArgs& f, int64_t layer) {
  if (!f.sparse || layer + 1 >= f.config.n_layer || !f.split[static_cast<size_t>(layer + 1)].hinted) return false;
  return !streams_cold(f, layer, 1) && !streams_cold(f, layer + 1, 1);
}

namespace {

// The main device's FFN, with what it hands to the CPU and what it gets back.
class FfnPart {
 public:
  FfnPart(const ForwardArgs& f, const LayerSplit& split, int64_t layer, int64_t T)
      : f_(f),
        split_(split),
        layer_(layer),
        T_(T),
        sparse_(skips_neurons(f, layer, T)),
        streams_(streams_cold(f, layer, T)) {}

  // Whether the neurons that the device finds for the CPU are part of the hand-off.
  bool predicts() const { return sparse_ && split_.selection == Selection::predictor && split_.predictor_on_main; }
  bool finds_gates() const { return sparse_ && split_.n_lone_gates > 0; }
  bool asks() const { return asks_cpu(f_, layer_, T_); }
  bool reads_input() const {
    return split_.has_hot || streams_ || predicts() || finds_gates() || (T_ == 1 && next_looks_back(f_, layer_, true));
  }

  // Before anything changes x: norm, prediction, and the hand-off unless the gates make it.
  void begin(bool asks) {
    float* const x = f_.act.x;
    const int64_t n = T_ * f_.config.n_embd;
    if (asks && !predicts() && !finds_gates()) f_.device.post(*f_.mailbox, x, n);
    if (reads_input()) ffn_norm(f_, layer_, x, T_);
    if (predicts()) predict_neurons(f_, layer_, x, {asks ? f_.mailbox : nullptr, handed_over(), n});
    if (T_ == 1 && hints_next(f_, layer_)) hint(x);
  }
  // x += this device's neurons, and the CPU's answer with `collect`.
  void finish(Mailbox* collect) {
    float* const x = f_.act.x;
    const Vector bias = split_.has_hot ? weights_of(f_, layer_).ffn_down_bias : Vector{};  // or the CPU adds it
    if (sparse_ && split_.has_rows()) {
      SparseArgs args = sparse_args(f_, layer_);
      if (finds_gates()) args.hand_off = {f_.mailbox, handed_over(), f_.config.n_embd};
      args.collect = collect;
      const LinkedNeurons linked{split_.linked, f_.act.linked, f_.act.n_linked_active + layer_};
      if (split_.linked.n() > 0) args.linked = &linked;
      if (collect != nullptr) args.next = next_matrices();
      return ffn_sparse_block(f_, layer_, args, f_.act.ffn_input(layer_, 1), bias, x);
    }
    if (split_.has_hot) ffn_dense_block(f_, layer_, T_, bias, x);
    if (streams_) {
      const Vector cold_bias = split_.has_hot ? Vector{} : weights_of(f_, layer_).ffn_down_bias;
      f_.stream->ffn(layer_, f_.act.ffn_input(layer_, T_), T_, cold_bias, x);
    }
    if (collect != nullptr) f_.device.collect(*collect, x, T_ * f_.config.n_embd);
  }

 private:
  // What the device multiplies when the CPU has answered: the next layer's first matrices, or the head's; empty where
  // the CPU has them.
  std::array<Matrix, 3> next_matrices() const {
    if (layer_ + 1 == f_.config.n_layer) return {f_.weights.output};
    const LayerWeights& w = weights_of(f_, layer_ + 1);
    return {w.wq, w.wk, w.wv};
  }
  // The next layer's predictor, on this layer's input.
  void hint(const float* x) {
    const LayerSplit& next = f_.split[static_cast<size_t>(layer_ + 1)];
    const model::LayerPredictor& predictor = weights_of(f_, layer_ + 1).predictor;
    f_.device.hint(predictor.weights, predictor_input(f_, predictor, layer_, x),
                   {f_.mailbox, next.n_first, next.linked.n()});
  }
  // Of one token, with its neurons.
  const float* handed_over() const { return hands_over_input(f_, layer_) ? f_.act.ffn_input(layer_, 1).x : f_.act.x; }

  const ForwardArgs& f_;
  const LayerSplit& split_;
  int64_t layer_, T_;
  bool sparse_, streams_;
};

// x += attention(n_a(x)), then x += ffn(n_f(x)). The hot neurons' sum is computed while the CPU computes the cold
// ones'.
void sequential_layer(const ForwardArgs& f, const LayerSplit& split, int64_t layer, int64_t T) {
  float* const x = f.act.x;
  if (split.attention_on_host) {
    const int64_t n = T * f.config.n_embd;
    f.device.post(*f.mailbox, x, n);
    f.device.collect(*f.mailbox, x, n);
  } else {
    attention_norm(f, layer, x, T);
    attention_block(f, layer, T, x);
  }
  if (split.whole_on_host()) return;
  FfnPart ffn(f, split, layer, T);
  ffn.begin(ffn.asks());
  ffn.finish(ffn.asks() ? f.mailbox : nullptr);
}

// x += attention(n_a(x)) + ffn(n_f(x)). What the CPU owns of the layer is one hand-off.
void parallel_layer(const ForwardArgs& f, const LayerSplit& split, int64_t layer, int64_t T) {
  float* const x = f.act.x;
  FfnPart ffn(f, split, layer, T);
  const bool asks = split.attention_on_host || ffn.asks();
  ffn.begin(asks);  // both norms before x changes
  if (!split.attention_on_host) attention_norm(f, layer, x, T);
  ffn.finish(nullptr);
  if (!split.attention_on_host) attention_block(f, layer, T, x);
  if (asks) f.device.collect(*f.mailbox, x, T * f.config.n_embd);
}

}  // namespace

void forward_layers(const ForwardArgs& f, int64_t T) {
  for (int64_t layer = 0; layer < f.config.n_layer; ++layer) {
    const LayerSplit& split = f.split[static_cast<size_t>(layer)];
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
