#pragma once
// A Device in front of another one that looks at every dense FFN on its way: gate and up are computed once more into
// its own buffers and counted on the host. Works with any device.
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/forwarding_device.h"
#include "core/thread_team.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/profile/activation_counter.h"

namespace hearth::offline {

class CountingDevice final : public ForwardingDevice {
 public:
  // All must outlive this device. `threshold`: a neuron is active when |act(gate)| > threshold. `moments`: also gather
  // the second moments of the FFN's input.
  CountingDevice(Device& inner, ThreadTeam& team, const model::Model& model, float threshold, bool moments,
                 model::Statistics& statistics);
  ~CountingDevice() override;

  // Counted from here on: a new text, held out or not.
  void begin_sequence(bool heldout);

  void reserve(const Limits& limits) override;

  void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) override;
  // Not used while profiling: sparse steps do not compute what is to be counted.
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y) override;

 private:
  void count(size_t layer, const FfnShard& shard, Act in, int64_t T);
  void add_moments(size_t layer, const float* host_input, int64_t T);
  size_t layer_of(const FfnShard& shard);

  model::Statistics& statistics_;
  bool moments_, heldout_ = false;
  int64_t n_embd_ = 0, n_ff_ = 0;
  std::vector<ActivationCounter> counters_;         // by layer
  std::unordered_map<const void*, size_t> layers_;  // by the gate's address on the device, in order of first use
  DeviceBuffer gate_, up_;                          // [max_tokens][n_ff]
  std::vector<float> host_gate_, host_up_, host_input_;
};

// ||down row|| of every neuron of a layer, [n_ff], whichever way `down` is stored.
std::vector<float> down_row_norms(const FfnShard& host_shard);

}  // namespace hearth::offline
