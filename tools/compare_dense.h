#pragma once
// How far a sparse run was from a dense one: the same tokens again, both ways.
#include <cstdint>
#include <span>

#include "engine/engine.h"
#include "offline/tune/metrics.h"

namespace hearth::tools {

// The predictions of generated[1], …, generated[n], made token by token as the engine decodes, against those of batches
// that compute every neuron. n is what there is, at most `most`; the first token is left out, as the prompt's batch made
// it. What `text` held is lost.
offline::Comparison compare_with_dense(engine::Engine& engine, engine::Sequence& text, std::span<const int32_t> prompt,
                                       std::span<const int32_t> generated, int64_t most);

}  // namespace hearth::tools
