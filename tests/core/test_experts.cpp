// The choice of experts: what is chosen, by which scores, and what becomes of numbers that are none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "core/experts.h"
#include "support/random.h"

namespace hearth {
namespace {

struct Choice {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};
Choice choose(const Routing& r, const std::vector<float>& logits, const std::vector<float>& correction = {}) {
  Choice c{std::vector<int32_t>(static_cast<size_t>(r.n_used)), std::vector<float>(static_cast<size_t>(r.n_used))};
  const Vector v{correction.empty() ? nullptr : correction.data(), static_cast<int64_t>(correction.size())};
  choose_experts(r, logits.data(), v, c.ids.data(), c.weights.data());
  return c;
}
using Ids = std::vector<int32_t>;

TEST(ChooseExperts, SoftmaxOverAllOrOverTheChosen) {
  const std::vector<float> logits = {0, std::log(4.0f), std::log(2.0f), std::log(3.0f)};  // 1, 4, 2 and 3 of 10
  Routing r{.n_expert = 4, .n_used = 2};
  Choice c = choose(r, logits);
  EXPECT_EQ(c.ids, (Ids{1, 3}));
  EXPECT_NEAR(c.weights[0], 0.4f, 1e-6f);
  EXPECT_NEAR(c.weights[1], 0.3f, 1e-6f);
  r.normalize = true, r.scale = 7;
  c = choose(r, logits);
  EXPECT_NEAR(c.weights[0], 4.0f, 1e-5f);
  EXPECT_NEAR(c.weights[1], 3.0f, 1e-5f);
  c = choose({.gating = Gating::selected_softmax, .n_expert = 4, .n_used = 2}, logits);
  EXPECT_NEAR(c.weights[0], 4.0f / 7, 1e-6f);
  EXPECT_NEAR(c.weights[1], 3.0f / 7, 1e-6f);
}

TEST(ChooseExperts, ACorrectionChoosesAndDoesNotWeigh) {
  const Routing r{.gating = Gating::sigmoid, .n_expert = 3, .n_used = 1};
  const Choice c = choose(r, {2.0f, 1.0f, 0.0f}, {0.0f, 0.0f, 0.6f});
  EXPECT_EQ(c.ids, Ids{2});
  EXPECT_NEAR(c.weights[0], 0.5f, 1e-6f);
}

TEST(ChooseExperts, GroupsAreRankedByTheirTwoBest) {
  Routing r{.gating = Gating::sigmoid, .n_expert = 6, .n_used = 2, .n_groups = 2, .n_groups_used = 1};
  // The best expert is in the group whose two best are worse.
  EXPECT_EQ(choose(r, {5, -5, -5, 2, 3, -5}).ids, (Ids{3, 4}));
  r.n_groups_used = 2;
  EXPECT_EQ(choose(r, {5, -5, -5, 2, 3, -5}).ids, (Ids{0, 4}));
}

// DeepSeek-V2's rule as transformers has it (modeling_deepseek_v2.py, group_limited_greedy): a mask of the groups with the
// largest scores, zero for all other experts, and the best of what is left, unnormalised.
TEST(ChooseExperts, GroupsOfDeepSeekV2AreRankedByTheirBest) {
  Routing r{.n_expert = 6, .n_used = 2, .n_groups = 2, .n_groups_used = 1, .n_best_of_group = 1};
  EXPECT_EQ(choose(r, {5, -5, -5, 2, 3, -5}).ids, (Ids{0, 1}));
  std::mt19937 rng(6);
  for (int round = 0; round < 1000; ++round) {
    r.n_groups = test::random_int(rng, 1, 8), r.n_groups_used = test::random_int(rng, 1, r.n_groups);
    const int64_t size = test::random_int(rng, 1, 7);
    r.n_expert = r.n_groups * size, r.n_used = test::random_int(rng, 1, r.n_groups_used * size);
    r.scale = 16;
    const std::vector<float> logits = test::random_normal(rng, static_cast<size_t>(r.n_expert), 2.0f);
    std::vector<double> scores(logits.begin(), logits.end());
    double sum = 0;
    for (double& s : scores) sum += s = std::exp(s);
    for (double& s : scores) s /= sum;
    std::vector<std::pair<double, int64_t>> groups, best;
    for (int64_t g = 0; g < r.n_groups; ++g) {
      groups.emplace_back(-*std::max_element(scores.begin() + g * size, scores.begin() + (g + 1) * size), g);
    }
    std::sort(groups.begin(), groups.end());
    groups.resize(static_cast<size_t>(r.n_groups_used));
    for (const auto& [score, g] : groups) {
      for (int64_t e = g * size; e < (g + 1) * size; ++e) best.emplace_back(-scores[static_cast<size_t>(e)], e);
    }
    std::sort(best.begin(), best.end());
    best.resize(static_cast<size_t>(r.n_used));
    const Choice c = choose(r, logits);
    for (const auto& [score, e] : best) {
      const auto at = std::find(c.ids.begin(), c.ids.end(), static_cast<int32_t>(e));
      ASSERT_NE(at, c.ids.end()) << "expert " << e << " in round " << round;
      EXPECT_NEAR(c.weights[static_cast<size_t>(at - c.ids.begin())], -16 * score, 1e-5);
    }
  }
}

TEST(ChooseExperts, EqualOnesByTheSmallerId) {
  EXPECT_EQ(choose({.n_expert = 5, .n_used = 2}, {1, 3, 3, 3, 1}).ids, (Ids{1, 2}));
}

TEST(ChooseExperts, IdsAreDistinctAndAscendingWhateverTheLogits) {
  std::mt19937 rng(5);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int round = 0; round < 2000; ++round) {
    const int64_t n = 8 * test::random_int(rng, 1, 8), groups = test::random_int(rng, 0, 1) == 0 ? 1 : 4;
    Routing r{.gating = static_cast<Gating>(test::random_int(rng, 0, 2)), .n_expert = n, .n_groups = groups};
    r.n_groups_used = test::random_int(rng, 1, groups), r.n_best_of_group = test::random_int(rng, 1, 2);
    r.n_used = test::random_int(rng, 1, n / groups * r.n_groups_used);
    std::vector<float> logits = test::random_normal(rng, static_cast<size_t>(n), 3.0f);
    for (float& x : logits) {
      if (test::random_int(rng, 0, 5) == 0) x = -kInfinity;
      if (test::random_int(rng, 0, 60) == 0) x = kInfinity;
      if (test::random_int(rng, 0, 200) == 0) x = NAN;
    }
    const Choice c = choose(r, logits);
    for (size_t i = 0; i < c.ids.size(); ++i) {
      ASSERT_TRUE(c.ids[i] >= 0 && c.ids[i] < n && (i == 0 || c.ids[i] > c.ids[i - 1]));
    }
  }
}

TEST(ChooseExperts, ALogitThatIsNoNumberShowsInEveryWeight) {
  for (const Gating g : {Gating::softmax, Gating::sigmoid, Gating::selected_softmax}) {
    const Choice c = choose({.gating = g, .n_expert = 4, .n_used = 2}, {3, 2, 1, NAN});
    EXPECT_EQ(c.ids, (Ids{0, 1}));
    for (const float w : c.weights) EXPECT_TRUE(std::isnan(w));
  }
}

}  // namespace
}  // namespace hearth
