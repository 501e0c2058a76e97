// Every checkpoint of the zoo against the results that the reference implementation recorded.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/engine.h"
#include "support/zoo.h"

namespace hearth {
namespace {

struct Case {
  test::ZooModel model;
  bool reference;  // on the oracle, or on the SIMD device
  friend void PrintTo(const Case& c, std::ostream* out) {
    *out << c.model.name << (c.reference ? "/reference" : "/cpu");
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& m : test::zoo()) {
    all.push_back({m, true});
    all.push_back({m, false});
  }
  return all;
}

class Goldens : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(GetParam().model.directory)) {
      GTEST_SKIP() << "needs " << GetParam().model.directory << ", which is absent";
    }
    goldens_ = test::read_goldens(GetParam().model.directory);
    model_ = model::Model::load(test::gguf_of(GetParam().model, DType::f32));
    device_ = GetParam().reference ? cpu::make_reference_device() : cpu::make_device(team_);
    engine_ = std::make_unique<engine::Engine>(*model_, *device_, engine::EngineOptions{});
  }
  double tolerance(const test::Golden& g) const {
    return test::f16_cache_tolerance(model_->config(), test::rms(g.last_logits));
  }

  ThreadTeam team_{2};
  test::Goldens goldens_;
  std::optional<model::Model> model_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<engine::Engine> engine_;
};

TEST_P(Goldens, LogitsAreWithinTheDerivedTolerance) {
  double worst = 0, bound = 0;
  for (const auto& g : goldens_.cases) {
    engine_->truncate(0);
    const auto logits = engine_->eval(g.ids);
    worst = std::max(worst, test::worst_difference(logits, g.last_logits));
    bound = tolerance(g);
    ASSERT_LT(bound, 0.05 * test::rms(g.last_logits)) << "the bound is vacuous";
    EXPECT_LE(worst, bound) << g.prompt;
  }
  std::printf("    worst error %.2g, bound %.2g\n", worst, bound);
}

// Fed the recorded continuation, the most likely token must be the recorded one wherever the choice is not within the
// tolerance; where the recorded margin exceeds it throughout, free-running generation must reproduce the text.
TEST_P(Goldens, GreedyContinuationsAreEqual) {
  for (const auto& g : goldens_.cases) {
    const double tol = 2 * tolerance(g);
    engine_->truncate(0);
    auto logits = engine_->eval(g.ids);
    std::vector<int32_t> free_running;
    for (const int32_t expected : g.greedy_ids) {
      const auto best = std::max_element(logits.begin(), logits.end());
      if (best - logits.begin() != expected) {
        EXPECT_LE(*best - logits[static_cast<size_t>(expected)], tol) << g.prompt;
      }
      logits = engine_->eval({&expected, 1});
    }
    if (g.min_greedy_margin <= tol) continue;
    engine_->truncate(0);
    logits = engine_->eval(g.ids);
    auto id = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    while (free_running.size() < g.greedy_ids.size()) {
      free_running.push_back(id);
      id = engine_->eval_greedy(id);
    }
    EXPECT_EQ(free_running, g.greedy_ids) << g.prompt;
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, Goldens, testing::ValuesIn(cases()), [](const auto& p) {
  return p.param.model.name + (p.param.reference ? "_reference" : "_cpu");
});

}  // namespace
}  // namespace hearth
