// How often neurons inside experts are active, estimated from counts of a sample.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "model/inside_counts.h"

namespace hearth::model {
namespace {

// Of one expert that `used` tokens chose, neurons with these frequencies.
InsideCounts drawn(const std::vector<double>& p, uint64_t used, std::mt19937& rng) {
  InsideCounts c(1, static_cast<int64_t>(p.size()));
  c.used[0] = used;
  for (size_t i = 0; i < p.size(); ++i) c.active[i] = std::binomial_distribution<uint64_t>(used, p[i])(rng);
  return c;
}
double error(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum / static_cast<double>(a.size()));
}

TEST(InsideCounts, NeuronsThatAreAlikeLookAlike) {
  std::mt19937 rng(1);
  const std::vector<double> p(768, 0.3);
  for (const uint64_t used : {5u, 60u, 2000u}) {
    const std::vector<double> f = drawn(p, used, rng).frequencies(0);
    const double by_chance = std::sqrt(0.3 * 0.7 / static_cast<double>(used));  // of plain shares
    EXPECT_LT(error(f, p), 0.4 * by_chance) << used;
  }
}

TEST(InsideCounts, NeuronsThatDifferStayApart) {
  std::mt19937 rng(2);
  std::vector<double> p;
  for (int i = 0; i < 768; ++i) p.push_back(0.9 * std::exp(-i / 200.0));
  for (const uint64_t used : {5u, 60u, 2000u}) {
    const InsideCounts c = drawn(p, used, rng);
    const std::vector<double> f = c.frequencies(0);
    std::vector<double> shares;
    for (const uint64_t n : c.active) shares.push_back(static_cast<double>(n) / static_cast<double>(used));
    EXPECT_LE(error(f, p), error(shares, p) * (used > 1000 ? 1.001 : 1)) << used;
    EXPECT_NEAR(std::accumulate(f.begin(), f.end(), 0.0), std::accumulate(shares.begin(), shares.end(), 0.0), 1e-9);
    for (size_t i = 0; i + 1 < f.size(); ++i) {
      EXPECT_EQ(c.active[i] < c.active[i + 1], f[i] < f[i + 1]) << "the order is that of the counts";
    }
  }
}

TEST(InsideCounts, AnExpertThatWasNotSeenHasTheLayersMean) {
  InsideCounts c(3, 4);
  EXPECT_EQ(c.frequencies(1), std::vector<double>(4, 0.0));
  c.used = {10, 0, 10}, c.active = {10, 0, 5, 5, 0, 0, 0, 0, 2, 2, 2, 2};
  EXPECT_EQ(c.frequencies(1), std::vector<double>(4, 28.0 / 80));
}

}  // namespace
}  // namespace hearth::model
