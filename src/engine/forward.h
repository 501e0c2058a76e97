#pragma once
// The operations of a forward pass on one device, written once over Device. It reads like the papers; sizes and kernels
// are the device's business, and who computes what is the schedule's.
#include <cstdint>
#include <span>

#include "core/device.h"
#include "core/sparse_ffn.h"
#include "engine/activations.h"
#include "engine/kv_cache.h"
#include "engine/schedule.h"
#include "model/model.h"

namespace hearth::engine {

// When a neuron counts as active: |act(gate)| > the threshold.
struct Thresholds {
  float all = 0;
  std::span<const float> by_layer = {};  // [n_layer], instead of `all`; or empty
  float of(int64_t layer) const { return by_layer.empty() ? all : by_layer[static_cast<size_t>(layer)]; }
};

// One device's share of a model, and its buffers. The references must outlive it.
struct ForwardContext {
  const model::Config& config;
  const model::Weights& weights;  // in the device's address space
  Device& device;
  Activations& act;
  const KvCache& kv;
  Thresholds thresholds;
  bool long_context = false;  // may be longer than Config::long_rope_context
};

// The tokens of a pass.
struct PassShape {
  int64_t T = 1;
  int64_t max_kv = 1;                   // upper bound of the positions in use after the pass
  std::span<const BatchRun> runs = {};  // for more than kFewTokens
};

class Forward {
 public:
  Forward(const ForwardContext& context, const PassShape& shape) : c_(context), shape_(shape) {}

  int64_t T() const { return shape_.T; }
  // Elements of the residual stream.
  int64_t size() const { return shape_.T * c_.config.n_embd; }
  const model::LayerWeights& layer(int64_t l) const { return c_.weights.layers[static_cast<size_t>(l)]; }

  // act.ids [T] -> x [T][n_embd].
  void embed(float* x) const;
  // x rows [first, first + count) -> act.logits [count][n_vocab]: the last norm and the output head.
  void head(const float* x, int64_t first, int64_t count) const;

  // y += the post-norm of what half a layer adds, `sum`, which is undefined afterwards.
  void join(int64_t layer, Half half, float* sum, float* y) const;
  // x -> act.normed, or act.ffn_input().
  void norm(int64_t layer, Half half, const float* x) const;
  // y += Wo · attention(rope(Wq h), rope(Wk h), Wv h) + bo; `next`: the norm that reads y, or null.
  void attend(int64_t layer, Reads reads, const float* x, float* y, const NextNorm* next) const;
  // The neurons that the layer's predictor names, as `args` asks. x: the residual stream.
  void predict(int64_t layer, Reads reads, const float* x, const PredictArgs& args) const;
  // y += Wd · (act(Wg h) ⊙ Wu h) + bd, over all neurons of the device.
  void ffn_dense(int64_t layer, const Input& in, Vector bias, float* y, const NextNorm* next) const;
  // The same over those that `sparse` names. Sets its threshold and its counts.
  void ffn_sparse(int64_t layer, SparseArgs sparse, const Input& in, Vector bias, float* y, const NextNorm* next) const;

  // The experts of every token -> act.choice().
  void route(int64_t layer, Reads reads, const float* x) const;
  // y += the weighted sum of the chosen experts that this device has; `skips`: without neurons that are not active,
  // counted.
  void ffn_experts(int64_t layer, const ExpertChoice& choice, const Input& in, bool skips, float* y) const;

  // The input of an operation of this layer's FFN. x: the residual stream.
  Input ffn_input(int64_t layer, Reads reads, const float* x) const;
  // The norm that reads y next, when it is the FFN's of this layer, the attention's, or the head's.
  // (Only where there is that norm.)
  NextNorm next_ffn(int64_t layer, bool predicts) const;
  NextNorm next_attention(int64_t layer) const;
  NextNorm next_head() const;
  // The input of a predictor, this layer's or the next one's, on the input of this layer's FFN.
  Act predictor_input(const model::LayerPredictor& predictor, int64_t layer, const float* x) const;

 private:
  NormArgs norm_args(const model::Norm& norm) const;
  // An operation's input: the norm of x; x itself where there is no such norm.
  Input input(const model::Norm& norm, const float* x, Act result) const;
  // Queries, keys and values -> act.q, .k, .v.
  void project(const model::LayerWeights& w, const Input& in) const;
  void project_latents(const model::LayerWeights& w, const Input& in) const;
  void norm_heads(Vector weight, int64_t n, float* rows) const;
  AttentionArgs attention_args(int64_t layer) const;

  const ForwardContext& c_;
  PassShape shape_;
};

}  // namespace hearth::engine
