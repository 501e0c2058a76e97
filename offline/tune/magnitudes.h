#pragma once
// Where the magnitudes |act(gate)| of a layer's neurons lie, counted while a model runs: a histogram from which a
// threshold for a wanted density is read, and, for chosen thresholds, how often each neuron exceeds them and what
// leaving out the others takes from the layer's output.
#include <cstdint>
#include <span>
#include <vector>

namespace hearth::offline {

// Counts by the exponent and the first six bits of the mantissa of a float: 64 bins an octave, so that a threshold read
// from it is at most 1.6 % above the exact quantile.
class MagnitudeHistogram {
 public:
  MagnitudeHistogram();
  void add(float magnitude);  // >= 0
  uint64_t total() const { return total_; }
  // Share of the values above a threshold; exact where the threshold is the end of a bin.
  double density(float threshold) const;
  // The smallest end of a bin above which at most this share of the values lies; 0 where the values above 0 are no
  // more.
  float threshold_for(double density) const;
  MagnitudeHistogram& operator+=(const MagnitudeHistogram& other);

 private:
  std::vector<uint64_t> counts_;
  uint64_t total_ = 0, zeros_ = 0;
};

// For one layer and its thresholds, ascending: what the tokens so far say about each neuron. Of a mixture neuron i is the
// i-th of those of a token's experts, one expert behind the other.
class ThresholdCounts {
 public:
  ThresholdCounts() = default;
  // n_expert: of a mixture, the experts that its router chooses from.
  ThresholdCounts(std::vector<float> thresholds, int64_t n_ff, int64_t n_expert = 0);
  const std::vector<float>& thresholds() const { return thresholds_; }
  uint64_t tokens() const { return tokens_; }

  // One token's act(gate) and value = act(gate) * up of the neurons [begin, end), weighed by the length of each
  // neuron's down row. Different ranges may be added from different threads.
  void add(const float* activation, const float* value, const float* down_norms, int64_t begin, int64_t end);
  void add_tokens(int64_t n) { tokens_ += static_cast<uint64_t>(n); }
  // Of a mixture: the experts of any number of tokens; ids from n_expert on (the shared expert) are not counted.
  void add_choice(std::span<const int32_t> ids);

  // The tokens for which each neuron exceeds threshold k, [n_ff], or of a mixture those that chose each expert,
  // [n_expert], whatever k is; and their share of all.
  std::vector<uint64_t> active(size_t k) const;
  std::vector<double> frequencies(size_t k) const;
  double density(size_t k) const;  // of the neurons
  // Mean over tokens of the sum of (|value| * ||down row||)^2 of the neurons at or below threshold k: the energy that
  // is taken from the layer's output, if the neurons' contributions are orthogonal.
  double dropped_energy(size_t k) const;

 private:
  std::vector<float> thresholds_;
  int64_t n_ff_ = 0;
  uint64_t tokens_ = 0;
  // [n_ff][n + 1]: values in (thresholds[k - 1], thresholds[k]]; the last: above all.
  std::vector<uint32_t> counts_;
  std::vector<double> energy_;
  std::vector<uint64_t> chosen_;  // [n_expert]
};

}  // namespace hearth::offline
