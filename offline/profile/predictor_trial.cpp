#include "offline/profile/predictor_trial.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/sparse_ffn.h"

namespace hearth::offline {

PredictorTrial::PredictorTrial(const model::Model& model, float threshold, const model::Statistics& statistics)
    : model_(model), threshold_(threshold), tokens_(model.weights().layers.size()) {
  HEARTH_CHECK(statistics.layers.size() == tokens_.size());
  for (size_t l = 0; l < tokens_.size(); ++l) {
    const model::LayerPredictor& p = model.weights().layers[l].predictor;
    const bool known = statistics.layers[l].named.active > 0;
    if (p.weights && p.input == model::PredictorInput::ffn_input && !known) tokens_[l].wanted = kTokens;
  }
}

void PredictorTrial::add(size_t layer, const float* inputs, const float* gates, int64_t T) {
  Tokens& tokens = tokens_[layer];
  HEARTH_CHECK(T <= tokens.wanted, "{} tokens where {} are wanted", T, tokens.wanted);
  tokens.wanted -= T;
  tokens.inputs.insert(tokens.inputs.end(), inputs, inputs + T * model_.config().n_embd);
  const FfnShard& ffn = model_.weights().layers[layer].ffn;
  const NeuronRule rule{ffn.act, ffn.act_threshold, ffn.up_relu, threshold_};
  tokens.active += static_cast<uint64_t>(
      std::count_if(gates, gates + T * ffn.n(), [&](float z) { return std::fabs(rule.activate(z)) > rule.threshold; }));
}

void PredictorTrial::finish(Device& host, model::Statistics& statistics) const {
  HEARTH_CHECK(host.is_host());
  if (std::all_of(tokens_.begin(), tokens_.end(), [](const Tokens& t) { return t.inputs.empty(); })) return;
  const int64_t n_embd = model_.config().n_embd, n_ff = model_.config().n_ff;
  Limits limits{.max_cols = std::max(n_embd, n_ff), .max_rows = n_ff, .n_ff = n_ff, .n_embd = n_embd};
  limits.quantized_weights = true;  // a predictor may be where the model is not
  host.reserve(limits);
  std::vector<int32_t> ids(static_cast<size_t>(n_ff));
  std::vector<std::byte> q8(host.q8_bytes(n_embd));
  for (size_t l = 0; l < tokens_.size(); ++l) {
    const Tokens& tokens = tokens_[l];
    model::NamedNeurons& named = statistics.layers[l].named;
    for (size_t at = 0; at < tokens.inputs.size(); at += static_cast<size_t>(n_embd)) {
      const Act in{const_cast<float*>(tokens.inputs.data() + at), q8.data()};  // inputs of operations are only read
      host.quantize(in, 1, n_embd);
      int32_t count = 0;
      PredictArgs args;
      args.n_own = n_ff, args.own = {ids.data(), &count, n_ff};
      host.sparse_ffn()->predict(model_.weights().layers[l].predictor.weights, in, 1, args);
      named.named += static_cast<uint64_t>(count);
    }
    named.active += tokens.active;
  }
}

}  // namespace hearth::offline
