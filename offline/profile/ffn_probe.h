#pragma once
// The base of devices that look at every dense FFN on its way to another device: which layer it is, and its gates and
// ups, computed once more into buffers of its own and brought to the host. Works with any device.
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/buffer.h"
#include "core/forwarding_device.h"
#include "model/model.h"

namespace hearth::offline {

class FfnProbe : public ForwardingDevice {
 public:
  // Both must outlive this device.
  FfnProbe(Device& inner, const model::Model& model);

  void reserve(const Limits& limits) override;
  // Sparse steps do not compute what is to be looked at: a broken invariant.
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override;

 protected:
  size_t layer_of(const FfnShard& shard);
  // The rows that an FFN reads, normed by the inner device where it was to do that on the way.
  Act rows_of(const Input& in, int64_t T);
  // Pre-activations, biases included, of T tokens: gate_ [T][n_ff] and, where `with_up` and the layer has one, up_.
  // Their contents of before are gone.
  void evaluate(const FfnShard& shard, Act in, int64_t T, bool with_up);

  const model::Model& model_;
  const int64_t n_embd_, n_ff_;
  std::vector<float> gate_, up_;

 private:
  size_t max_values_ = 0;                           // of one batch, in gate_ or up_
  std::unordered_map<const void*, size_t> layers_;  // by the gate's address on the device, in order of first use
  DeviceBuffer device_gate_, device_up_;            // allocated when first needed
};

// ||down row|| of every neuron of a layer, [n_ff], whichever way `down` is stored.
std::vector<float> down_row_norms(const FfnShard& host_shard);

}  // namespace hearth::offline
