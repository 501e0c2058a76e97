#pragma once
// Which neurons inside a mixture's experts are active, counted over a sample of the tokens that used them.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace hearth::model {

// Of one layer, without the shared expert. "Active": act(gate) != 0.
struct InsideCounts {
  int64_t n_ff = 0;              // neurons of an expert
  std::vector<uint64_t> used;    // [n_expert] tokens that were looked at and had chosen the expert; empty: none were
  std::vector<uint64_t> active;  // [n_expert][n_ff] of these, those that had the neuron active
  InsideCounts() = default;
  InsideCounts(int64_t n_expert, int64_t n)
      : n_ff(n), used(static_cast<size_t>(n_expert)), active(used.size() * static_cast<size_t>(n)) {}
  explicit operator bool() const { return !used.empty(); }
  bool operator==(const InsideCounts&) const = default;

  // What is wrong with counts of a sample of tokens that use n_used experts each, where `chosen` are the times that each
  // expert was chosen in all. The sample may have fewer tokens than `tokens`: once there were no such counts.
  std::optional<std::string> fault(std::span<const uint64_t> chosen, int64_t n_used, uint64_t tokens) const;
  // How often each neuron of an expert is active for a token that uses it [n_ff]. Counts of a sample differ though
  // neurons do not; so each is taken towards the expert's mean by the share of their variance that such a sample would
  // have of itself. (James and Stein, Estimation with Quadratic Loss, 1961; the variance is the binomial one.) An expert
  // that was not seen has the layer's mean.
  std::vector<double> frequencies(size_t expert) const;
};

}  // namespace hearth::model
