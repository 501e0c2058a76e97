#pragma once
// Notes, for every sparse FFN of one token, its input and the neurons that were active.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/error.h"
#include "core/forwarding_device.h"

namespace hearth::test {

class RecordingDevice final : public ForwardingDevice {
 public:
  struct Step {
    std::vector<float> input;     // [n_embd] the normed input of the FFN
    std::vector<int32_t> active;  // ascending
  };
  // `inner`: a CPU device.
  using ForwardingDevice::ForwardingDevice;

  // In the order of the calls: the layers of the first token, then those of the second, …
  std::vector<Step>& steps() { return steps_; }

  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& input, int64_t T, Vector bias, float* y,
                  const NextNorm* next) override {
    HEARTH_CHECK(T == 1 && shard.act == Activation::relu && sparse.n_active != nullptr);
    if (input.normed()) norm(input.norm, input.x, T, input.act);
    std::vector<float> gates(static_cast<size_t>(shard.n()));
    const MatmulPart gate{.w = shard.gate, .bias = shard.gate_bias, .y = gates.data()};
    matmul({&gate, 1}, input.act, T);
    Step step;
    step.input.assign(input.act.x, input.act.x + shard.gate.cols);
    for (size_t k = 0; k < gates.size(); ++k) {
      if (gates[k] > sparse.threshold) step.active.push_back(static_cast<int32_t>(k));
    }
    ForwardingDevice::ffn_sparse(shard, sparse, input.act, T, bias, y, next);
    EXPECT_EQ(std::ssize(step.active), *sparse.n_active);
    steps_.push_back(std::move(step));
  }

 private:
  std::vector<Step> steps_;
};

}  // namespace hearth::test
