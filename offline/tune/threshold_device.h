#pragma once
// A Device in front of another one whose dense FFN leaves out the neurons that a threshold on |act(gate)| leaves out: a
// whole batch of tokens at once computes what a sparse decode computes token by token. It can also count how often the
// magnitudes |act(gate)| fall where, which is what thresholds are chosen from.
#include <cstdint>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "core/thread_team.h"
#include "offline/profile/activation_counter.h"
#include "offline/profile/ffn_probe.h"
#include "offline/tune/magnitudes.h"

namespace hearth::offline {

class ThresholdDevice final : public FfnProbe {
 public:
  // All must outlive this device, and the model's down projections must stay as they are. Throws Error when a down
  // projection is quantised and not transposed: no sparse decode of such a file is possible.
  ThresholdDevice(Device& inner, ThreadTeam& team, const model::Model& model);

  // From here on: one threshold a layer; empty = plain dense. A layer whose threshold is 0 runs the inner device's own
  // dense FFN.
  void set_thresholds(std::vector<float> by_layer, bool count = false);
  // Share of the neurons that were active, over layers and tokens, since set_thresholds(…, true).
  double density() const;
  uint64_t counted_active() const { return active_; }
  uint64_t counted_neurons() const { return neurons_; }

  // From here on dense passes add to these; null = no longer. See magnitudes.h.
  void observe(std::vector<MagnitudeHistogram>* histograms) { histograms_ = histograms; }
  void observe(std::vector<ThresholdCounts>* counts) { counts_ = counts; }

  void ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;

 private:
  const Matrix& down_of(size_t layer, const FfnShard& shard);
  void evaluate_values(size_t layer, const FfnShard& shard, Act in, int64_t T, bool with_up);
  void add_masked(size_t layer, const FfnShard& shard, int64_t T, Vector y_bias, float* y);
  void count_active(size_t layer, int64_t T);

  ThreadTeam& team_;
  std::vector<NeuronRule> rules_;               // by layer
  std::vector<std::vector<float>> down_norms_;  // by layer, made when first observed
  std::vector<float> thresholds_;
  bool count_active_ = false;
  uint64_t active_ = 0, neurons_ = 0;
  std::vector<MagnitudeHistogram>* histograms_ = nullptr;
  std::vector<ThresholdCounts>* counts_ = nullptr;
  std::vector<float> value_;                     // [T][n_ff] act(gate) * up
  DeviceBuffer device_value_;                    // [T][n_ff]
  std::vector<uint64_t> piece_active_;           // by piece of a batch
  std::vector<HostBuffer> untransposed_;         // by layer: `down` of files that store it transposed, as f16 or f32
  std::vector<std::optional<Matrix>> own_down_;  // the same on the device
};

}  // namespace hearth::offline
