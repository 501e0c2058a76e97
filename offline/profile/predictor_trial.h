#pragma once
// How many neurons a model file's own predictors name: tried on a few tokens while a text is profiled. Predictors that
// hearth has made bring this figure with them.
#include <cstdint>
#include <vector>

#include "core/device.h"
#include "model/sidecar.h"
#include "offline/profile/activation_counter.h"

namespace hearth::offline {

class PredictorTrial {
 public:
  static constexpr int64_t kTokens = 32;  // of a layer

  // All must outlive the trial. `threshold`: a neuron is active when |act(gate)| > threshold. Layers that `statistics`
  // knows the figures of already are not tried again, nor predictors that read something else than the FFN's input.
  PredictorTrial(const model::Model& model, float threshold, const model::Statistics& statistics);

  // How many more tokens of a layer are wanted.
  int64_t wanted(size_t layer) const { return tokens_[layer].wanted; }
  // T of them: inputs of the FFN [T][n_embd], and pre-activations of the gates [T][n_ff].
  void add(size_t layer, const float* inputs, const float* gates, int64_t T);
  // Runs the predictors on all of them and adds up in `statistics`. `host`: a host device nobody else uses.
  void finish(Device& host, model::Statistics& statistics) const;

 private:
  struct Tokens {
    int64_t wanted = 0;
    std::vector<float> inputs;  // [n][n_embd]
    uint64_t active = 0;
  };

  const model::Model& model_;
  float threshold_;
  std::vector<Tokens> tokens_;  // by layer
};

}  // namespace hearth::offline
