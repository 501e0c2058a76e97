#pragma once
// --sparsity auto of a model with predictors: which of the ways to run it is fastest here, measured once.
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "model/model.h"

namespace hearth::tools {

// A way to run a model, and how fast it was.
struct Way {
  engine::Sparsity sparsity = engine::Sparsity::off;  // off, exact or predict
  bool approximate = false;                           // neurons that are not zero may be left out
  double tokens_per_second = 0;                       // 0: not measured, or it cannot be run here
  bool operator==(const Way&) const = default;
};

// The ways that `auto` compares, the dense one first, not measured yet. Fewer than two: there is nothing to compare,
// because nothing would be left out without being asked for.
std::vector<Way> ways_to_run(const model::Model& model, engine::Sparsity asked, bool thresholded);

// The fastest one; an approximate way only if it is faster than every exact one by more than a short measurement errs.
// `measured` is not empty.
constexpr double kApproximateGain = 1.03;
const Way& fastest(std::span<const Way> measured);

// Tokens/s of decoding from a token on, on a sequence of its own: the median of a few tokens, 0.3 s or not much more.
// The engine's counts are as new afterwards.
double measure_decode(engine::Engine& engine, int32_t first);

// "exact 648, predict 547, off 400 tokens/s", the fastest first.
std::string describe(std::span<const Way> measured);
// {"exact": 648.1, ...}; null when nothing was compared.
nlohmann::ordered_json to_json(std::span<const Way> measured);

}  // namespace hearth::tools
