#include "tools/thresholds.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/error.h"
#include "model/predictors.h"

namespace hearth::tools {
namespace {

using Kind = SparseThreshold::Kind;

bool has_powerinfer_predictors(const model::Model& model) {
  const auto& layers = model.weights().layers;
  return std::any_of(layers.begin(), layers.end(), [](const model::LayerWeights& l) {
    return l.predictor.weights && l.predictor.method == "powerinfer";
  });
}

}  // namespace

SparseThreshold parse_threshold(const std::string& text) {
  if (text == "sidecar") return {Kind::sidecar, 0};
  if (text == "powerinfer-key") return {Kind::powerinfer_key, 0};
  SparseThreshold t{Kind::number, 0};
  const char* const end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, t.number);
  if (error != std::errc() || read != end || !std::isfinite(t.number)) {
    fail("--sparse-threshold is '{}', expected a number, \"sidecar\" or \"powerinfer-key\"", text);
  }
  return t;
}

void add_threshold_option(CLI::App& sub, SparseThreshold& value) {
  sub.add_option_function<std::string>(
         "--sparse-threshold", [&value](const std::string& text) { value = parse_threshold(text); },
         "A neuron is active when |act(gate)| exceeds this; above 0 the result is approximate. With PowerInfer's "
         "predictors: the score from which on they name a neuron (default: \"powerinfer-key\", as the file's "
         "powerinfer.sparse_threshold says). \"sidecar\": the thresholds by layer that `hearth tune` wrote (default: "
         "0)")
      ->type_name("X")
      ->group("Model");
}

ChosenThresholds choose_thresholds(model::Model& model, const model::Sidecar* sidecar, const SparseThreshold& asked,
                                   bool predicts) {
  ChosenThresholds chosen;
  const std::string file = model.file().path().string();
  const bool scores = predicts && has_powerinfer_predictors(model);
  const auto of_gates = [&](std::vector<float> by_layer, std::string words) {
    if (std::all_of(by_layer.begin(), by_layer.end(), [](float t) { return t == 0; })) return;
    chosen.by_layer = std::move(by_layer), chosen.words = std::move(words);
  };
  switch (asked.kind) {
    case Kind::none:
      break;
    case Kind::powerinfer_key:
      if (!scores) {
        fail(
            "--sparse-threshold powerinfer-key: no predictors of PowerInfer's are used with '{}'; leave it out, or use "
            "a PowerInfer file with --sparsity predict",
            file);
      }
      break;
    case Kind::sidecar:
      if (sidecar == nullptr || !sidecar->thresholds) {
        fail("there are no tuned thresholds for '{}'; `hearth tune -m MODEL -f TEXT` makes them", file);
      }
      of_gates(sidecar->thresholds->by_layer, "thresholds by layer from the sidecar");
      break;
    case Kind::number:
      if (scores) {
        model::set_score_threshold(model, asked.number);
        chosen.score_words = fmt::format("scores below {}", asked.number);
        break;
      }
      if (asked.number < 0) {
        fail(
            "--sparse-threshold is {}, expected 0 or more: only the scores of PowerInfer's predictors, which '{}' does "
            "not use, can be below",
            asked.number, file);
      }
      of_gates(std::vector<float>(model.weights().layers.size(), asked.number),
               fmt::format("threshold {}", asked.number));
      break;
  }
  return chosen;
}

}  // namespace hearth::tools
