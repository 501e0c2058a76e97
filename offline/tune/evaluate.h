#pragma once
// Runs a model over windows of text under thresholds and compares it with itself without any.
#include <cstdint>
#include <span>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "engine/engine.h"
#include "model/model.h"
#include "offline/tune/metrics.h"
#include "offline/tune/texts.h"
#include "offline/tune/threshold_device.h"

namespace hearth::offline {

using Thresholds = std::vector<float>;  // of |act(gate)|, by layer

struct Measurement {
  Comparison comparison;
  uint64_t active = 0, neurons = 0;  // over tokens and layers
  size_t windows = 0;                // done
  double density() const { return neurons > 0 ? static_cast<double>(active) / static_cast<double>(neurons) : 0; }
};
void to_json(nlohmann::json& j, const Measurement& m);
void from_json(const nlohmann::json& j, Measurement& m);

class Evaluator {
 public:
  // All must outlive it. `window`: the longest window, its BOS included.
  Evaluator(model::Model& model, Device& device, ThreadTeam& team, int64_t window);

  // A dense pass over one window, for what the device observes.
  void run_dense(const TextPart& part, size_t window);
  // One window under each of the thresholds; the dense model's logits are computed once and held for the window. Adds
  // to out[i].
  void compare(const TextPart& part, size_t window, std::span<const Thresholds> thresholds, std::span<Measurement> out);

  ThresholdDevice& device() { return device_; }

 private:
  std::vector<int32_t> inputs(const TextPart& part, const Window& w) const;

  ThresholdDevice device_;
  engine::Engine engine_;
  engine::Sequence text_ = engine_.sequence();
};

}  // namespace hearth::offline
