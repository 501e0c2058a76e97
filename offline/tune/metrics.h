#pragma once
// How well a model predicts a text, and how far another run of it over the same tokens is from that: perplexity,
// Kullback-Leibler divergence, agreement of the likeliest tokens, each with its standard error. Logits are looked at
// row by row and not kept.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

namespace hearth::offline {

// One pass of the model: it evaluates ids[begin, begin + n_inputs), after one BOS token if the model wants it, and its
// last n_targets predictions are those of ids[first_target, first_target + n_targets).
struct Window {
  int64_t begin = 0, n_inputs = 0;
  int64_t first_target = 0, n_targets = 0;
};

// Windows of at most `window` inputs (BOS included) that start `stride` ids apart. Every id is scored exactly once, but
// for the first one when there is no BOS to predict it from. Throws Error when the numbers do not allow that.
std::vector<Window> make_windows(int64_t n_ids, int64_t window, int64_t stride, bool bos);

// Mean of a stream and its standard error, values taken as independent (Welford, Technometrics 4, 1962).
class RunningMean {
 public:
  void add(double value);
  int64_t n() const { return n_; }
  double mean() const { return mean_; }
  double standard_error() const;  // NaN before the second value
  friend void to_json(nlohmann::json& j, const RunningMean& m);
  friend void from_json(const nlohmann::json& j, RunningMean& m);  // the same bits again

 private:
  int64_t n_ = 0;
  double mean_ = 0, m2_ = 0;
};

// Mean negative log-likelihood (nats) of the tokens so far and the perplexity exp(mean), with errors.
class NllMean : public RunningMean {
 public:
  double perplexity() const;
  double perplexity_error() const { return perplexity() * standard_error(); }
};

// -log softmax(logits)[target].
double negative_log_likelihood(std::span<const float> logits, int32_t target);

// One position of the dense model, kept to compare others with: n_vocab floats.
class DensePosition {
 public:
  // `target`: the token that follows in the text.
  DensePosition(std::span<const float> logits, int32_t target);
  // KL(this || softmax(logits)), nats. Exactly 0 for the same logits; for others not below 0, up to rounding.
  double kl_to(std::span<const float> logits) const;
  int32_t target() const { return target_; }
  double nll() const { return nll_; }     // of the target
  int32_t best() const { return best_; }  // the likeliest token; the first of equal ones

 private:
  std::vector<float> p_;      // softmax
  double minus_entropy_ = 0;  // sum of p (logit - log sum exp), over the rounded p
  double nll_ = 0;
  int32_t target_ = 0, best_ = 0;
};

// Sums over positions of a dense run and another one.
struct Comparison {
  RunningMean kl;            // KL(dense || other), nats
  NllMean dense, other;      // of the text's tokens
  RunningMean nll_increase;  // other - dense, token by token: its error is far below that of either
  RunningMean agreement;     // 1 where both find the same token likeliest, else 0
  int64_t n() const { return kl.n(); }
  // other's perplexity / dense's - 1, and its standard error.
  double perplexity_increase() const;
  double perplexity_increase_error() const;
  void add(const DensePosition& dense_position, std::span<const float> other_logits);
};
void to_json(nlohmann::json& j, const Comparison& c);  // everything, to go on from
void from_json(const nlohmann::json& j, Comparison& c);
nlohmann::json summary_json(const Comparison& c);  // for people's programs

}  // namespace hearth::offline
