#pragma once
// A Device in front of another one that counts the activations of every dense FFN on its way.
#include <vector>

#include "core/thread_team.h"
#include "model/sidecar.h"
#include "offline/profile/activation_counter.h"
#include "offline/profile/ffn_probe.h"
#include "offline/profile/predictor_trial.h"

namespace hearth::offline {

class CountingDevice final : public FfnProbe {
 public:
  // All must outlive this device. `threshold`: a neuron is active when |act(gate)| > threshold. `moments`: also gather
  // the second moments of the FFN's input. `trial` gets the tokens that it wants.
  CountingDevice(Device& inner, ThreadTeam& team, const model::Model& model, float threshold, bool moments,
                 PredictorTrial& trial, model::Statistics& statistics);

  // Counted from here on: a new text, held out or not.
  void begin_sequence(bool heldout);

  void ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;

 private:
  void add_moments(size_t layer, const float* input, int64_t T);
  // The FFN's input, of the first T tokens.
  const float* bring_input(Act in, int64_t T);

  PredictorTrial& trial_;
  model::Statistics& statistics_;
  bool moments_, heldout_ = false;
  std::vector<ActivationCounter> counters_;  // by layer
  std::vector<float> host_input_;
};

}  // namespace hearth::offline
