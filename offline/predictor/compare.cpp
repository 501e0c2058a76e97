#include "offline/predictor/compare.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "core/error.h"

namespace hearth::offline {
namespace {

uint64_t ffn_bytes(const model::Model& model) {
  uint64_t sum = 0;
  for (const model::LayerWeights& l : model.weights().layers) {
    for (const Matrix* m : {&l.ffn.gate, &l.ffn.up, &l.ffn.down, &l.ffn.down_t}) sum += *m ? m->bytes() : 0;
  }
  return sum;
}

nlohmann::json tally_json(const predictor::Tally& t) {
  return {{"loss_recall", t.loss_recall()},
          {"recall", t.recall()},
          {"precision", t.precision()},
          {"density", t.density()},
          {"predicted_density", t.predicted_density()},
          {"ratio", t.predicted_density() / t.density()}};
}

}  // namespace

const std::vector<double>& compared_targets() {
  static const std::vector<double> targets = {0.80, 0.90, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999};
  return targets;
}

std::optional<std::vector<ComparedCandidate>> compare_candidates(
    const model::Model& model, const Samples& samples, const std::vector<Candidate>& candidates,
    const std::vector<NamedSamples>& texts, const FitOptions& options, Products& products, ThreadTeam& team,
    const std::function<bool(size_t done, size_t total, const std::string& what)>& report) {
  std::vector<ComparedCandidate> result;
  for (const Candidate& c : candidates) {
    result.push_back({c, 0, 0, 0, {}});
    for (const double target : compared_targets()) {
      result.back().points.push_back({target, std::vector<predictor::Tally>(texts.size())});
    }
  }
  const size_t n_layer = model.weights().layers.size();
  const auto all_bytes = static_cast<double>(ffn_bytes(model));
  for (size_t layer = 0; layer < n_layer; ++layer) {
    LayerFit fit(model, layer, samples, options, products, team);
    for (const NamedSamples& text : texts) fit.truth().keep(text.samples.at(Part::validate, layer).ffn);
    for (size_t i = 0; i < candidates.size(); ++i) {
      const auto start = std::chrono::steady_clock::now();
      const model::PredictorData p = fit.weights(candidates[i]);
      const model::LayerPredictor view = p.view();
      const Calibration c = fit.calibrated(view.weights);
      result[i].seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      result[i].bytes += model::predictor_bytes(view);
      result[i].share = static_cast<double>(result[i].bytes) / all_bytes;
      // Thresholds at the targets alone: [n_ff][targets].
      const auto& targets = compared_targets();
      std::vector<float> thresholds(p.threshold.size() * targets.size());
      for (size_t t = 0; t < targets.size(); ++t) {
        const std::vector<float> column = c.at(c.price_for(targets[t]));
        for (size_t k = 0; k < column.size(); ++k) thresholds[k * targets.size() + t] = column[k];
      }
      for (size_t text = 0; text < texts.size(); ++text) {
        const LayerSamples& s = texts[text].samples.at(Part::validate, layer);
        const auto read = fit.input() == model::PredictorInput::ffn_input ? s.ffn : s.read_by_predictor();
        const auto tallies =
            tallies_on(fit.truth(), view.weights, thresholds, {s.ffn, read}, model.config().n_embd, products, team);
        for (size_t t = 0; t < targets.size(); ++t) result[i].points[t].texts[text] += tallies[t];
      }
      const std::string what = fmt::format("layer {}, {}", layer, candidates[i].name());
      if (!report(layer * candidates.size() + i + 1, n_layer * candidates.size(), what)) return std::nullopt;
    }
  }
  return result;
}

nlohmann::json to_json(const std::vector<ComparedCandidate>& compared, const std::vector<NamedSamples>& texts) {
  nlohmann::json list = nlohmann::json::array();
  for (const ComparedCandidate& c : compared) {
    nlohmann::json points = nlohmann::json::array();
    for (const ComparedPoint& p : c.points) {
      nlohmann::json by_text;
      for (size_t i = 0; i < texts.size(); ++i) by_text[texts[i].name] = tally_json(p.texts[i]);
      points.push_back({{"target", p.target}, {"texts", by_text}});
    }
    list.push_back({{"name", c.candidate.name()},
                    {"method", to_string(c.candidate.method)},
                    {"rank", c.candidate.rank},
                    {"type", traits(c.candidate.type).name},
                    {"bytes", c.bytes},
                    {"share_of_ffn", c.share},
                    {"seconds", c.seconds},
                    {"points", points}});
  }
  return list;
}

}  // namespace hearth::offline
