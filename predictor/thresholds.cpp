#include "predictor/thresholds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"

namespace hearth::predictor {

void NeuronScores::assign(std::span<const float> score, std::span<const float> loss) {
  HEARTH_CHECK(score.size() == loss.size() && !score.empty());
  order_.resize(score.size());
  std::iota(order_.begin(), order_.end(), 0u);
  std::sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
    return score[a] != score[b] ? score[a] < score[b] : a < b;  // one order whatever the library's sort does
  });
  score_.resize(score.size());
  dropped_.assign(score.size() + 1, 0);
  inactive_.assign(score.size() + 1, 0);
  for (size_t i = 0; i < order_.size(); ++i) {
    score_[i] = score[order_[i]];
    const float l = loss[order_[i]];
    dropped_[i + 1] = dropped_[i] + static_cast<double>(l);
    inactive_[i + 1] = inactive_[i] + (l > 0 ? 0 : 1);
  }
}

// The cuts that are best at some price are the corners of the lower convex hull of loss over tokens dropped.
void NeuronScores::thresholds(std::span<const double> prices, float* out) const {
  const size_t T = score_.size();
  std::vector<size_t> hull = {0};
  const auto rate = [&](size_t a, size_t b) { return (dropped_[b] - dropped_[a]) / static_cast<double>(b - a); };
  for (size_t i = 1; i <= T; ++i) {
    if (i < T && score_[i] == score_[i - 1]) continue;  // equal scores share their fate
    while (hull.size() > 1 && rate(hull[hull.size() - 2], hull.back()) >= rate(hull.back(), i)) hull.pop_back();
    hull.push_back(i);
  }
  size_t at = 0;
  for (size_t p = 0; p < prices.size(); ++p) {
    while (at + 1 < hull.size() && rate(hull[at], hull[at + 1]) <= prices[p]) ++at;
    const size_t cut = hull[at];
    if (cut == 0) {
      out[p] = -std::numeric_limits<float>::infinity();
    } else if (cut == T) {
      out[p] = score_[T - 1];
    } else {  // between the two; rounded it may meet the upper one
      const float middle = score_[cut - 1] + (score_[cut] - score_[cut - 1]) / 2;
      out[p] = middle < score_[cut] ? middle : score_[cut - 1];
    }
  }
}

NeuronScores::Kept NeuronScores::above_index(size_t i) const {
  const size_t T = score_.size();
  const auto predicted = static_cast<int64_t>(T - i);
  return {predicted, predicted - (inactive_[T] - inactive_[i]), dropped_[T] - dropped_[i]};
}

NeuronScores::Kept NeuronScores::above(float threshold) const {
  const auto first = std::upper_bound(score_.begin(), score_.end(), threshold);
  return above_index(static_cast<size_t>(first - score_.begin()));
}

void Tally::add(const NeuronScores::Kept& all, const NeuronScores::Kept& kept_part, int64_t tokens) {
  n += tokens;
  active += all.active, predicted += kept_part.predicted, hits += kept_part.active;
  loss += all.loss, kept += kept_part.loss;
}

Tally& Tally::operator+=(const Tally& other) {
  n += other.n, active += other.active, predicted += other.predicted, hits += other.hits;
  loss += other.loss, kept += other.kept;
  return *this;
}

double Tally::recall() const {
  return active > 0 ? static_cast<double>(hits) / static_cast<double>(active) : 1.0;
}
double Tally::loss_recall() const {
  return loss > 0 ? kept / loss : 1.0;
}
double Tally::precision() const {
  return predicted > 0 ? static_cast<double>(hits) / static_cast<double>(predicted) : 1.0;
}
double Tally::density() const {
  return n > 0 ? static_cast<double>(active) / static_cast<double>(n) : 0.0;
}
double Tally::predicted_density() const {
  return n > 0 ? static_cast<double>(predicted) / static_cast<double>(n) : 0.0;
}

std::vector<double> price_list(double mean_loss) {
  std::vector<double> prices;
  const double unit = mean_loss > 0 ? mean_loss : 1.0;
  for (double p = unit * 1e-5; p < unit * 30; p *= 13.0 / 12.0) prices.push_back(p);
  return prices;
}

}  // namespace hearth::predictor
