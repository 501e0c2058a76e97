#pragma once
// The simplest division of a model.
#include "engine/placement.h"
#include "model/model.h"

namespace hearth::test {

// Half of every layer's neurons on each side; attention, embedding and head on the main device.
inline engine::Placement halves(const model::Config& c) {
  engine::Placement p;
  p.embedding = p.output = engine::Where::gpu;
  for (int64_t l = 0; l < c.n_layer; ++l) {
    engine::LayerPlacement& layer = p.layers.emplace_back();
    layer.attention = engine::Where::gpu;
    for (int32_t id = 0; id < c.n_ff; id += 2) layer.gpu_bucket.push_back(id);
  }
  return p;
}

}  // namespace hearth::test
