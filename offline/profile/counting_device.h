#pragma once
// A Device in front of another one that counts the activations of every dense FFN on its way and the experts that
// routers choose, and sums the squares of what matrices read.
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/thread_team.h"
#include "model/sidecar.h"
#include "offline/profile/activation_counter.h"
#include "offline/profile/expert_counter.h"
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

  void reserve(const Limits& limits) override;
  using Device::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override;
  void ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;
  // Each layer's router is tried on the input of the layer before, too (LayerStatistics::foreseen).
  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override;
  // Of ReLU families, the active neurons of every kInsideEvery-th token's experts are counted
  // (LayerStatistics::inside, inside_counts).
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override;

 private:
  static constexpr int64_t kInsideEvery = 16;
  // Keeps the rows that a layer's FFN reads, where the next layer has a router to be tried on them.
  void keep_for_next(size_t layer, Act in, int64_t T);
  std::vector<int32_t> bring_ids(const ExpertChoice& choice, int64_t T);
  // Counts the neurons of the experts `ids` whose act(gate) is not zero, for one token. Returns their share.
  double count_inside(const ExpertSet& set, std::span<const int32_t> ids, Act token, const NeuronRule& rule);
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
  std::vector<size_t> mixtures_;                         // layers with a router
  std::unordered_map<const void*, size_t> routers_;      // the same by the router's address, in order of first use
  std::vector<ExpertCounter> expert_counters_;           // by index in mixtures_
  DeviceBuffer kept_, foreseen_ids_, foreseen_weights_;  // [max_tokens][n_embd]; [max_tokens][n_named]
  std::optional<size_t> kept_of_;                        // the layer whose rows are kept
  size_t routed_ = 0;                                    // the layer whose router was the last to choose
  DeviceBuffer inside_;                                  // [n_named][n_ff_expert] gates of one token
};

}  // namespace hearth::offline
