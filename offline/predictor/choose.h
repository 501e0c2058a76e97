#pragma once
// Which predictor a layer is to have.
#include <optional>
#include <vector>

#include "core/thread_team.h"
#include "offline/plan/cost_model.h"
#include "offline/predictor/fit.h"

namespace hearth::offline {

struct ChosenPredictor {
  Candidate candidate;
  model::PredictorData predictor;  // with thresholds
  double seconds = 0;              // expected, of the layer's FFN with it
};

// The candidate with the least expected time a token among those that reach the wanted recall; where none does, the one
// that keeps most. Nullopt when `keep_going`, asked before each candidate, answers false. `gpu`: count with the GPU's
// bandwidth instead of the CPU's.
std::optional<ChosenPredictor> choose_predictor(LayerFit& fit, const std::vector<Candidate>& candidates,
                                                const FfnShard& shard, const CostModel& cost, bool gpu,
                                                FunctionRef<bool()> keep_going);

}  // namespace hearth::offline
