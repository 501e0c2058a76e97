#pragma once
// A plan in words and numbers.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "offline/plan/planner.h"

namespace hearth::offline {

// Another budget, for comparison.
struct Alternative {
  uint64_t vram_budget = 0;
  double tokens_per_second = 0, hit_rate = 0;
};
struct Explanation {
  std::optional<Alternative> one_more_gib;    // nullopt: everything is on the GPU already, or none is used
  // For mixtures: the budget in bytes from which on one more GiB brings less than kWorthPerGib of tokens/s.
  std::optional<uint64_t> worthwhile_budget;
  std::optional<double> typical_profile_tps;  // without a profile: tokens/s if this model's activations are typical
};
constexpr double kWorthPerGib = 0.01;
Explanation explain(const Planner& planner, const Plan& plan);

std::string plan_table(const Planner& planner, const Plan& plan, const Explanation& explanation);
nlohmann::json plan_json(const Planner& planner, const Plan& plan, const Explanation& explanation);

}  // namespace hearth::offline
