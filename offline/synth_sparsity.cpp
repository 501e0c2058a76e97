#include "offline/synth_sparsity.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "offline/synth_random.h"

namespace hearth::offline {
namespace {

constexpr double kHottest = 0.98;
constexpr uint64_t kRankStream = uint64_t{1} << 40;  // apart from the tensors' streams

// Noise is orthogonal to the constant component in every block of 32, so that along a vector of that subspace its
// variance is larger than in a coordinate.
constexpr double kSubspace = static_cast<double>(kSynthBlock) / (kSynthBlock - 1);

double normal_pdf(double x) {
  return std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI);
}

// The law for a given exponent q at n points, k solved for so that the mean is `density`.
std::vector<double> law_of_exponent(int64_t n, double density, double q) {
  const double floor = std::min(0.002, density / 10);
  std::vector<double> rq(static_cast<size_t>(n)), p(rq.size());
  for (size_t i = 0; i < rq.size(); ++i) rq[i] = std::pow((static_cast<double>(i) + 0.5) / static_cast<double>(n), q);
  double low = -40, high = 200;  // of log k: the mean falls from 0.98 to the floor
  for (int step = 0; step < 60; ++step) {
    const double log_k = (low + high) / 2, k = std::exp(log_k);
    for (size_t i = 0; i < p.size(); ++i) p[i] = std::max(floor, kHottest * std::exp(-k * rq[i]));
    (mean_of(p) > density ? low : high) = log_k;
  }
  return p;
}

}  // namespace

double normal_cdf(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}

double normal_quantile(double p) {
  HEARTH_CHECK(p > 0 && p < 1);
  double low = -38, high = 38;  // erfc is zero beyond
  for (int step = 0; step < 70; ++step) {
    const double x = (low + high) / 2;
    (normal_cdf(x) < p ? low : high) = x;
  }
  return (low + high) / 2;
}

double mean_of(const std::vector<double>& p) {
  return std::accumulate(p.begin(), p.end(), 0.0) / static_cast<double>(p.size());
}

double hot_share_of(const std::vector<double>& p) {
  const auto hot = static_cast<std::ptrdiff_t>(kHotFraction * static_cast<double>(p.size()));
  return std::accumulate(p.begin(), p.begin() + hot, 0.0) / std::accumulate(p.begin(), p.end(), 0.0);
}

std::vector<double> activation_law(int64_t n_ff, double density, double hot_share) {
  if (!(density > 0) || !(density < kHottest)) {
    fail("the density is {}, expected more than 0 and less than {}", density, kHottest);
  }
  if (!(hot_share > 0) || !(hot_share < 1))
    fail("the hot share is {}, expected more than 0 and less than 1", hot_share);
  const int64_t coarse = std::min<int64_t>(n_ff, 1024);  // the exponent hardly depends on the number of points
  const auto share = [&](double log_q) { return hot_share_of(law_of_exponent(coarse, density, std::exp(log_q))); };
  double low = std::log(0.01), high = std::log(64.0);
  const double least = share(low), most = share(high);
  if (hot_share < least || hot_share > most) {
    fail(
        "at a density of {} the hottest 26 % of the neurons can take {:.1f} to {:.1f} % of the activations, {:.1f} % "
        "were asked "
        "for; change --hot-share or --density",
        density, 100 * least, 100 * most, 100 * hot_share);
  }
  for (int step = 0; step < 40; ++step) {
    const double log_q = (low + high) / 2;
    (share(log_q) < hot_share ? low : high) = log_q;
  }
  return law_of_exponent(n_ff, density, std::exp((low + high) / 2));
}

std::vector<int32_t> neuron_ranks(uint64_t seed, int64_t layer, int64_t n_ff) {
  const RandomStream random(seed, kRankStream + static_cast<uint64_t>(layer));
  std::vector<int32_t> rank(static_cast<size_t>(n_ff));
  std::iota(rank.begin(), rank.end(), 0);
  for (size_t i = rank.size() - 1; i > 0; --i) {  // Fisher-Yates
    std::swap(rank[i], rank[random.below(i, static_cast<uint32_t>(i + 1))]);
  }
  return rank;
}

Calibration calibrate(const std::vector<double>& law, const CalibrationShape& shape) {
  Calibration c;
  double moment = 0;  // sum over neurons of E[r^2] or Var[r], r = relu(xi - b), xi standard normal
  for (const double p : law) {
    const double b = -normal_quantile(p), mean = normal_pdf(b) - b * p, square = (1 + b * b) * p - b * normal_pdf(b);
    c.threshold.push_back(b);
    moment += shape.gated ? square : square - mean * mean;
  }
  const double constant = Calibration::kConstant * Calibration::kConstant, first = constant;
  const double n_layer = static_cast<double>(shape.n_layer);
  const double ffn_adds = Calibration::kFfnGrowth * first / n_layer;
  const double attention_adds = Calibration::kAttentionGrowth * first / n_layer;
  double variance = first;
  for (int64_t l = 0; l < shape.n_layer; ++l) {
    const double attention_share =
        kSubspace * variance / (constant + variance);  // noise of a row's product with the normed input
    const double at_ffn = shape.parallel_block ? variance : variance + shape.drift * attention_adds;
    const double ffn_share = kSubspace * at_ffn / (constant + at_ffn);
    Calibration::Layer layer{};
    layer.noise = std::sqrt(kSubspace * at_ffn);
    layer.attn_out_std = std::sqrt(attention_adds / (static_cast<double>(shape.n_embd) * attention_share));
    // A neuron adds relu(z) u down: relu(z)^2 is ffn_share * r^2, u^2 is ffn_share (1 without `up`).
    layer.down_std = std::sqrt(ffn_adds / (moment * ffn_share * (shape.gated ? ffn_share : 1.0)));
    c.layers.push_back(layer);
    variance += shape.drift * attention_adds + ffn_adds;
  }
  return c;
}

}  // namespace hearth::offline
