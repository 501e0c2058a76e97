#pragma once
// Thresholds of a predictor's scores, neuron by neuron, from held-out tokens. A token whose neuron is dropped loses
// |value| * ||down row||, one that is kept costs one gate row. At a price p of a row the threshold of a neuron is the
// one that minimises loss - p * (tokens dropped); one price for all neurons of a layer gives the least loss for the
// number of rows evaluated (equal marginal rates). Raising the price trades loss for rows along that frontier.
#include <cstdint>
#include <span>
#include <vector>

namespace hearth::predictor {

// One neuron over T tokens, in ascending order of its score.
class NeuronScores {
 public:
  // loss [T]: 0 where the neuron is inactive.
  void assign(std::span<const float> score, std::span<const float> loss);
  // The threshold at each of the prices, which ascend. Predicted are scores above it.
  void thresholds(std::span<const double> prices, float* out) const;
  struct Kept {
    int64_t predicted = 0, active = 0;  // tokens above the threshold, and those of them with a loss
    double loss = 0;                    // of them
  };
  Kept above(float threshold) const;
  Kept all() const { return above_index(0); }

 private:
  Kept above_index(size_t i) const;
  std::vector<uint32_t> order_;
  std::vector<float> score_;       // ascending
  std::vector<double> dropped_;    // [T + 1] loss of the first i
  std::vector<int64_t> inactive_;  // [T + 1] tokens without a loss among the first i
};

// The share that a whole layer keeps, summed over neurons.
struct Tally {
  int64_t n = 0;  // tokens * neurons
  int64_t active = 0, predicted = 0, hits = 0;
  double loss = 0, kept = 0;
  void add(const NeuronScores::Kept& all, const NeuronScores::Kept& kept_part, int64_t tokens);
  Tally& operator+=(const Tally& other);
  double recall() const;             // 1 when nothing is active
  double loss_recall() const;        // 1 when nothing can be lost
  double precision() const;          // 1 when nothing is predicted
  double density() const;            // active / n
  double predicted_density() const;  // predicted / n
};

// Prices worth trying when the loss of an active token is `mean_loss` on average: from losing almost nothing to
// keeping almost nothing, in steps of a twelfth.
std::vector<double> price_list(double mean_loss);

}  // namespace hearth::predictor
