#pragma once
// Measured speed of decoding with thresholds.
#include <cstdint>
#include <span>

#include "core/device.h"
#include "engine/engine.h"
#include "model/model.h"
#include "offline/tune/evaluate.h"

namespace hearth::offline {

// Tokens/s of greedy single-token decode after `prompt`, the best of three runs of n tokens. Transposes the model's
// down projections (Model::prepare_sparse), which an Evaluator must not see: call it after the last comparison.
double measure_decode(model::Model& model, Device& device, const Thresholds& thresholds,
                      std::span<const int32_t> prompt, int64_t n);

}  // namespace hearth::offline
