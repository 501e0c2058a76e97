// Thresholds from first principles: the cut at a price is the best of all cuts, and the tallies are counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "predictor/thresholds.h"
#include "support/random.h"

namespace hearth::predictor {
namespace {

struct Sample {
  std::vector<float> score, loss;
};
// Losses grow with the score, with noise; scores repeat.
Sample random_sample(std::mt19937& rng, size_t n) {
  Sample s;
  const std::vector<float> z = test::random_normal(rng, n, 1.0f, -0.8f), noise = test::random_normal(rng, n, 0.3f);
  for (size_t i = 0; i < n; ++i) {
    s.loss.push_back(std::max(0.0f, z[i]));
    s.score.push_back(std::round((z[i] + noise[i]) * 20) / 20);
  }
  return s;
}

double cost(const Sample& s, float threshold, double price) {
  double sum = 0;
  for (size_t i = 0; i < s.score.size(); ++i) {
    sum += s.score[i] > threshold ? price : static_cast<double>(s.loss[i]);
  }
  return sum;
}

TEST(Thresholds, AreTheBestAtEveryPrice) {
  std::mt19937 rng(4);
  for (int round = 0; round < 20; ++round) {
    const Sample s = random_sample(rng, 60);
    NeuronScores neuron;
    neuron.assign(s.score, s.loss);
    const std::vector<double> prices = {0, 1e-3, 0.05, 0.2, 0.5, 1, 10};
    std::vector<float> thresholds(prices.size());
    neuron.thresholds(prices, thresholds.data());
    std::vector<float> cuts = s.score;
    cuts.push_back(-std::numeric_limits<float>::infinity());
    for (size_t p = 0; p < prices.size(); ++p) {
      double best = INFINITY;
      for (const float cut : cuts) best = std::min(best, cost(s, cut, prices[p]));
      EXPECT_NEAR(cost(s, thresholds[p], prices[p]), best, 1e-9) << "price " << prices[p];
      if (p > 0) {
        EXPECT_GE(thresholds[p], thresholds[p - 1]);
      }
    }
  }
}

TEST(Thresholds, APriceOfNothingLosesNothing) {
  std::mt19937 rng(5);
  const Sample s = random_sample(rng, 200);
  NeuronScores neuron;
  neuron.assign(s.score, s.loss);
  const std::vector<double> prices = {0};
  float threshold = 0;
  neuron.thresholds(prices, &threshold);
  const auto all = neuron.all(), kept = neuron.above(threshold);
  EXPECT_EQ(kept.active, all.active);
  EXPECT_DOUBLE_EQ(kept.loss, all.loss);
  EXPECT_LT(kept.predicted, all.predicted);  // and drops some inactive tokens
}

// A neuron that never fired is predicted only by a score that was not seen: it is not written off.
TEST(Thresholds, ASilentNeuronAnswersToHigherScores) {
  const std::vector<float> score = {-1, -3, -2}, loss = {0, 0, 0};
  NeuronScores neuron;
  neuron.assign(score, loss);
  const std::vector<double> prices = {0.1};
  float threshold = 0;
  neuron.thresholds(prices, &threshold);
  EXPECT_EQ(threshold, -1);
}

// Neighbouring floats have no middle; the lower one is the threshold then.
TEST(Thresholds, SeparateNeighbouringFloats) {
  const float low = 1.0f, high = std::nextafter(1.0f, 2.0f);
  const std::vector<float> score = {low, high}, loss = {0, 1};
  NeuronScores neuron;
  neuron.assign(score, loss);
  const std::vector<double> prices = {0.5};
  float threshold = 0;
  neuron.thresholds(prices, &threshold);
  EXPECT_EQ(neuron.above(threshold).predicted, 1);
  EXPECT_EQ(neuron.above(threshold).active, 1);
}

TEST(Thresholds, TalliesAreCounts) {
  std::mt19937 rng(6);
  const Sample s = random_sample(rng, 300);
  NeuronScores neuron;
  neuron.assign(s.score, s.loss);
  for (const float threshold : {-2.0f, -0.5f, 0.0f, 0.35f, 9.0f}) {
    int64_t predicted = 0, hits = 0, active = 0;
    double kept = 0, loss = 0;
    for (size_t i = 0; i < s.score.size(); ++i) {
      predicted += s.score[i] > threshold;
      active += s.loss[i] > 0;
      hits += s.score[i] > threshold && s.loss[i] > 0;
      loss += static_cast<double>(s.loss[i]);
      kept += s.score[i] > threshold ? static_cast<double>(s.loss[i]) : 0;
    }
    Tally t;
    t.add(neuron.all(), neuron.above(threshold), 300);
    EXPECT_EQ(t.predicted, predicted);
    EXPECT_EQ(t.active, active);
    EXPECT_EQ(t.hits, hits);
    EXPECT_NEAR(t.loss_recall(), kept / loss, 1e-9);
    EXPECT_DOUBLE_EQ(t.density(), static_cast<double>(active) / 300);
    if (predicted == 0) {
      EXPECT_EQ(t.precision(), 1);
    }
  }
}

TEST(Thresholds, PricesSpanFromNothingToEverything) {
  const std::vector<double> prices = price_list(2.0);
  EXPECT_LT(prices.front(), 1e-4);
  EXPECT_GT(prices.back(), 50);
  EXPECT_TRUE(std::is_sorted(prices.begin(), prices.end()));
  EXPECT_FALSE(price_list(0).empty());
}

}  // namespace
}  // namespace hearth::predictor
