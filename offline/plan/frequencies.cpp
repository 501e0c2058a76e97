#include "offline/plan/frequencies.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/error.h"

namespace hearth::offline {
namespace {

bool all_are(std::span<const float> thresholds, float value) {
  return std::all_of(thresholds.begin(), thresholds.end(), [&](float t) { return t == value; });
}

Frequencies of_counts(const ModelShape& shape, const model::TunedThresholds& tuned) {
  Frequencies f;
  f.known = true;
  f.source = fmt::format("hearth tune, {} tokens under these thresholds", tuned.tokens);
  for (size_t l = 0; l < tuned.active.size(); ++l) {
    std::vector<double> p;
    for (const uint64_t n : tuned.active[l]) p.push_back(static_cast<double>(n) / static_cast<double>(tuned.tokens));
    f.p.push_back(shape.layers[l].experts ? with_shared(shape.layers[l], std::move(p)) : std::move(p));
  }
  return f;
}

// Every expert is chosen equally often.
std::vector<double> even_choice(const LayerShape& shape) {
  const int64_t shared = shape.shared_expert ? 1 : 0, n = shape.n_ff - shared;
  const double used = shape.n_used - static_cast<double>(shared);
  return with_shared(shape, std::vector<double>(static_cast<size_t>(n), used / static_cast<double>(n)));
}

Frequencies of_profile(const ModelShape& shape, const model::Statistics& statistics) {
  Frequencies f;
  f.known = true;
  f.source = fmt::format("{}, {} tokens", statistics.source, statistics.tokens);
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    const LayerShape& layer = shape.layers[l];
    f.p.push_back(layer.experts ? with_shared(layer, statistics.frequencies(l)) : statistics.frequencies(l));
  }
  return f;
}

// The density at `threshold` over that of the curve's beginning.
std::optional<double> density_left(const nlohmann::json& curve, double threshold) {
  double below_t = 0, below_density = 0, first = 0;
  for (const nlohmann::json& point : curve) {
    const auto t = point.at("threshold").get<double>(), density = point.at("validation").at("density").get<double>();
    if (!(density > 0)) return std::nullopt;
    if (&point == &curve.front()) first = density;
    if (t >= threshold) {
      const double share = t > below_t ? (threshold - below_t) / (t - below_t) : 0;
      return (below_density + share * (density - below_density)) / first;
    }
    below_t = t, below_density = density;
  }
  return curve.empty() ? std::nullopt : std::optional(below_density / first);
}

}  // namespace

std::vector<double> with_shared(const LayerShape& layer, std::vector<double> routed) {
  if (layer.shared_expert) routed.push_back(1);
  return routed;
}

const model::TunedThresholds* tuned_for(const model::Sidecar* sidecar, std::span<const float> thresholds) {
  if (all_are(thresholds, 0.0f) || sidecar == nullptr || !sidecar->thresholds) return nullptr;
  const model::TunedThresholds& tuned = *sidecar->thresholds;
  return tuned.tokens > 0 && std::ranges::equal(tuned.by_layer, thresholds) ? &tuned : nullptr;
}

std::optional<double> density_left(const model::Sidecar* sidecar, std::span<const float> thresholds) {
  if (all_are(thresholds, 0.0f) || sidecar == nullptr || !sidecar->thresholds) return std::nullopt;
  if (!all_are(thresholds, thresholds.front())) return std::nullopt;
  try {
    const nlohmann::json record = nlohmann::json::parse(sidecar->thresholds->record);
    return density_left(record.at("global"), static_cast<double>(thresholds.front()));
  } catch (const nlohmann::json::exception& e) {
    fail("the sidecar's record of tuning cannot be read ({}); make it again with `hearth tune`", e.what());
  }
}

Frequencies frequencies_of(const ModelShape& shape, const model::Sidecar* sidecar, std::span<const float> thresholds) {
  const bool measured = sidecar != nullptr && sidecar->has_statistics();
  if (const model::TunedThresholds* tuned = tuned_for(sidecar, thresholds)) return of_counts(shape, *tuned);
  Frequencies f = measured ? of_profile(shape, sidecar->statistics)
                           : uniform_frequencies(shape, shape.sparse_family ? kAssumedDensity : 1.0);
  if (all_are(thresholds, 0.0f) || (measured && all_are(thresholds, sidecar->statistics.threshold))) return f;
  const std::optional<double> left = density_left(sidecar, thresholds);
  if (!left) {
    f.source += "; not under these thresholds, which leave fewer (`hearth tune` measures how many)";
    return f;
  }
  for (size_t l = 0; l < f.p.size(); ++l) {
    if (shape.layers[l].experts) continue;  // no threshold leaves out an expert
    for (double& p : f.p[l]) p *= *left;
  }
  f.source += fmt::format("; scaled to the {:.0f} % that a threshold of {:.3g} leaves active, by `hearth tune`",
                          100 * *left, thresholds.front());
  return f;
}

Frequencies uniform_frequencies(const ModelShape& shape, double density) {
  Frequencies f;
  f.source = density < 1 ? fmt::format("no profile: every neuron is taken to be active for {:.0f} % of the tokens",
                                       100 * density)
                         : "every neuron is active for every token";
  bool experts = false;
  for (const LayerShape& l : shape.layers) {
    experts |= l.experts;
    f.p.push_back(l.experts ? even_choice(l) : std::vector<double>(static_cast<size_t>(l.n_ff), density));
  }
  if (experts) f.source = "no profile: every expert is taken to be chosen equally often";
  return f;
}

Frequencies typical_frequencies(const ModelShape& shape, double density) {
  constexpr double decay = 6.04;  // (1 - e^(-0.26 decay)) / (1 - e^(-decay)) = 0.8
  Frequencies f;
  f.source = "typical of ReLU models: 26 % of the neurons make 80 % of the activations";
  for (const LayerShape& l : shape.layers) {
    if (l.experts) {
      f.p.push_back(even_choice(l));
      continue;
    }
    std::vector<double> p(static_cast<size_t>(l.n_ff));
    const double top = density * decay / (1 - std::exp(-decay));
    for (size_t i = 0; i < p.size(); ++i) {
      p[i] = std::min(1.0, top * std::exp(-decay * (static_cast<double>(i) + 0.5) / static_cast<double>(p.size())));
    }
    f.p.push_back(std::move(p));
  }
  return f;
}

}  // namespace hearth::offline
