#pragma once
// How far a sparse run was from a dense one: the same tokens again, both ways.
#include <cstdint>
#include <span>

#include "engine/engine.h"
#include "offline/tune/metrics.h"

namespace hearth::tools {

// The predictions of generated[1], …, generated[n], made token by token as the engine decodes, against those of a
// batch, which computes every neuron. n is what there is, at most `most`; the first token is left out, as the prompt's
// batch made it. The engine's sequence is lost. Throws Error when n_batch, the engine's, is below 3.
offline::Comparison compare_with_dense(engine::Engine& engine, std::span<const int32_t> prompt,
                                       std::span<const int32_t> generated, int64_t most, int64_t n_batch);

}  // namespace hearth::tools
