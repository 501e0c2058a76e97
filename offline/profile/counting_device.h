#pragma once
// A Device in front of another one that counts the activations of every dense FFN on its way, and sums the squares of
// what matrices read.
#include <unordered_map>
#include <vector>

#include "core/thread_team.h"
#include "model/sidecar.h"
#include "offline/profile/activation_counter.h"
#include "offline/profile/ffn_probe.h"
#include "offline/profile/importance_collector.h"
#include "offline/profile/predictor_trial.h"

namespace hearth::offline {

class CountingDevice final : public FfnProbe {
 public:
  // All must outlive this device. `threshold`: a neuron is active when |act(gate)| > threshold. `moments`: also gather
  // the second moments of the FFN's input. `trial` gets the tokens that it wants, `importance` (null: nobody) the inputs of
  // matrices.
  CountingDevice(Device& inner, ThreadTeam& team, const model::Model& model, float threshold, bool moments,
                 PredictorTrial& trial, ImportanceCollector* importance, model::Statistics& statistics);

  // Counted from here on: a new text, held out or not.
  void begin_sequence(bool heldout);

  using Device::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override;
  void ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;

 private:
  void add_moments(size_t layer, const float* input, int64_t T);
  void add_down_inputs(size_t layer, int64_t T);  // what evaluate() left is gone
  // The first T rows of n values.
  const float* bring(Act in, int64_t T, int64_t n);

  ThreadTeam& team_;
  PredictorTrial& trial_;
  ImportanceCollector* importance_;
  model::Statistics& statistics_;
  bool moments_, heldout_ = false;
  std::vector<NeuronRule> rules_;            // by layer
  std::vector<ActivationCounter> counters_;  // by layer
  // Layers by the address of attn_q or attn_output on the device, in order of first use.
  std::unordered_map<const void*, size_t> readers_of_attention_, attn_outputs_;
  std::vector<float> host_input_;
};

}  // namespace hearth::offline
