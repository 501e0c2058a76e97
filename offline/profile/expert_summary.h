#pragma once
// A profile's summary of mixtures of experts, layer by layer.
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "model/sidecar.h"

namespace hearth::offline {

constexpr std::array<double, 3> kHottestExperts = {0.1, 0.2, 0.4};  // shares of a layer's experts, one expert at least

constexpr double kHottestInside = 0.25;  // of an expert's neurons

// The experts that a router chooses from; a shared expert is not among them.
struct ExpertSummary {
  size_t layer = 0;
  int64_t n_expert = 0, n_used = 0;
  // Share of the choices that fall on the hottest kHottestExperts, and on the same experts on text that was held out.
  std::array<double, kHottestExperts.size()> covered{};
  std::array<std::optional<double>, kHottestExperts.size()> covered_heldout;
  std::optional<double> previous;  // of a token's experts, those that the token before used
  // Experts that kUnionTokens consecutive tokens use together, in experts of one token.
  std::array<std::optional<double>, model::kUnionTokens.size()> growth;
  std::optional<double> foreseen;  // of a token's experts, those that the router names on the layer before's input
  std::optional<double> inside;    // of the neurons of a token's experts, those that are active
  std::optional<double> hottest_inside;  // of those, the share that falls on the hottest kHottestInside of each expert
};
// The layers that are mixtures.
std::vector<ExpertSummary> summarize_experts(const model::Sidecar& sidecar);
// Over layers; what a layer lacks is left out. `layers` must not be empty.
ExpertSummary mean_of(const std::vector<ExpertSummary>& layers);

std::string expert_table(const std::vector<ExpertSummary>& layers);
nlohmann::json to_json(const ExpertSummary& summary);

}  // namespace hearth::offline
