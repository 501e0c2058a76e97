#pragma once
// A Device in front of another one whose FFNs, dense ones and experts, leave out the neurons that a threshold on
// |act(gate)| leaves out: a whole batch of tokens at once computes what a sparse decode computes token by token. It can
// also count how often the magnitudes |act(gate)| fall where, which is what thresholds are chosen from.
#include <cstdint>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "core/thread_team.h"
#include "offline/profile/activation_counter.h"
#include "offline/profile/ffn_probe.h"
#include "offline/tune/expert_gates.h"
#include "offline/tune/magnitudes.h"

namespace hearth::offline {

class ThresholdDevice final : public FfnProbe {
 public:
  // All must outlive this device, and the model's down projections must stay as they are. Throws Error when a down
  // projection is not transposed and cannot be, an expert's without being asked: no sparse decode is possible then.
  ThresholdDevice(Device& inner, ThreadTeam& team, const model::Model& model);

  // From here on: one threshold a layer; empty = plain dense. A layer whose threshold is 0 runs the inner device's own
  // dense FFN. Experts are the inner device's own, under the threshold.
  void set_thresholds(std::vector<float> by_layer, bool count = false);
  // Share of the neurons that were active, over layers and tokens, since set_thresholds(…, true).
  double density() const;
  uint64_t counted_active() const { return active_; }
  uint64_t counted_neurons() const { return neurons_; }

  // From here on dense passes add to these; null = no longer. See magnitudes.h.
  void observe(std::vector<MagnitudeHistogram>* histograms) { histograms_ = histograms; }
  void observe(std::vector<ThresholdCounts>* counts) { counts_ = counts; }

  void reserve(const Limits& limits) override;
  void ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override;
  // Neurons of a layer that a token uses, among which the active ones are counted.
  int64_t n_neurons(size_t layer) const { return is_mixture(layer) ? experts_.n() : n_ff_; }

 private:
  bool is_mixture(size_t layer) const { return static_cast<bool>(model_.weights().layers[layer].router); }
  float threshold(size_t layer) const { return thresholds_.empty() ? 0.0f : thresholds_[layer]; }
  bool looks() const { return count_active_ || histograms_ != nullptr || counts_ != nullptr; }
  const Matrix& down_of(size_t layer, const FfnShard& shard);
  // `gate`, and `up` where there is one, of T tokens: act(gate) in place, and on request the neurons' values, act(gate) *
  // up, into value_.
  void activate(size_t layer, int64_t T, std::vector<float>& gate, const std::vector<float>* up, bool with_values);
  void add_masked(size_t layer, const FfnShard& shard, int64_t T, Vector y_bias, float* y);
  // Adds T tokens' act(gate) and value_ to what is counted. norms: of the tokens' down rows, norm_stride apart.
  void look(size_t layer, int64_t T, const std::vector<float>& gate, const float* norms, int64_t norm_stride);
  void count_active(size_t layer, int64_t T, const std::vector<float>& gate);
  void look_at_experts(size_t layer, const ExpertSet& set, const ExpertChoice& choice, Act in, int64_t T);
  // value_ times each expert's weight, and the norms of the tokens' down rows into norms_.
  void weigh_experts(size_t layer, int64_t T);

  ThreadTeam& team_;
  std::vector<NeuronRule> rules_;  // by layer
  ExpertGates experts_;
  std::vector<std::vector<std::vector<float>>> down_norms_;  // by layer and expert, made when first observed
  std::vector<float> thresholds_;
  bool count_active_ = false;
  uint64_t active_ = 0, neurons_ = 0;
  std::vector<MagnitudeHistogram>* histograms_ = nullptr;
  std::vector<ThresholdCounts>* counts_ = nullptr;
  std::vector<float> value_, norms_;             // [T][n_neurons] act(gate) * up; of experts, ||down row||
  DeviceBuffer device_value_;                    // [T][n_ff]
  std::vector<uint64_t> piece_active_;           // by piece of a batch
  std::vector<HostBuffer> untransposed_;         // by layer: `down` of files that store it transposed, as f16 or f32
  std::vector<std::optional<Matrix>> own_down_;  // the same on the device
};

}  // namespace hearth::offline
