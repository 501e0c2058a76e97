#pragma once
// Ways to divide a mixture of experts between a main device and the CPU.
#include <gtest/gtest.h>

#include <limits>

#include "core/forwarding_device.h"
#include "engine/placement.h"
#include "engine/share_out.h"
#include "model/model.h"

namespace hearth::test {

// A device whose kernels read down projections as files store them, as GPUs'.
class TakesNoDownT final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  bool takes_down_t() const override { return false; }
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override {
    for (const Expert& e : set.experts) EXPECT_FALSE(e.ffn.down_t);
    ExpertSet dense = set;
    dense.n_active = nullptr;
    ForwardingDevice::ffn_experts(dense, choice, in, T, y);
  }
};

// Which experts of a layer are on the main device, and who attends.
struct MixtureDivision {
  const char* name;
  bool (*hot)(int64_t layer, int32_t expert);
  bool (*host_attends)(int64_t layer) = [](int64_t) { return false; };
  bool main_without_experts = false;
};
inline const MixtureDivision kMixtureDivisions[] = {
    {"all_on_the_cpu", [](int64_t, int32_t) { return false; }},
    {"all_on_the_main_device", [](int64_t, int32_t) { return true; }},
    {"odd", [](int64_t, int32_t e) { return e % 2 == 1; }},
    {"by_layer", [](int64_t l, int32_t e) { return l == 0 ? e < 3 : l == 1; }},
    {"the_cpu_attends", [](int64_t l, int32_t e) { return l != 1 && e % 3 == 0; }, [](int64_t l) { return l > 0; }},
    {"no_kernels", [](int64_t, int32_t) { return false; }, [](int64_t l) { return l == 1; }, true},
};

// Of the experts that a streamed prompt chooses all visit the main device, none, or about half of the bytes.
inline constexpr engine::ShareRates kAllVisit{0, 0, 1, 1},
    kNoneVisits{.first_visit = std::numeric_limits<double>::infinity()}, kHalfVisit{0, 1, 1, 0};

inline engine::Placement placement_of(const MixtureDivision& d, const model::Model& m) {
  engine::Placement p;
  p.embedding = p.output = engine::Where::gpu;
  for (int64_t l = 0; l < m.config().n_layer; ++l) {
    engine::LayerPlacement& layer = p.layers.emplace_back();
    layer.attention = d.host_attends(l) ? engine::Where::cpu : engine::Where::gpu;
    layer.selection = engine::Selection::all;
    const auto& w = m.weights().layers[static_cast<size_t>(l)];
    for (int32_t id = 0; id < std::ssize(w.experts); ++id) {
      if (d.hot(l, id)) layer.gpu_experts.push_back(id);
    }
    for (int32_t id = 0; !w.router && id < w.ffn.n(); ++id) layer.gpu_bucket.push_back(id);
  }
  return p;
}

}  // namespace hearth::test
