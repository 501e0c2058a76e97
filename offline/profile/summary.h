#pragma once
// A profile's summary, layer by layer.
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "model/sidecar.h"

namespace hearth::offline {

struct LayerSummary {
  double density = 0;                      // mean share of active neurons
  double hot_share = 0;                    // share of the neurons that make 80 % of the activations
  std::optional<double> previous, recent;  // of a token's set: active with the previous token, in the last 64
  // Share of the neurons that are active in at least one of kUnionTokens consecutive tokens.
  std::array<std::optional<double>, model::kUnionTokens.size()> unions;
  double hit = 0;                              // share of the activations made by the hottest kHotSet of the neurons
  std::optional<double> hit_heldout;           // by the same neurons, on text that was not profiled
  std::optional<double> hit_heldout_possible;  // by the hottest of that text itself
  std::optional<double> named_per_active;      // neurons that the file's predictor names, for each active one
  // The union of kUnionTokens[k] tokens, in active neurons of one token.
  std::optional<double> growth(size_t k) const;
};
constexpr double kActivationShare = 0.8, kHotSet = 0.26;

std::vector<LayerSummary> summarize(const model::Statistics& statistics);
LayerSummary mean_of(const std::vector<LayerSummary>& layers);

std::string summary_table(const model::Sidecar& sidecar);
nlohmann::json summary_json(const model::Sidecar& sidecar);

}  // namespace hearth::offline
