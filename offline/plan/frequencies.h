#pragma once
// How often each neuron is active, and each expert is chosen: what a plan weighs them by.
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/sidecar.h"
#include "offline/plan/shape.h"

namespace hearth::offline {

struct Frequencies {
  std::vector<std::vector<double>> p;  // [n_layer][n_ff], in [0, 1]
  bool known = false;                  // false: uniform, nothing was measured
  std::string source;                  // in words
};

// `sidecar` null: there is none. `thresholds` of |act(gate)|, by layer, that the model will run with; empty = none. The
// first of these that is at hand: counts under exactly these thresholds (by `hearth tune`, or by a profile made with
// them); for one threshold for all layers, the profile scaled to the density that tuning measured at it; the profile as
// it is, an upper bound, as its source then says. Throws Error when the sidecar's record of tuning cannot be read.
Frequencies frequencies_of(const ModelShape& shape, const model::Sidecar* sidecar,
                           std::span<const float> thresholds = {});

// The counts of tuning under exactly these thresholds. Null: there are no thresholds, or tuning chose others.
const model::TunedThresholds* tuned_for(const model::Sidecar* sidecar, std::span<const float> thresholds);
// The share of the active neurons that one threshold for all layers leaves active, by the curve that tuning measured.
// Beyond the curve's end it is that of its end. nullopt: there is no curve, or the layers' thresholds differ.
std::optional<double> density_left(const model::Sidecar* sidecar, std::span<const float> thresholds);
// A router's choices, and behind them the layer's shared expert, which all tokens use.
std::vector<double> with_shared(const LayerShape& layer, std::vector<double> routed);

// The same for every neuron: what is assumed of a ReLU model without a profile, and 1 for the other families. Experts
// are chosen equally often; the shared one is used by every token.
Frequencies uniform_frequencies(const ModelShape& shape, double density);
constexpr double kAssumedDensity = 0.15;

// A published shape of activations: 26 % of the neurons make 80 % of them (PowerInfer, SOSP'24). Says what profiling
// may gain.
Frequencies typical_frequencies(const ModelShape& shape, double density);

}  // namespace hearth::offline
