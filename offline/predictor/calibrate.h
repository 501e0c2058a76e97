#pragma once
// Thresholds for a predictor whose weights are fixed, and how good it is with them.
#include <span>
#include <vector>

#include "offline/predictor/layer_truth.h"
#include "predictor/thresholds.h"

namespace hearth::offline {

// Thresholds at every price of a row (predictor/thresholds.h), and what they keep on tokens that were not calibrated
// on.
struct Calibration {
  std::vector<double> prices;             // ascending
  std::vector<float> thresholds;          // [n_ff][prices]
  std::vector<predictor::Tally> tallies;  // [prices], of the validation tokens
  std::vector<float> at(size_t price) const;
  // The highest price that keeps `loss_recall` on the validation tokens; 0 when none does.
  size_t price_for(double loss_recall) const;
};

struct CalibrationInputs {
  std::span<const f16_t> ffn;   // [T][n_embd] what the neurons read
  std::span<const f16_t> read;  // [T][n_embd] what the predictor reads
};
Calibration calibrate(LayerTruth& truth, const Predictor& predictor, const CalibrationInputs& calibration,
                      const CalibrationInputs& validation, int64_t n_embd, Products& products, ThreadTeam& team);

// The share that the thresholds [n_ff][n_prices] keep on other tokens: [n_prices].
std::vector<predictor::Tally> tallies_on(LayerTruth& truth, const Predictor& predictor,
                                         std::span<const float> thresholds, const CalibrationInputs& inputs,
                                         int64_t n_embd, Products& products, ThreadTeam& team);

}  // namespace hearth::offline
