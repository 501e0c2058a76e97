#pragma once
// Ways to divide a model between a main device and the CPU.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/placement.h"
#include "model/model.h"

namespace hearth::test {

// The share of hot neurons in a layer, and who has the rest.
struct Division {
  std::string name;
  std::vector<double> hot_share;                                // by layer, repeated
  std::vector<engine::Where> attention = {engine::Where::gpu};  // by layer, repeated
  engine::Where embedding = engine::Where::gpu, output = engine::Where::gpu;
  double linked = 0.0;  // of the other neurons, which the GPU reads over the link; with predictors
};

inline const std::vector<Division>& divisions() {
  using engine::Where;
  static const std::vector<Division> all = {
      {"nothing_hot", {0.0}},
      {"everything_hot", {1.0}},
      {"a_third_hot", {0.37}},
      {"mixed", {0.0, 0.61, 1.0}, {Where::gpu, Where::cpu}, Where::cpu, Where::gpu},
      {"all_on_cpu_but_head", {0.0}, {Where::cpu}, Where::cpu, Where::gpu},
      {"attention_on_cpu", {0.5}, {Where::cpu}, Where::gpu, Where::cpu},
      {"ends_on_cpu", {1.0}, {Where::gpu}, Where::cpu, Where::cpu},
      {"some_layers_hot", {0.3, 0.0}, {Where::gpu, Where::gpu, Where::cpu}},
      {"some_linked", {0.3, 0.6}, {Where::gpu, Where::cpu}, Where::gpu, Where::gpu, 0.5},
      {"all_linked", {0.3}, {Where::gpu}, Where::gpu, Where::gpu, 1.0},
  };
  return all;
}

// `predict`: every layer's neurons are named by a predictor on the main device.
inline engine::Placement placement_of(const Division& d, const model::Model& m, bool predict, std::mt19937& rng) {
  const model::Config& c = m.config();
  engine::Placement p;
  p.embedding = d.embedding, p.output = d.output;
  for (int64_t l = 0; l < c.n_layer; ++l) {
    engine::LayerPlacement& layer = p.layers.emplace_back();
    layer.attention = d.attention[static_cast<size_t>(l) % d.attention.size()];
    const double share = d.hot_share[static_cast<size_t>(l) % d.hot_share.size()];
    for (int32_t id = 0; id < c.n_ff; ++id) {
      const bool hot = std::uniform_real_distribution<>(0, 1)(rng) < share;
      if (hot) layer.gpu_bucket.push_back(id);
      if (hot) continue;
      if (predict && std::uniform_real_distribution<>(0, 1)(rng) < d.linked) layer.gpu_linked.push_back(id);
    }
    layer.look_ahead = true;
    if (predict) {
      layer.selection = engine::Selection::predictor;
      layer.predictor = engine::Where::gpu;
    }
  }
  return p;
}

}  // namespace hearth::test
