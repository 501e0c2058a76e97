#include "engine/place.h"

namespace hearth::engine {

model::Weights place(const model::Model& model, Device& device) {
  model::Weights w = model.weights();
  const bool tied = model.tied_head();
  if (tied) w.output = {};
  w.for_each([&](auto& tensor) {
    if (tensor) tensor = device.adopt(tensor);
  });
  if (tied) w.output = w.tok_embd;
  return w;
}

}  // namespace hearth::engine
