#pragma once
// The gates and ups of all neurons of the experts that tokens use, computed expert by expert on any device and brought
// to the host.
#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/device.h"
#include "core/experts.h"
#include "model/config.h"

namespace hearth::offline {

class ExpertGates {
 public:
  // The device must outlive this. `config`: of a mixture.
  ExpertGates(Device& device, const model::Config& config, bool quantized);

  void reserve(const Limits& limits);
  // Neurons of a token's experts, the shared one among them.
  int64_t n() const { return n_; }
  // Of T tokens with this input. The set has all experts.
  void evaluate(const ExpertSet& set, const ExpertChoice& choice, Act in, int64_t T, bool with_up);

  std::vector<int32_t> ids;     // [T][n_named]: the choice
  std::vector<float> weights;   // [T][n_named]
  std::vector<float> gate, up;  // [T][n()] pre-activations, biases included; up where it was asked for and there is one
  std::vector<int64_t> offsets;  // [n_named]: where the neurons of each of a token's experts begin

 private:
  struct Place {
    int64_t token = 0, slot = 0;
  };
  void evaluate_expert(const FfnShard& shard, const std::vector<Place>& places, bool with_up);

  Device& device_;
  int64_t n_embd_, n_;
  bool quantized_;
  DeviceBuffer in_, in_q8_, gate_, up_;  // of one expert: [max_tokens][n_embd]; [max_tokens][n_ff_expert]
  std::vector<float> rows_, gathered_, product_;
};

}  // namespace hearth::offline
