#include "offline/tune/metrics.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace hearth::offline {
namespace {

struct Shifted {
  float max;
  double log_sum;  // log sum exp(x - max)
};

Shifted log_sum_exp(std::span<const float> x) {
  const float max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += std::exp(v - max);
  return {max, std::log(sum)};
}

int32_t likeliest(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace

std::vector<Window> make_windows(int64_t n_ids, int64_t window, int64_t stride, bool bos) {
  if (window < (bos ? 2 : 1)) fail("--window is {}, expected {} or more", window, bos ? 2 : 1);
  if (stride < 1 || stride > window) fail("--stride is {}, expected 1 to {} (the window)", stride, window);
  const int64_t first = bos ? 0 : 1;  // the first id that a window beginning at 0 predicts
  if (n_ids <= first) fail("the text has {} tokens, expected {} or more", n_ids, first + 1);
  std::vector<Window> windows;
  for (int64_t begin = 0, scored = first; scored < n_ids; begin += stride) {
    const int64_t end = std::min(begin + first + window, n_ids);  // of the ids it predicts
    windows.push_back({begin, end - 1 - begin, scored, end - scored});
    scored = end;
  }
  return windows;
}

void RunningMean::add(double value) {
  ++n_;
  const double delta = value - mean_;
  mean_ += delta / static_cast<double>(n_);
  m2_ += delta * (value - mean_);
}

double RunningMean::standard_error() const {
  return n_ > 1 ? std::sqrt(m2_ / static_cast<double>(n_ - 1) / static_cast<double>(n_)) : NAN;
}

void to_json(nlohmann::json& j, const RunningMean& m) {
  j = nlohmann::json::array({m.n_, m.mean_, m.m2_});
}
void from_json(const nlohmann::json& j, RunningMean& m) {
  j.at(0).get_to(m.n_), j.at(1).get_to(m.mean_), j.at(2).get_to(m.m2_);
}

double NllMean::perplexity() const {
  return n() > 0 ? std::exp(mean()) : NAN;
}

double negative_log_likelihood(std::span<const float> logits, int32_t target) {
  const Shifted s = log_sum_exp(logits);
  return s.log_sum - (static_cast<double>(logits[static_cast<size_t>(target)]) - s.max);
}

DensePosition::DensePosition(std::span<const float> logits, int32_t target)
    : p_(logits.size()), nll_(negative_log_likelihood(logits, target)), target_(target), best_(likeliest(logits)) {
  const Shifted s = log_sum_exp(logits);
  double cross = 0;
  for (size_t i = 0; i < p_.size(); ++i) {
    const float z = logits[i] - s.max;
    p_[i] = static_cast<float>(std::exp(z - s.log_sum));
    cross += static_cast<double>(p_[i]) * z;
  }
  minus_entropy_ = cross - s.log_sum;
}

// With the same p on both sides its rounding cancels where the logits agree, and is a second-order error elsewhere.
double DensePosition::kl_to(std::span<const float> logits) const {
  HEARTH_CHECK(logits.size() == p_.size(), "{} logits, expected {}", logits.size(), p_.size());
  const Shifted s = log_sum_exp(logits);
  double cross = 0;
  for (size_t i = 0; i < p_.size(); ++i) cross += static_cast<double>(p_[i]) * (logits[i] - s.max);
  return minus_entropy_ - (cross - s.log_sum);
}

double Comparison::perplexity_increase() const {
  return std::expm1(nll_increase.mean());
}
double Comparison::perplexity_increase_error() const {
  return std::exp(nll_increase.mean()) * nll_increase.standard_error();
}

void Comparison::add(const DensePosition& d, std::span<const float> logits) {
  const double nll = negative_log_likelihood(logits, d.target());
  kl.add(d.kl_to(logits));
  dense.add(d.nll());
  other.add(nll);
  nll_increase.add(nll - d.nll());
  agreement.add(likeliest(logits) == d.best() ? 1.0 : 0.0);
}

void to_json(nlohmann::json& j, const Comparison& c) {
  j = {{"kl", c.kl},
       {"dense", static_cast<const RunningMean&>(c.dense)},
       {"other", static_cast<const RunningMean&>(c.other)},
       {"nll_increase", c.nll_increase},
       {"agreement", c.agreement}};
}
void from_json(const nlohmann::json& j, Comparison& c) {
  j.at("kl").get_to(c.kl);
  j.at("dense").get_to(static_cast<RunningMean&>(c.dense));
  j.at("other").get_to(static_cast<RunningMean&>(c.other));
  j.at("nll_increase").get_to(c.nll_increase);
  j.at("agreement").get_to(c.agreement);
}

nlohmann::json summary_json(const Comparison& c) {
  return {{"tokens", c.n()},
          {"kl", c.kl.mean()},
          {"kl_standard_error", c.kl.standard_error()},
          {"perplexity", c.other.perplexity()},
          {"perplexity_standard_error", c.other.perplexity_error()},
          {"perplexity_dense", c.dense.perplexity()},
          {"perplexity_increase", c.perplexity_increase()},
          {"perplexity_increase_standard_error", c.perplexity_increase_error()},
          {"agreement", c.agreement.mean()},
          {"agreement_standard_error", c.agreement.standard_error()}};
}

}  // namespace hearth::offline
