// Thresholds: where they come from, that a batch under them computes what a sparse decode does, how they are chosen.
#include "offline/tune/tune.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "core/error.h"
#include "cpu/cpu.h"
#include "offline/tune/knee.h"
#include "offline/tune/magnitudes.h"
#include "offline/tune/record.h"
#include "offline/tune/threshold_device.h"
#include "support/tiny_model.h"
#include "support/zoo.h"

namespace hearth::offline {
namespace {

// --- the knee ---

std::vector<CurvePoint> curve(double (*loss)(double), size_t n = 2001) {
  std::vector<CurvePoint> points;
  for (size_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(i) / static_cast<double>(n - 1);
    points.push_back({100 + 50 * x, 3 + 7 * loss(x)});  // the scale of the axes must not matter
  }
  return points;
}

TEST(Knee, LiesWhereTheSlopeIsThatOfTheChord) {
  const auto at = [](double (*loss)(double)) { return static_cast<double>(find_knee(curve(loss))) / 2000; };
  EXPECT_NEAR(at([](double x) { return x * x; }), 0.5, 1e-3);                                // 2x = 1
  EXPECT_NEAR(at([](double x) { return x * x * x; }), 1 / std::sqrt(3.0), 1e-3);             // 3x² = 1
  EXPECT_NEAR(at([](double x) { return 1 - std::sqrt(1 - x * x); }), std::sqrt(0.5), 1e-3);  // quarter circle
  // (e^(8x) - 1) / (e^8 - 1): 8 e^(8x) = e^8 - 1
  EXPECT_NEAR(at([](double x) { return std::expm1(8 * x) / std::expm1(8.0); }), std::log(std::expm1(8.0) / 8) / 8,
              1e-3);
  EXPECT_NEAR(at([](double x) { return x < 0.7 ? 0.1 * x : 0.07 + 3.1 * (x - 0.7); }), 0.7, 1e-3);  // a corner
}

TEST(Knee, OfCurvesWithoutOne) {
  const std::vector<CurvePoint> one = {{1, 1}}, flat = {{1, 0}, {2, 0}, {3, 0}}, straight = {{1, 1}, {2, 2}, {3, 3}},
                                concave = {{0, 0}, {1, 2}, {2, 3}};
  EXPECT_EQ(find_knee(one), 0u);
  EXPECT_EQ(find_knee(flat), 2u);      // nothing is lost: as far as it goes
  EXPECT_EQ(find_knee(straight), 2u);  // on the line everywhere
  EXPECT_EQ(find_knee(concave), 2u);
}

// --- the greedy path ---

// Every prefix loses the least that any combination of choices with at least its savings loses.
TEST(GreedyPath, EveryPrefixIsOptimal) {
  std::mt19937 rng(5);
  for (int round = 0; round < 20; ++round) {
    const size_t n_layer = 4, n_choice = 4;
    std::vector<std::vector<double>> loss(n_layer), saved(n_layer);
    for (size_t l = 0; l < n_layer; ++l) {
      for (size_t k = 0; k < n_choice; ++k) {
        loss[l].push_back(k == 0 ? 0 : loss[l].back() + 0.1 + static_cast<double>(test::random_int(rng, 0, 100)));
        saved[l].push_back(k == 0 ? 0 : saved[l].back() + static_cast<double>(test::random_int(rng, 0, 20)));
      }
    }
    const std::vector<PathStep> path = greedy_path(loss, saved);
    std::vector<size_t> at(n_layer, 0);
    for (const PathStep& step : path) {
      at[step.layer] = step.level;
      double path_loss = 0, path_saved = 0;
      for (size_t l = 0; l < n_layer; ++l) path_loss += loss[l][at[l]], path_saved += saved[l][at[l]];
      for (size_t code = 0; code < 256; ++code) {
        double other_loss = 0, other_saved = 0;
        for (size_t l = 0, c = code; l < n_layer; ++l, c /= 4)
          other_loss += loss[l][c % 4], other_saved += saved[l][c % 4];
        EXPECT_FALSE(other_saved >= path_saved && other_loss < path_loss - 1e-9)
            << "round " << round << " code " << code;
      }
    }
    for (size_t l = 0; l < n_layer; ++l)
      EXPECT_EQ(saved[l][at[l]], saved[l].back()) << "the path ends at all that can be saved";
  }
}

TEST(GreedyPath, TakesNothingThatSavesNothing) {
  const std::vector<std::vector<double>> loss = {{0, 1, 2}, {0, 5, 6}}, saved = {{0, 0, -1}, {0, 0, 3}};
  const std::vector<PathStep> path = greedy_path(loss, saved);
  ASSERT_EQ(path.size(), 1u);
  EXPECT_EQ(path[0].layer, 1u);
  EXPECT_EQ(path[0].level, 2u);
}

// --- magnitudes ---

TEST(Magnitudes, ThresholdsOfWantedDensities) {
  std::mt19937 rng(9);
  const std::vector<float> values = test::random_normal(rng, 20000, 1.0f, 0.0f);
  MagnitudeHistogram h;
  for (const float v : values) h.add(v > 0 ? v : 0.0f);
  EXPECT_EQ(h.threshold_for(1.0), 0.0f);
  for (const double density : {0.4, 0.25, 0.1, 0.01}) {
    const float t = h.threshold_for(density);
    const auto above = static_cast<double>(std::count_if(values.begin(), values.end(), [&](float v) { return v > t; }));
    EXPECT_DOUBLE_EQ(h.density(t), above / 20000);  // exact at the end of a bin
    EXPECT_LE(above / 20000, density);
    const float below = t / 1.017f;  // one bin lower
    const auto more =
        static_cast<double>(std::count_if(values.begin(), values.end(), [&](float v) { return v > below; }));
    EXPECT_GT(more / 20000, density);
  }
}

TEST(Magnitudes, CountsOfThresholds) {
  ThresholdCounts c({0.0f, 0.5f, 2.0f}, 3);
  const std::vector<float> norms = {1, 2, 3};
  const std::vector<float> act1 = {0.0f, -0.5f, 3.0f}, value1 = {0.0f, 1.0f, 2.0f};
  const std::vector<float> act2 = {0.6f, -2.5f, 0.1f}, value2 = {1.0f, 1.0f, 1.0f};
  c.add(act1.data(), value1.data(), norms.data(), 0, 3);
  c.add(act2.data(), value2.data(), norms.data(), 0, 3);
  c.add_tokens(2);
  EXPECT_EQ(c.frequencies(0), (std::vector<double>{0.5, 1, 1}));
  EXPECT_EQ(c.frequencies(1), (std::vector<double>{0.5, 0.5, 0.5}));
  EXPECT_EQ(c.frequencies(2), (std::vector<double>{0, 0.5, 0.5}));
  EXPECT_EQ(c.dropped_energy(0), 0.0);
  EXPECT_DOUBLE_EQ(c.dropped_energy(1), (4.0 + 9.0) / 2);        // neuron 1 of the first token, 2 of the second
  EXPECT_DOUBLE_EQ(c.dropped_energy(2), (4.0 + 9.0 + 1.0) / 2);  // and 0 of the second
}

// --- a batch under thresholds ---

class ThresholdCases : public testing::TestWithParam<test::ZooModel> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(GetParam().directory)) GTEST_SKIP() << "needs " << GetParam().directory;
  }
  static std::vector<int32_t> ids(const model::Config& c, size_t n) {
    std::mt19937 rng(3);
    std::vector<int32_t> out(n);
    for (int32_t& id : out) id = static_cast<int32_t>(test::random_int(rng, 0, c.n_vocab - 1));
    return out;
  }
  // Logits of the last id, all ids in one batch under these thresholds.
  static std::vector<float> batched(model::Model& m, const Thresholds& thresholds, std::span<const int32_t> text,
                                    std::vector<MagnitudeHistogram>* histograms = nullptr, double* density = nullptr) {
    ThreadTeam team(2);
    const auto cpu = cpu::make_device(team);
    ThresholdDevice device(*cpu, team, m);
    engine::Engine engine(m, device, {.sparsity = engine::Sparsity::off});
    device.set_thresholds(thresholds, !thresholds.empty());
    device.observe(histograms);
    engine::Sequence sequence = engine.sequence();
    const auto logits = engine.eval(sequence, text);
    if (density != nullptr) *density = device.density();
    return {logits.begin(), logits.end()};
  }
};

TEST_P(ThresholdCases, ThresholdZeroIsDenseToTheBit) {
  model::Model m = model::Model::load(test::gguf_of(GetParam(), DType::f16));
  const auto text = ids(m.config(), 23);
  const Thresholds zero(static_cast<size_t>(m.config().n_layer), 0.0f);
  EXPECT_EQ(batched(m, zero, text), batched(m, {}, text));
}

// The real thing: token by token through the engine's sparse decode, a threshold for each layer.
TEST_P(ThresholdCases, ABatchComputesWhatSparseDecodeDoes) {
  for (const DType type : {DType::f32, DType::q8_0}) {
    const auto path = test::gguf_of(GetParam(), type);
    model::Model m = model::Model::load(path);
    // `hearth quantize` transposes the down projections of the ReLU families alone.
    if (is_quantized(type) && !m.config().ffn.sparse()) continue;
    const auto n_layer = static_cast<size_t>(m.config().n_layer);
    const auto text = ids(m.config(), 17);
    std::vector<MagnitudeHistogram> histograms(n_layer);
    const auto dense = batched(m, {}, text, &histograms);
    Thresholds thresholds;
    double wanted = 0;
    for (size_t l = 0; l < n_layer; ++l) {
      const double density = histograms[l].density(0) * (l % 2 == 0 ? 0.5 : 0.7);
      thresholds.push_back(histograms[l].threshold_for(density));
      wanted += density / static_cast<double>(n_layer);
    }
    double density = 0;
    const auto masked = batched(m, thresholds, text, nullptr, &density);
    EXPECT_NEAR(density, wanted, 0.1)
        << "calibrated on the same tokens; what layers do to later ones moves it a little";

    ThreadTeam team(2);
    const auto cpu = cpu::make_device(team);
    engine::EngineOptions options;
    options.sparsity = engine::Sparsity::exact;
    options.layer_thresholds = thresholds;
    model::Model sparse_model = model::Model::load(path);
    engine::Engine engine(sparse_model, *cpu, options);
    engine::Sequence sequence = engine.sequence();
    std::span<const float> sparse;
    for (const int32_t& id : text) sparse = engine.eval(sequence, {&id, 1});
    EXPECT_NEAR(engine.density().density(), density, 0.01);

    // Rounding differs, and a neuron at its threshold may fall either way: f16 cache; with quantised weights the noise
    // of 8-bit activations, 0.0135 of the rms in the products of a layer (a step is 1/127 of a block's largest, over
    // sqrt(12), in four inputs), in both runs. What the thresholds themselves do is several times larger.
    const auto layers = static_cast<double>(n_layer);
    const double noise = (is_quantized(type) ? 0.0135 * std::sqrt(2 * layers) : 0x1p-10 * layers) * test::rms(dense);
    const auto distance = [](std::span<const float> x, std::span<const float> y) {
      std::vector<float> difference(x.begin(), x.end());
      for (size_t i = 0; i < difference.size(); ++i) difference[i] -= y[i];
      return test::rms(difference);
    };
    EXPECT_LT(distance(sparse, masked), 2.5 * noise) << traits(type).name;
    EXPECT_GT(distance(dense, masked), 2 * distance(sparse, masked)) << "the thresholds do nothing";
  }
}

std::vector<test::ZooModel> gated() {
  std::vector<test::ZooModel> models;
  for (const test::ZooModel& z : test::zoo()) {
    for (const char* name : {"silu", "relu_gqa", "qwen2", "bamboo", "opt"}) {
      if (z.name.find(name) != std::string::npos) models.push_back(z);
    }
  }
  return models;
}
INSTANTIATE_TEST_SUITE_P(Zoo, ThresholdCases, testing::ValuesIn(gated()), [](const auto& p) { return p.param.name; });

// --- the whole ---

class Tune : public testing::Test {
 protected:
  struct Run {
    std::optional<TuneResult> result;
    std::string record;
    int64_t windows = 0;
  };
  // A tiny model of this activation tuned on random text; stops after `stop_after` windows when that is not negative.
  Run run(const TuneGoal& goal, const std::string& activation = "relu", const std::string& state = "state",
          int64_t stop_after = -1) {
    const auto path = dir_ / (activation + ".gguf");
    if (!std::filesystem::exists(path)) test::write_tiny_model(path, {.activation = activation, .n_layer = 3});
    model::Model m = model::Model::load(path);
    ThreadTeam team(2);
    const auto cpu = cpu::make_device(team);
    std::mt19937 rng(4);
    const auto part = [&](size_t n) {
      TextPart p;
      for (size_t i = 0; i < n; ++i) p.ids.push_back(static_cast<int32_t>(test::random_int(rng, 0, 255)));
      p.windows = make_windows(static_cast<int64_t>(n), 32, 32, false);
      return p;
    };
    const TextPart fit = part(129), validation = part(129);
    TuneRequest request;
    request.goal = goal;
    request.window = 32;
    request.state = dir_ / state;
    request.key = activation;
    Run r;
    r.result = tune(m, *cpu, team, fit, validation, request, shape_of(m),
                    [&](const TuneProgress&) { return ++r.windows != stop_after; });
    if (r.result) r.record = tune_record(*r.result, request, {}).dump();
    return r;
  }
  static double upper_increase(const Measurement& m) {
    return m.comparison.perplexity_increase() + 1.645 * m.comparison.perplexity_increase_error();
  }
  test::TempDir dir_;
};

TEST_F(Tune, KeepsWithinTheBoundOnTextItDidNotTuneOn) {
  for (const char* activation : {"relu", "silu"}) {
    for (const double bound : {0.002, 0.02, 0.2}) {
      const Run r = run({.max_ppl_increase = bound}, activation, std::string("state-") + activation);
      ASSERT_TRUE(r.result);
      EXPECT_LE(upper_increase(r.result->chosen.validation), bound) << activation;
      EXPECT_EQ(r.result->chosen.validation.comparison.n(), 128);
    }
    const Run r = run({.max_kl = 0.01}, activation, std::string("state-") + activation);
    EXPECT_LE(r.result->chosen.validation.comparison.kl.mean(), 0.01);
    EXPECT_GT(r.result->chosen.planned_tps, r.result->global.front().planned_tps)
        << "a loss was allowed, nothing was won";
  }
}

TEST_F(Tune, CurvesBeginDenseAndOnlyGetFaster) {
  const Run r = run({});
  ASSERT_TRUE(r.result);
  for (const auto* settings : {&r.result->global, &r.result->layered}) {
    EXPECT_EQ(settings->front().validation.comparison.kl.mean(), 0.0);
    EXPECT_EQ(settings->front().validation.comparison.agreement.mean(), 1.0);
    for (size_t i = 1; i < settings->size(); ++i) {
      EXPECT_GE((*settings)[i].planned_tps, (*settings)[i - 1].planned_tps);
      EXPECT_LE((*settings)[i].validation.density(), (*settings)[i - 1].validation.density());
      EXPECT_GT((*settings)[i].validation.comparison.kl.mean(), 0.0);
    }
  }
}

TEST_F(Tune, IsDeterministicAndGoesOnAfterAnInterruption) {
  const Run whole = run({.max_kl = 0.01}, "silu", "whole");
  const Run again = run({.max_kl = 0.01}, "silu", "again");
  EXPECT_EQ(whole.record, again.record);
  for (const int64_t stop : {int64_t{3}, int64_t{30}, whole.windows - 2}) {
    const std::string state = "stopped-" + std::to_string(stop);
    EXPECT_FALSE(run({.max_kl = 0.01}, "silu", state, stop).result);
    EXPECT_TRUE(std::filesystem::exists(dir_ / state));
    EXPECT_EQ(run({.max_kl = 0.01}, "silu", state).record, whole.record) << stop;
  }
}

TEST_F(Tune, AStateOfOtherTextsIsNotUsedAndOtherFilesAreNotOverwritten) {
  run({.max_kl = 0.01}, "relu", "shared");
  run({.max_kl = 0.01}, "silu", "shared");  // another key
  EXPECT_EQ(run({.max_kl = 0.01}, "silu", "shared").record, run({.max_kl = 0.01}, "silu", "own").record);
  std::ofstream(dir_ / "letter") << "Dear reader";
  EXPECT_THROW(run({}, "relu", "letter"), Error);
}

TEST_F(Tune, ReachesASpeedOrSaysHowFarItGets) {
  const Run dense = run({});
  const double slow = dense.result->layered.front().planned_tps, fast = dense.result->layered.back().planned_tps;
  const double wanted = (slow + fast) / 2;
  const Run r = run({.target_tps = wanted});
  EXPECT_GE(r.result->chosen.planned_tps, wanted);
  EXPECT_LT(r.result->chosen.planned_tps, fast);
  EXPECT_THROW(run({.target_tps = 10 * fast}), Error);
}

TEST_F(Tune, CalibratesEveryLayerToADensity) {
  const Run r = run({.density = 0.4}, "silu");
  EXPECT_NEAR(r.result->chosen.validation.density(), 0.4, 0.05);
  for (const float t : r.result->chosen.thresholds) EXPECT_GT(t, 0.0f);
}

TEST_F(Tune, RefusesGoalsThatMakeNoSense) {
  EXPECT_THROW(run({.max_kl = 0.1, .target_tps = 5}), Error);
  EXPECT_THROW(run({.max_kl = -1}), Error);
  EXPECT_THROW(run({.density = 1.5}), Error);
  EXPECT_THROW(run({.max_ppl_increase = NAN}), Error);
}

TEST(SplitText, KeepsDocumentsWhole) {
  const SplitText s = split_text("a<|endoftext|>b<|endoftext|>c<|endoftext|>d");
  EXPECT_EQ(s.fit, "a<|endoftext|>b<|endoftext|>d");
  EXPECT_EQ(s.validation, "c");
  const SplitText one = split_text("one two three four five six");
  EXPECT_EQ(one.fit + one.validation, "one two three four five six");
  EXPECT_FALSE(one.validation.empty());
  EXPECT_THROW(split_text("x"), Error);
}

}  // namespace
}  // namespace hearth::offline
