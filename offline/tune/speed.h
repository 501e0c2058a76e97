#pragma once
// The gain of thresholds: time per token by the planner's cost model, from how often each neuron exceeds its threshold.
#include <vector>

#include "offline/plan/planner.h"
#include "offline/tune/magnitudes.h"

namespace hearth::offline {

struct PlannedSpeed {
  double seconds = 0;   // per token
  double hit_rate = 0;  // share of the activations on the GPU
  double tokens_per_second() const { return 1 / seconds; }
};

class SpeedModel {
 public:
  // `counts`: by layer, threshold 0 first. The sparse decode evaluates every gate (Sparsity::exact).
  SpeedModel(ModelShape shape, const PlanRequest& request, const std::vector<ThresholdCounts>& counts);

  // The best plan when layer l uses threshold choice[l] of its counts.
  PlannedSpeed speed(const std::vector<size_t>& choice) const;
  // Seconds that one layer saves with its threshold k, against threshold 0: placed as without thresholds.
  double saved(size_t layer, size_t k) const;

 private:
  Frequencies frequencies(const std::vector<size_t>& choice) const;
  std::vector<double> frequencies(size_t layer, size_t k) const;
  // The layer under its threshold k: of experts, fewer neurons are read.
  LayerShape layer_under(size_t layer, size_t k) const;
  double layer_seconds(size_t layer, size_t k) const;

  ModelShape shape_;
  PlanRequest request_;
  const std::vector<ThresholdCounts>& counts_;
  Plan base_;  // without thresholds
  bool gpu_ = false;
};

}  // namespace hearth::offline
