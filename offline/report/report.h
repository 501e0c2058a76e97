#pragma once
// One self-contained HTML page on a model: which neurons fire, what predictors find, what would live where, and what
// thresholds cost. No scripts, nothing from the network.
#include <string>
#include <vector>

#include "model/sidecar.h"
#include "offline/plan/planner.h"

namespace hearth::offline {

// `with_thresholds`: a planner of the same request for a run with the sidecar's thresholds, where it has any. Throws
// Error when the sidecar's record of tuning cannot be read.
std::string html_report(const model::Sidecar& sidecar, const Planner& planner, const Plan& plan,
                        const Planner* with_thresholds = nullptr);

}  // namespace hearth::offline
