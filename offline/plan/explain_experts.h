#pragma once
// Plans of mixtures of experts in words: by layer, the experts on the GPU, their hit rate, and from which hit rate on
// they pay.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "offline/plan/planner.h"

namespace hearth::offline {

bool has_experts(const Planner& planner);

// A table of the layers that are mixtures; those that are alike share a line.
std::string expert_rows(const Planner& planner, const Plan& plan);
// In a sentence: how many are on the GPU, and what they make.
std::string why_experts(const Planner& planner, const Plan& plan);
// A line: of the neurons of a token's experts, those that are active; empty where nothing is known to be left out.
std::string inside_experts(const Planner& planner);
nlohmann::json experts_json(const Planner& planner, const Plan& plan, size_t layer);

// The budget in bytes from which on one more GiB brings less than kWorthPerGib of tokens/s: of budgets in steps of a
// GiB, or of 1/kMostBudgets of all that is useful.
uint64_t worthwhile_budget(const Planner& planner);

}  // namespace hearth::offline
