#pragma once
// Ways to divide the neurons of ReLU experts between a main device and the CPU.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "engine/placement.h"
#include "model/model.h"

namespace hearth::test {

constexpr int64_t kSplitExperts = 5;  // of a layer, without the shared one, of 96 neurons or so

// How many neurons of an expert are on the main device, of n.
struct ExpertSplit {
  const char* name;
  int64_t (*on_main)(int64_t layer, int32_t expert, int64_t n);
  bool host_attends = false;
};
inline const ExpertSplit kExpertSplits[] = {
    {"none", [](int64_t, int32_t, int64_t) { return int64_t{0}; }},
    {"all_whole", [](int64_t, int32_t, int64_t n) { return n; }},
    {"a_block_of_an_odd_number", [](int64_t, int32_t e, int64_t) { return int64_t{e % 2 == 0 && e < 5 ? 32 : 0}; }},
    {"a_block_of_all", [](int64_t, int32_t, int64_t) { return int64_t{32}; }},
    {"by_layer",
     [](int64_t l, int32_t e, int64_t n) {
       return e == kSplitExperts ? n : l == 0 ? int64_t{64} : l == 1 ? n : 32;
     }},
    {"the_shared_one", [](int64_t, int32_t e, int64_t) { return int64_t{e == kSplitExperts ? 32 : 0}; }},
    {"the_cpu_attends", [](int64_t, int32_t e, int64_t) { return int64_t{e % 3 == 1 ? 64 : 0}; }, true},
};

// Random neurons of each expert, so that a mistake in their order shows.
inline engine::Placement placement_of(const ExpertSplit& split, const model::Model& m) {
  engine::Placement p;
  p.embedding = p.output = engine::Where::gpu;
  std::mt19937 rng(7);
  for (int64_t l = 0; l < m.config().n_layer; ++l) {
    engine::LayerPlacement& layer = p.layers.emplace_back();
    layer.attention = split.host_attends ? engine::Where::cpu : engine::Where::gpu;
    layer.selection = engine::Selection::all;
    const auto& experts = m.weights().layers[static_cast<size_t>(l)].experts;
    for (int32_t id = 0; id < std::ssize(experts); ++id) {
      const int64_t n = experts[static_cast<size_t>(id)].ffn.n(), on_main = split.on_main(l, id, n);
      if (on_main == 0) continue;
      layer.gpu_experts.push_back(id);
      std::vector<int32_t>& neurons = layer.gpu_expert_neurons.emplace_back(static_cast<size_t>(n));
      std::iota(neurons.begin(), neurons.end(), 0);
      std::shuffle(neurons.begin(), neurons.end(), rng);
      neurons.resize(static_cast<size_t>(on_main < n ? on_main : id % 2 == 0 ? 0 : n));  // both mean: all of them
      std::sort(neurons.begin(), neurons.end());
    }
  }
  return p;
}

}  // namespace hearth::test
