#pragma once
// Moves a model's weights into a device's address space.
#include "core/device.h"
#include "model/model.h"

namespace hearth::engine {

// The same weights as views in the device's memory. On the CPU they are the file's mapping itself; what a GPU has
// copied is let go of on the host. A tied head is placed once.
model::Weights place(model::Model& model, Device& device, bool with_predictors);

}  // namespace hearth::engine
