#include "offline/predictor/calibrate.h"

#include <algorithm>

#include "core/error.h"

namespace hearth::offline {
namespace {

using predictor::NeuronScores;
using predictor::Tally;

constexpr int64_t kNeuronsPerPiece = 4;

// Tallies of a block's neurons, added up in the order of the neurons whatever the threads do.
class BlockTallies {
 public:
  BlockTallies(int64_t pieces, size_t prices) : prices_(prices), tallies_(static_cast<size_t>(pieces) * prices) {}
  Tally* piece(int64_t i) { return tallies_.data() + static_cast<size_t>(i) * prices_; }
  void add_to(std::vector<Tally>& total) const {
    for (size_t i = 0; i < tallies_.size(); ++i) total[i % prices_] += tallies_[i];
  }

 private:
  size_t prices_;
  std::vector<Tally> tallies_;
};

double mean_of_positive(const float* values, int64_t n) {
  double sum = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (values[i] > 0) sum += static_cast<double>(values[i]), ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

}  // namespace

std::vector<float> Calibration::at(size_t price) const {
  std::vector<float> t;
  for (size_t i = price; i < thresholds.size(); i += prices.size()) t.push_back(thresholds[i]);
  return t;
}

size_t Calibration::price_for(double loss_recall) const {
  size_t best = 0;
  for (size_t p = 0; p < prices.size(); ++p) {
    if (tallies[p].loss_recall() >= loss_recall) best = p;
  }
  return best;
}

Calibration calibrate(LayerTruth& truth, const Predictor& predictor, const CalibrationInputs& calibration,
                      const CalibrationInputs& validation, int64_t n_embd, Products& products, ThreadTeam& team) {
  const int64_t n_ff = truth.n_ff(), T = static_cast<int64_t>(calibration.ffn.size()) / n_embd;
  Calibration c;
  SampleScores scores(predictor, calibration.read, n_embd, products);
  std::vector<float> score;
  for (int64_t first = 0; first < n_ff; first += kNeuronBlock) {
    const int64_t count = std::min(kNeuronBlock, n_ff - first);
    scores.scores(first, count, score);
    const float* loss = truth.losses(calibration.ffn, first, count);
    if (first == 0) {
      c.prices = predictor::price_list(mean_of_positive(loss, count * T));
      c.thresholds.resize(static_cast<size_t>(n_ff) * c.prices.size());
    }
    team.for_chunks(count, kNeuronsPerPiece, [&](int64_t begin, int64_t end, int) {
      NeuronScores neuron;
      for (int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<size_t>(i * T), n = static_cast<size_t>(T);
        neuron.assign(std::span(score).subspan(at, n), std::span(loss + at, n));
        neuron.thresholds(c.prices, c.thresholds.data() + static_cast<size_t>(first + i) * c.prices.size());
      }
    });
  }
  c.tallies = tallies_on(truth, predictor, c.thresholds, validation, n_embd, products, team);
  return c;
}

std::vector<Tally> tallies_on(LayerTruth& truth, const Predictor& predictor, std::span<const float> thresholds,
                              const CalibrationInputs& inputs, int64_t n_embd, Products& products, ThreadTeam& team) {
  const int64_t n_ff = truth.n_ff(), T = static_cast<int64_t>(inputs.ffn.size()) / n_embd;
  const size_t prices = thresholds.size() / static_cast<size_t>(n_ff);
  std::vector<Tally> total(prices);
  SampleScores scores(predictor, inputs.read, n_embd, products);
  std::vector<float> score;
  for (int64_t first = 0; first < n_ff; first += kNeuronBlock) {
    const int64_t count = std::min(kNeuronBlock, n_ff - first);
    scores.scores(first, count, score);
    const float* loss = truth.losses(inputs.ffn, first, count);
    BlockTallies block((count + kNeuronsPerPiece - 1) / kNeuronsPerPiece, prices);
    team.for_chunks(count, kNeuronsPerPiece, [&](int64_t begin, int64_t end, int) {
      NeuronScores neuron;
      Tally* tallies = block.piece(begin / kNeuronsPerPiece);
      for (int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<size_t>(i * T), n = static_cast<size_t>(T);
        neuron.assign(std::span(score).subspan(at, n), std::span(loss + at, n));
        const NeuronScores::Kept all = neuron.all();
        for (size_t p = 0; p < prices; ++p) {
          tallies[p].add(all, neuron.above(thresholds[static_cast<size_t>(first + i) * prices + p]), T);
        }
      }
    });
    block.add_to(total);
  }
  return total;
}

}  // namespace hearth::offline
