// Perplexity, divergence and agreement against a plain computation in extended precision.
#include "offline/tune/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/random.h"

namespace hearth::offline {
namespace {

using Real = long double;

std::vector<Real> reference_log_softmax(const std::vector<float>& logits) {
  Real sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<Real>(x));
  std::vector<Real> out;
  for (const float x : logits) out.push_back(static_cast<Real>(x) - std::log(sum));
  return out;
}

struct Moments {
  Real mean, error;
};
Moments reference_moments(const std::vector<Real>& values) {
  Real sum = 0, squares = 0;
  for (const Real v : values) sum += v;
  const auto n = static_cast<Real>(values.size());
  for (const Real v : values) squares += (v - sum / n) * (v - sum / n);
  return {sum / n, std::sqrt(squares / (n - 1) / n)};
}

struct Rows {
  std::vector<std::vector<float>> dense, other;
  std::vector<int32_t> targets;
};

// `noise`: how far the second run is from the first.
Rows random_rows(size_t positions, size_t n_vocab, float noise, uint32_t seed) {
  std::mt19937 rng(seed);
  Rows r;
  for (size_t i = 0; i < positions; ++i) {
    r.dense.push_back(test::random_normal(rng, n_vocab, 3.0f, 0.0f));
    r.other.push_back(r.dense.back());
    const std::vector<float> difference = test::random_normal(rng, n_vocab, noise, 0.0f);
    for (size_t v = 0; v < n_vocab; ++v) r.other.back()[v] += difference[v];
    r.targets.push_back(static_cast<int32_t>(test::random_int(rng, 0, static_cast<int64_t>(n_vocab) - 1)));
  }
  return r;
}

Comparison compare(const Rows& r) {
  Comparison c;
  for (size_t i = 0; i < r.dense.size(); ++i) c.add(DensePosition(r.dense[i], r.targets[i]), r.other[i]);
  return c;
}

TEST(Metrics, EqualAPlainComputation) {
  for (const float noise : {0.01f, 0.3f, 2.0f}) {
    const Rows r = random_rows(200, 300, noise, 7);
    std::vector<Real> kl, dense, other, increase, agreement;
    for (size_t i = 0; i < r.dense.size(); ++i) {
      const auto p = reference_log_softmax(r.dense[i]), q = reference_log_softmax(r.other[i]);
      Real sum = 0;
      for (size_t v = 0; v < p.size(); ++v) sum += std::exp(p[v]) * (p[v] - q[v]);
      kl.push_back(sum);
      const auto target = static_cast<size_t>(r.targets[i]);
      dense.push_back(-p[target]), other.push_back(-q[target]), increase.push_back(p[target] - q[target]);
      agreement.push_back(
          std::max_element(p.begin(), p.end()) - p.begin() == std::max_element(q.begin(), q.end()) - q.begin() ? 1 : 0);
    }
    const Comparison c = compare(r);
    // Logits are floats of size 10 whose differences are rounded to 2^-24 of that: 1e-6 bounds the sum of 300 such
    // errors weighted by a probability; KL itself is 5e-5 to 2.
    const auto expect = [](const RunningMean& got, const std::vector<Real>& values, const char* what) {
      const Moments m = reference_moments(values);
      EXPECT_EQ(got.n(), static_cast<int64_t>(values.size())) << what;
      EXPECT_NEAR(got.mean(), static_cast<double>(m.mean), 1e-6) << what;
      EXPECT_NEAR(got.standard_error(), static_cast<double>(m.error), 1e-6) << what;
    };
    expect(c.kl, kl, "kl");
    EXPECT_GT(c.kl.mean(), 0.2 * noise * noise);  // the bound above says something
    expect(c.dense, dense, "dense");
    expect(c.other, other, "other");
    expect(c.nll_increase, increase, "increase");
    expect(c.agreement, agreement, "agreement");
    const Moments m = reference_moments(other), d = reference_moments(increase);
    EXPECT_NEAR(c.other.perplexity(), static_cast<double>(std::exp(m.mean)), 1e-3);
    EXPECT_NEAR(c.other.perplexity_error(), static_cast<double>(std::exp(m.mean) * m.error), 1e-3);
    EXPECT_NEAR(c.perplexity_increase(), static_cast<double>(std::exp(d.mean) - 1), 1e-6);
    EXPECT_NEAR(c.perplexity_increase_error(), static_cast<double>(std::exp(d.mean) * d.error), 1e-6);
  }
}

TEST(Metrics, TheSameLogitsAreExactlyAsGood) {
  const Comparison c = compare(random_rows(50, 100, 0.0f, 3));
  EXPECT_EQ(c.kl.mean(), 0.0);
  EXPECT_EQ(c.perplexity_increase(), 0.0);
  EXPECT_EQ(c.agreement.mean(), 1.0);
  EXPECT_EQ(c.dense.mean(), c.other.mean());
}

TEST(Metrics, HugeLogitsDoNotOverflow) {
  const std::vector<float> a = {1000.0f, 999.0f, -1000.0f}, b = {-1000.0f, -1001.0f, -3000.0f};
  const DensePosition p(a, 1);
  EXPECT_NEAR(p.nll(), 1 + std::log1p(std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(p.kl_to(b), 0.0, 1e-7);  // the same distribution
  EXPECT_EQ(p.best(), 0);
}

TEST(Metrics, SumsGoOnFromJsonWithTheSameBits) {
  const Rows r = random_rows(40, 50, 0.5f, 11);
  Comparison whole, half;
  for (size_t i = 0; i < 40; ++i) {
    const DensePosition p(r.dense[i], r.targets[i]);
    whole.add(p, r.other[i]);
    half.add(p, r.other[i]);
    if (i == 17) half = nlohmann::json::parse(nlohmann::json(half).dump()).get<Comparison>();
  }
  EXPECT_EQ(nlohmann::json(whole), nlohmann::json(half));
}

}  // namespace
}  // namespace hearth::offline
