#include "engine/place.h"

namespace hearth::engine {

model::Weights place(model::Model& model, Device& device, bool with_predictors) {
  model::Weights w = model.weights();
  if (!with_predictors) {
    for (model::LayerWeights& layer : w.layers) layer.predictor = {};
  }
  const bool tied = model.tied_head();
  if (tied) w.output = {};
  w.for_each([&](auto& tensor) {
    if (tensor) tensor = device.adopt(tensor);
  });
  if (tied) w.output = w.tok_embd;
  if (device.is_host()) return w;
  device.synchronize();
  for (int64_t l = 0; l < model.config().n_layer; ++l) model.release_attention(l), model.release_ffn(l);
  return w;
}

}  // namespace hearth::engine
