#pragma once
// The arithmetic of `hearth perplexity`, apart from the engine.
#include <cstdint>
#include <span>
#include <vector>

namespace hearth::tools {

// One pass of the model: it evaluates ids[begin, begin + n_inputs), after one BOS token if the model wants it, and its
// last n_targets predictions are those of ids[first_target, first_target + n_targets).
struct Window {
  int64_t begin = 0, n_inputs = 0;
  int64_t first_target = 0, n_targets = 0;
};

// Windows of at most `window` inputs (BOS included) that start `stride` ids apart. Every id is scored exactly once, but
// for the first one when there is no BOS to predict it from. Throws Error when the numbers do not allow that.
std::vector<Window> make_windows(int64_t n_ids, int64_t window, int64_t stride, bool bos);

// Mean negative log-likelihood (nats) of the tokens so far, its standard error (tokens taken as independent), and both
// for the perplexity exp(mean).
class NllMean {
 public:
  void add(double nll);
  int64_t n() const { return n_; }
  double mean() const { return mean_; }
  double standard_error() const;
  double perplexity() const;
  double perplexity_error() const { return perplexity() * standard_error(); }

 private:
  int64_t n_ = 0;
  double mean_ = 0, m2_ = 0;  // Welford
};

// -log softmax(logits)[target].
double negative_log_likelihood(std::span<const float> logits, int32_t target);

}  // namespace hearth::tools
