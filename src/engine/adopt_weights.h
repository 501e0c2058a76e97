#pragma once
// Moves a model's weights into a device's address space.
#include <cstddef>
#include <span>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/model.h"

namespace hearth::engine {

// The same weights as views in the device's memory. On the CPU they are the file's mapping itself; what a GPU has
// copied is let go of on the host. A tied head is placed once.
model::Weights adopt_weights(model::Model& model, Device& device, bool with_predictors);

// The layer's experts by id in the device's memory: of each what `part` makes of it, all, some of its neurons, or
// nothing. A device that does not take down_t gets down: the file's own, or one transposed back in `memory`, of
// standard_type(); a host device goes on using that memory, others have copied it.
std::vector<Expert> adopt_experts(const model::Model& model, size_t layer,
                                  FunctionRef<Expert(size_t id, const Expert& whole)> part, Device& device,
                                  std::vector<HostBuffer>& memory);

// Which neurons' rows of gate and up are read singly, in layers that have down_t.
enum class SingleRows {
  none,    // every neuron's
  active,  // up, where the gate has found the neuron active; gates are read whole
  named,   // gate and up, of neurons that a predictor or another device may name
};

// Moves the weights that a host device reads whole (not an embedding that is no head), and that are neither in `own`
// nor the model's own memory already, to one piece of its memory, and lets go of the file's pages. Such memory is in
// huge pages where the system has them, and read faster than a file's. Where the device has a layout of its own for a
// matrix, that is packed (Device::pack()); others, and those read by rows, are copied on every core. The latter are
// down_t, predictors, and what `rows` says; gates of experts are read whole. Throws Error when there is no room.
DeviceBuffer copy_from_file(const model::Model& model, Device& device, std::span<const std::byte> own, SingleRows rows,
                            model::Weights& weights);

}  // namespace hearth::engine
