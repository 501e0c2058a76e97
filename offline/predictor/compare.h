#pragma once
// All kinds of predictors side by side: what each keeps at each wanted recall, on texts it was not made from.
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "offline/predictor/fit.h"

namespace hearth::offline {

struct NamedSamples {
  std::string name;
  Samples samples;  // all of them Part::validate
};

// One kind of predictor in all layers of a model, with thresholds for one wanted loss-weighted recall.
struct ComparedPoint {
  double target = 0;
  std::vector<predictor::Tally> texts;  // sums over layers, by text
};
struct ComparedCandidate {
  Candidate candidate;
  uint64_t bytes = 0;  // of the predictors of all layers
  double share = 0;    // of the bytes of the FFNs
  double seconds = 0;  // it took to make
  std::vector<ComparedPoint> points;
};

// Wanted recalls of the curves.
const std::vector<double>& compared_targets();

// Layer by layer, every candidate. `report` is told after each; nullopt when it answers false.
std::optional<std::vector<ComparedCandidate>> compare_candidates(
    const model::Model& model, const Samples& samples, const std::vector<Candidate>& candidates,
    const std::vector<NamedSamples>& texts, const FitOptions& options, Products& products, ThreadTeam& team,
    const std::function<bool(size_t done, size_t total, const std::string& what)>& report);

nlohmann::json to_json(const std::vector<ComparedCandidate>& compared, const std::vector<NamedSamples>& texts);
// A table of the points whose target is `target`, in Markdown.
std::string markdown_table(const nlohmann::json& compared, const std::string& text, double target);
// Loss-weighted recall against predicted density over true density, one line a candidate.
std::string recall_plot_svg(const nlohmann::json& compared, const std::string& text, const std::string& title);

}  // namespace hearth::offline
