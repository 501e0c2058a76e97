// The multiple-choice knapsack: against brute force, and its bound against its result.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "offline/plan/knapsack.h"
#include "support/random.h"

namespace hearth::offline {
namespace {

std::vector<ChoiceClass> random_classes(std::mt19937& rng, int64_t n_classes, int64_t n_choices) {
  std::uniform_real_distribution<double> seconds(0, 1);
  std::vector<ChoiceClass> classes(static_cast<size_t>(n_classes));
  for (ChoiceClass& c : classes) {
    c.push_back({0, 1, 0});
    const auto count = static_cast<uint32_t>(test::random_int(rng, 0, n_choices));
    for (uint32_t i = 1; i <= count; ++i) {
      c.push_back({static_cast<uint64_t>(test::random_int(rng, 1, 50)), seconds(rng), i});
    }
    keep_pareto(c);
  }
  return classes;
}

double brute_force(const std::vector<ChoiceClass>& classes, size_t from, uint64_t budget) {
  if (from == classes.size()) return 0;
  double best = 1e9;
  for (const Choice& c : classes[from]) {
    if (c.bytes <= budget) best = std::min(best, c.seconds + brute_force(classes, from + 1, budget - c.bytes));
  }
  return best;
}

// A solution is never further from the bound than what the one step saves that the relaxation takes a part of.
TEST(PlanKnapsack, LiesBetweenTheOptimumAndOneStepMore) {
  std::mt19937 rng(11);
  for (int round = 0; round < 400; ++round) {
    const auto classes = random_classes(rng, test::random_int(rng, 1, 6), 6);
    const auto budget = static_cast<uint64_t>(test::random_int(rng, 0, 150));
    const auto r = solve_knapsack(classes, budget);
    ASSERT_TRUE(r.has_value());
    const double best = brute_force(classes, 0, budget);
    double step = 0;
    for (const ChoiceClass& c : classes) step = std::max(step, c.front().seconds - c.back().seconds);
    EXPECT_GE(r->seconds, best * (1 - 1e-12)) << "round " << round;
    EXPECT_LE(r->bound, best * (1 + 1e-12)) << "round " << round;
    EXPECT_LE(r->seconds, r->bound + step * (1 + 1e-12)) << "round " << round;
    EXPECT_LE(r->bytes, budget);
    // The result is what the ids say.
    uint64_t bytes = 0;
    double seconds = 0;
    for (size_t k = 0; k < classes.size(); ++k) {
      const auto it = std::find_if(classes[k].begin(), classes[k].end(), [&](auto& c) { return c.id == r->ids[k]; });
      ASSERT_NE(it, classes[k].end());
      bytes += it->bytes, seconds += it->seconds;
    }
    EXPECT_EQ(bytes, r->bytes);
    EXPECT_NEAR(seconds, r->seconds, 1e-12);
  }
}

TEST(PlanKnapsack, SaysWhenNothingFits) {
  const std::vector<ChoiceClass> classes = {{{5, 1.0, 0}}, {{6, 1.0, 0}, {9, 0.5, 1}}};
  EXPECT_FALSE(solve_knapsack(classes, 10).has_value());
  EXPECT_DOUBLE_EQ(solve_knapsack(classes, 11)->seconds, 2.0);
  EXPECT_DOUBLE_EQ(solve_knapsack(classes, 14)->seconds, 1.5);
}

TEST(PlanKnapsack, ParetoKeepsTheFastestOfEveryPrice) {
  ChoiceClass c = {{5, 3, 0}, {1, 9, 1}, {5, 2, 2}, {7, 2, 3}, {9, 1, 4}};
  keep_pareto(c);
  ASSERT_EQ(c.size(), 3u);
  EXPECT_EQ(c[0].id, 1u);
  EXPECT_EQ(c[1].id, 2u);
  EXPECT_EQ(c[2].id, 4u);
}

}  // namespace
}  // namespace hearth::offline
