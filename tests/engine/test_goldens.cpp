// Every checkpoint of the zoo against the results that the reference implementation recorded.
#include <gtest/gtest.h>

#include "core/experts.h"
#include "core/forwarding_device.h"
#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/greedy.h"
#include "support/zoo.h"

namespace hearth {
namespace {

constexpr double kRecorded = 1e-5;  // logits are recorded with 5 decimals

// The oracle and the SIMD device, in turn.
class Goldens : public testing::TestWithParam<test::ZooModel> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(GetParam().directory)) {
      GTEST_SKIP() << "needs " << GetParam().directory << ", which is absent";
    }
    goldens_ = test::read_goldens(GetParam().directory);
    path_ = test::gguf_of(GetParam(), DType::f32);
    model_ = model::Model::load(path_);
    for (const auto& g : goldens_.cases) tolerance_.push_back(tolerance(g));
    devices_.push_back(cpu::make_reference_device());
    devices_.push_back(cpu::make_device(team_));
    for (const auto& d : devices_)
      engines_.push_back(std::make_unique<engine::Engine>(*model_, *d, engine::EngineOptions{}));
  }
  // The recorded logits had an unrounded KV cache: its rounding is measured for this prompt.
  double tolerance(const test::Golden& g) const {
    const test::Script prompt{g.ids, {static_cast<int64_t>(g.ids.size())}};
    const test::ErrorLimits limits(path_, prompt, test::kCpuArithmetic, {}, 1.0 / 3);
    return limits.worst(0) + kRecorded;
  }

  ThreadTeam team_{2};
  test::Goldens goldens_;
  std::filesystem::path path_;
  std::vector<double> tolerance_;
  std::optional<model::Model> model_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<engine::Engine>> engines_;
};

TEST_P(Goldens, LogitsAndGreedyContinuationsAreTheRecordedOnes) {
  for (const auto& e : engines_) {
    SCOPED_TRACE(e->device().name());
    double worst = 0, share = 0, least = INFINITY;
    for (size_t i = 0; i < goldens_.cases.size(); ++i) {
      const test::Golden& g = goldens_.cases[i];
      ASSERT_LT(tolerance_[i], 0.02 * test::rms(g.last_logits)) << "the bound is vacuous";
      engine::Sequence text = e->sequence();
      const double error = test::worst_difference(e->eval(text, g.ids), g.last_logits);
      text.truncate(0);
      EXPECT_LE(error, tolerance_[i]) << g.prompt;
      test::expect_greedy(*e, g, 2 * tolerance_[i]);
      worst = std::max(worst, error), share = std::max(share, error / tolerance_[i]);
      least = std::min(least, tolerance_[i]);
    }
    std::printf("    worst error %.2g; largest share of its bound %.2f; tightest bound %.2g\n", worst, share, least);
  }
}

// What a device's router chose, by layer: [layer][token].
class RecordsChoices final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
    ForwardingDevice::route(router, in, T, choice);
    std::vector<std::vector<int32_t>>& layer = chosen.emplace_back();
    for (int64_t t = 0; t < T; ++t) {  // without the shared expert
      const int32_t* const ids = choice.ids + t * choice.n_named;
      layer.emplace_back(ids, ids + router.routing.n_used);
    }
  }
  std::vector<std::vector<std::vector<int32_t>>> chosen;
};

class MixtureGoldens : public Goldens {};

TEST_P(MixtureGoldens, ChosenExpertsAreTheRecordedOnes) {
  for (const auto& d : devices_) {
    SCOPED_TRACE(d->name());
    RecordsChoices device(*d);
    engine::Engine e(*model_, device, {});
    for (const test::Golden& g : goldens_.cases) {
      auto recorded = g.experts;
      std::erase_if(recorded, [](const auto& layer) { return layer.empty(); });
      ASSERT_FALSE(recorded.empty());
      device.chosen.clear();
      engine::Sequence text = e.sequence();
      e.eval(text, g.ids);
      EXPECT_EQ(device.chosen, recorded) << g.prompt;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, Goldens, testing::ValuesIn(test::zoo()), [](const auto& p) { return p.param.name; });

INSTANTIATE_TEST_SUITE_P(Mixtures, MixtureGoldens, testing::ValuesIn(test::mixtures()),
                         [](const auto& p) { return p.param.name; });
INSTANTIATE_TEST_SUITE_P(Mixtures, Goldens, testing::ValuesIn(test::mixtures()),
                         [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace hearth
