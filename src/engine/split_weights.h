#pragma once
// A model's weights divided between a main device and the CPU, as a Placement says.
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "core/cold_rows.h"
#include "core/device.h"
#include "core/thread_team.h"
#include "engine/placement.h"
#include "engine/schedule.h"
#include "model/model.h"

namespace hearth::engine {

// The CPU's rows of all layers in one piece of host memory: huge pages where the system has them, page-locked for the
// main device, so that it can also read them itself.
class HostArena {
 public:
  HostArena() = default;
  HostArena(Device& main, size_t bytes);
  HostArena(HostArena&& other) noexcept { *this = std::move(other); }
  HostArena& operator=(HostArena&& other) noexcept;

  std::byte* take(size_t bytes);  // aligned to 64
  std::span<const std::byte> taken() const { return {memory_.data(), used_}; }
  size_t bytes() const { return memory_.bytes(); }
  static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  HostBuffer memory_;
  std::unique_ptr<PageLock> lock_;  // of it: goes first
  size_t used_ = 0;
};

struct SplitWeights {
  model::Weights main;            // in the main device's memory; parts it does not own are empty
  model::Weights host;            // in the CPU's
  std::vector<LayerFacts> facts;  // of every layer, for its schedule
  std::vector<MainRows> rows;     // of every layer
  HostArena arena;                // what `host` points to in layers, and experts, that the CPU has some neurons of
  std::vector<HostBuffer> packs;  // what `main` points to where its address space is the host's

  bool embedding_on_host = false, output_on_host = false;
};

// Facts of each layer, by a placement and a model, when every neuron that is to be linked can be. `main_can_route`:
// the main device offers ExpertFfn; without it a placement must leave all experts to the CPU, or Error is thrown.
std::vector<LayerFacts> layer_facts(const model::Model& model, const Placement& placement, bool main_can_route = true);

// Row k of the main device's shard of a layer is neuron gpu_bucket[k]; row k of the CPU's is Placement::cpu_rows()[k];
// the main device reads those of gpu_linked in place. A predictor that serves both has its rows in that order. Copies
// one layer at a time, on the team's threads. Of an expert that is cut both sides have a part, a smaller expert. The model must have transposed down projections (Model::prepare_sparse)
// unless every layer is whole on one side. Throws Error when a layer or an expert is divided and its down projection is
// not transposed, or a predictor is asked for and absent, or reads what its device does not have.
SplitWeights split_weights(model::Model& model, const Placement& placement, Device& main, Device& host,
                           ThreadTeam& team);

}  // namespace hearth::engine
