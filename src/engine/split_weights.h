#pragma once
// A model's weights divided between a main device and the CPU, as a Placement says.
#include <vector>

#include "core/buffer.h"
#include "core/device.h"
#include "engine/forward.h"
#include "engine/placement.h"
#include "model/model.h"

namespace hearth::engine {

struct SplitWeights {
  model::Weights main;            // in the main device's memory; parts it does not own are empty
  model::Weights host;            // in the CPU's
  std::vector<LayerSplit> split;  // per layer
  std::vector<HostBuffer> packs;  // rows of cold neurons, contiguous: what `host` points to in layers with both kinds

  bool embedding_on_host = false, output_on_host = false;
};

// Row k of the main device's shard of a layer is neuron gpu_bucket[k]; row k of the CPU's is the k-th of the others.
// Copies one layer at a time. The model must have transposed down projections (Model::prepare_sparse) unless every
// layer is whole on one side. Throws Error when a layer is divided and its down projection is not transposed.
SplitWeights split_weights(model::Model& model, const Placement& placement, Device& main, Device& host);

}  // namespace hearth::engine
