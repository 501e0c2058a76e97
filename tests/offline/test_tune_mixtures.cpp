// Thresholds inside experts: a batch under them computes what a sparse decode does, what is counted, how they are
// chosen, and what plans make of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "cpu/cpu.h"
#include "offline/plan/explain.h"
#include "offline/tune/expert_gates.h"
#include "offline/tune/record.h"
#include "offline/tune/tune.h"
#include "support/conditioning.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"
#include "support/tiny_model.h"
#include "support/zoo.h"

namespace hearth::offline {
namespace {

struct Case {
  std::string name;
  std::optional<test::ZooModel> zoo;
  test::TinyMixtureOptions tiny = {};
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};
std::vector<Case> cases() {
  std::vector<Case> all = {
      {"tiny", std::nullopt, {.transposed_down = true}},
      {"tiny_shared", std::nullopt, {.arch = "qwen2moe", .n_ff_shared = 96, .transposed_down = true}},
      {"tiny_dense_layer", std::nullopt, {.n_ff_shared = 32, .n_dense_layers = 1, .transposed_down = true}},
      {"tiny_q8_0",
       std::nullopt,
       {.arch = "qwen2moe",
        .type = DType::q8_0,
        .n_expert = 4,
        .n_used = 4,
        .n_ff_shared = 32,
        .transposed_down = true}},
  };
  for (const test::ZooModel& m : test::mixtures()) all.push_back({m.name, m});
  return all;
}

std::vector<int32_t> random_ids(const model::Config& c, size_t n) {
  std::mt19937 rng(3);
  std::vector<int32_t> out(n);
  for (int32_t& id : out) id = static_cast<int32_t>(test::random_int(rng, 0, c.n_vocab - 1));
  return out;
}

class ExpertThresholds : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    if (c.zoo && !std::filesystem::exists(c.zoo->directory)) GTEST_SKIP() << "needs " << c.zoo->directory;
    path_ = c.zoo ? test::gguf_of(*c.zoo, DType::f32) : test::write_tiny_mixture(dir_ / "m.gguf", c.tiny);
  }
  model::Model load() const {
    model::Model m = model::Model::load(path_, {.activation = {}, .transpose_down = {.wanted = true}});
    EXPECT_FALSE(m.prepare_sparse(true));
    return m;
  }
  struct Batch {
    std::vector<float> logits;  // of the last id
    double density = 0;
    std::vector<MagnitudeHistogram> histograms;
  };
  // All ids in one batch.
  static Batch batched(model::Model& m, const Thresholds& thresholds, std::span<const int32_t> text) {
    ThreadTeam team(2);
    const auto cpu = cpu::make_device(team);
    ThresholdDevice device(*cpu, team, m);
    engine::Engine engine(m, device, {.sparsity = engine::Sparsity::off});
    Batch b;
    b.histograms.resize(m.weights().layers.size());
    device.set_thresholds(thresholds, !thresholds.empty());
    device.observe(&b.histograms);
    engine::Sequence sequence = engine.sequence();
    const auto logits = engine.eval(sequence, text);
    b.logits.assign(logits.begin(), logits.end()), b.density = device.density();
    return b;
  }
  test::TempDir dir_;
  std::filesystem::path path_;
};

TEST_P(ExpertThresholds, ThresholdZeroIsDenseToTheBit) {
  model::Model m = load();
  const auto text = random_ids(m.config(), 23);
  const Thresholds zero(static_cast<size_t>(m.config().n_layer), 0.0f);
  EXPECT_EQ(batched(m, zero, text).logits, batched(m, {}, text).logits);
}

// The real thing: token by token through the engine's sparse decode, a threshold for each layer.
TEST_P(ExpertThresholds, ABatchComputesWhatSparseDecodeDoes) {
  model::Model m = load();
  const auto text = random_ids(m.config(), 17);
  const Batch dense = batched(m, {}, text);
  Thresholds thresholds;
  for (size_t l = 0; l < dense.histograms.size(); ++l)
    thresholds.push_back(dense.histograms[l].threshold_for(l % 2 == 0 ? 0.5 : 0.7));
  const Batch masked = batched(m, thresholds, text);
  EXPECT_NEAR(masked.density, 0.6, 0.15);

  const test::Script script{text, std::vector<int64_t>(text.size(), 1)};
  ThreadTeam team(2);
  const auto cpu = cpu::make_device(team);
  engine::EngineOptions options{.sparsity = engine::Sparsity::exact};
  options.layer_thresholds = thresholds;
  engine::Engine engine(m, *cpu, options);
  const std::vector<float> sparse = test::run(engine, script).back();
  EXPECT_NEAR(engine.density().density(), masked.density, 0.02);

  // Two ways to compute the same model, as in Tune's of dense models: the f16 cache, and with quantised weights 8-bit
  // activations; neurons at their threshold may fall either way.
  const bool quantized = m.quantized();
  const auto layers = static_cast<double>(m.config().n_layer);
  const double noise = (quantized ? 0.0135 * std::sqrt(2 * layers) : 0x1p-10 * layers) * test::rms(dense.logits);
  const auto distance = [](std::span<const float> x, std::span<const float> y) {
    double squares = 0;
    for (size_t i = 0; i < x.size(); ++i) squares += std::pow(x[i] - y[i], 2);
    return std::sqrt(squares / static_cast<double>(x.size()));
  };
  EXPECT_LT(distance(sparse, masked.logits), 2.5 * noise);
  EXPECT_GT(distance(dense.logits, masked.logits), 2 * distance(sparse, masked.logits)) << "the thresholds do nothing";
}

INSTANTIATE_TEST_SUITE_P(Mixtures, ExpertThresholds, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.name; });

// --- what is counted ---

// Keeps what the last layer's experts were given, on the host.
class Watches final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override {
    EXPECT_FALSE(in.normed());
    const int64_t n_embd = set.experts[0].ffn.gate.cols;
    input.assign(in.act.x, in.act.x + T * n_embd);
    ids.assign(choice.ids, choice.ids + T * choice.n_named);
    weights.assign(choice.weights, choice.weights + T * choice.n_named);
    ForwardingDevice::ffn_experts(set, choice, in, T, y);
  }
  std::vector<float> input, weights;
  std::vector<int32_t> ids;
};

TEST(ExpertCounts, AreTheNeuronsOfTheChosenExperts) {
  const test::TempDir dir;
  model::Model m = model::Model::load(test::write_tiny_mixture(
      dir / "m.gguf", {.arch = "qwen2moe", .n_layer = 1, .n_ff_shared = 48, .transposed_down = true}));
  ThreadTeam team(2);
  const auto cpu = cpu::make_device(team);
  Watches watches(*cpu);
  ThresholdDevice device(watches, team, m);
  engine::Engine engine(m, device, {.sparsity = engine::Sparsity::off});
  const std::vector<float> thresholds = {0.0f, 0.05f, 0.2f, 10.0f};
  ASSERT_EQ(device.n_neurons(0), 2 * 32 + 48);
  std::vector<ThresholdCounts> counts;
  counts.emplace_back(thresholds, device.n_neurons(0), 6);
  device.observe(&counts);
  engine::Sequence sequence = engine.sequence();
  const auto text = random_ids(m.config(), 21);
  engine.eval(sequence, text);

  std::vector<uint64_t> chosen(6), above(thresholds.size());
  std::vector<double> energy(thresholds.size());
  const std::vector<Expert>& experts = m.weights().layers[0].experts;
  const auto dot = [](const Matrix& w, int64_t k, const float* x) {
    double sum = 0;
    for (int64_t c = 0; c < w.cols; ++c) sum += static_cast<double>(reinterpret_cast<const float*>(w.row(k))[c]) * x[c];
    return sum;
  };
  for (size_t i = 0; i < watches.ids.size(); ++i) {
    const auto id = static_cast<size_t>(watches.ids[i]);
    if (id < 6) ++chosen[id];
    const FfnShard& f = experts[id].ffn;
    const float* const x = watches.input.data() + static_cast<int64_t>(i / 3) * f.gate.cols;
    for (int64_t k = 0; k < f.n(); ++k) {
      const double z = dot(f.gate, k, x), g = z / (1 + std::exp(-z));
      const auto* const down = reinterpret_cast<const float*>(f.down_t.row(k));
      const double contribution = g * dot(f.up, k, x) * static_cast<double>(watches.weights[i]);
      for (size_t t = 0; t < thresholds.size(); ++t) {
        const bool out = std::fabs(g) <= static_cast<double>(thresholds[t]);
        above[t] += out ? 0 : 1;
        if (out) energy[t] += contribution * contribution * dot(f.down_t, k, down);
      }
    }
  }
  EXPECT_EQ(counts[0].tokens(), 21u);
  for (size_t t = 0; t < thresholds.size(); ++t) {
    EXPECT_EQ(counts[0].active(t), chosen);
    EXPECT_NEAR(counts[0].density(t), static_cast<double>(above[t]) / (21.0 * 112), 1e-3);
    EXPECT_NEAR(counts[0].dropped_energy(t), energy[t] / 21, 1e-3 * energy.back() / 21);
  }
  EXPECT_GT(energy[2], 0.001 * energy.back());
  EXPECT_EQ(counts[0].density(3), 0.0);
}

// --- the whole ---

class TuneMixture : public testing::Test {
 protected:
  static test::TinyMixtureOptions options() {
    return {.arch = "qwen2moe", .n_ff = 64, .n_expert = 8, .n_ff_shared = 64, .transposed_down = true};
  }
  void SetUp() override { test::write_tiny_mixture(dir_ / "m.gguf", options()); }
  struct Run {
    std::optional<TuneResult> result;
    std::string record;
    int64_t windows = 0;
  };
  Run run(const TuneGoal& goal, const std::string& state = "state", int64_t stop_after = -1, uint64_t budget = 0) {
    model::Model m = model::Model::load(dir_ / "m.gguf");
    ThreadTeam team(2);
    const auto cpu = cpu::make_device(team);
    std::mt19937 rng(4);
    const auto part = [&] {
      TextPart p;
      for (size_t i = 0; i < 129; ++i) p.ids.push_back(static_cast<int32_t>(test::random_int(rng, 0, 63)));
      p.windows = make_windows(129, 32, 32, false);
      return p;
    };
    const TextPart fit = part(), validation = part();
    TuneRequest request;
    request.goal = goal, request.window = 32, request.state = dir_ / state, request.key = "key";
    request.plan.vram_budget = budget;
    Run r;
    r.result = tune(m, *cpu, team, fit, validation, request, shape_of(m),
                    [&](const TuneProgress&) { return ++r.windows != stop_after; });
    if (r.result) r.record = tune_record(*r.result, request, {}).dump();
    return r;
  }
  test::TempDir dir_;
};

TEST_F(TuneMixture, CurvesBeginDenseAndDensityFallsAsLossRises) {
  const Run r = run({});
  ASSERT_TRUE(r.result);
  for (const auto* settings : {&r.result->global, &r.result->layered}) {
    ASSERT_GT(settings->size(), 4u);
    EXPECT_EQ(settings->front().validation.comparison.kl.mean(), 0.0);
    EXPECT_NEAR(settings->front().validation.density(), 1.0, 1e-3);
    for (size_t i = 1; i < settings->size(); ++i) {
      // Rows that are read singly are read slower: of almost all neurons they are no gain.
      if (i > 1) {
        EXPECT_GE((*settings)[i].planned_tps, (*settings)[i - 1].planned_tps);
      }
      EXPECT_LT((*settings)[i].validation.density(), (*settings)[i - 1].validation.density());
      EXPECT_GT((*settings)[i].validation.comparison.kl.mean(), 0.0);
    }
    EXPECT_LT(settings->back().validation.density(), 0.35);
    EXPECT_GT(settings->back().planned_tps, 1.03 * settings->front().planned_tps);
    EXPECT_GT(settings->back().validation.comparison.kl.mean(), 4 * (*settings)[2].validation.comparison.kl.mean());
  }
}

TEST_F(TuneMixture, KeepsWithinTheBoundAndGoesOnAfterAnInterruption) {
  const TuneGoal goal{.max_kl = 0.01};
  const Run whole = run(goal, "whole");
  ASSERT_TRUE(whole.result);
  EXPECT_LE(whole.result->chosen.validation.comparison.kl.mean(), 0.01);
  EXPECT_GT(whole.result->chosen.planned_tps, whole.result->global.front().planned_tps);
  EXPECT_EQ(run(goal, "again").record, whole.record);
  for (const int64_t stop : {int64_t{3}, int64_t{30}}) {
    const std::string state = "stopped-" + std::to_string(stop);
    EXPECT_FALSE(run(goal, state, stop).result);
    EXPECT_EQ(run(goal, state).record, whole.record) << stop;
  }
}

// From the run to the sidecar, and from there to plans.
TEST_F(TuneMixture, WhatWasCountedIsPlannedWith) {
  const Run r = run({.density = 0.4});
  ASSERT_TRUE(r.result);
  EXPECT_NEAR(r.result->chosen.validation.density(), 0.4, 0.06);
  const model::Model m = model::Model::load(dir_ / "m.gguf");
  auto sidecar = model::Sidecar::empty_for(m.file(), m.config());
  sidecar.thresholds = model::TunedThresholds{r.result->chosen.thresholds, r.record, r.result->chosen_active,
                                              r.result->counted_tokens, r.result->chosen_inside};
  sidecar.write(dir_ / "m.sparse.gguf");
  const model::Sidecar read = *model::Sidecar::find(m.file(), m.config());
  ASSERT_TRUE(read.thresholds);
  const std::vector<float> thresholds = read.thresholds->by_layer;
  EXPECT_EQ(thresholds, r.result->chosen.thresholds);

  ModelShape shape = shape_of(m);
  set_active_inside(shape, read, thresholds);
  const Frequencies f = frequencies_of(shape, &read, thresholds);
  for (size_t l = 0; l < 3; ++l) {
    EXPECT_NEAR(shape.layers[l].active_inside, 0.4, 0.03);
    EXPECT_EQ(shape.layers[l].active_inside, *r.result->chosen_inside[l].mean());
    ASSERT_EQ(f.p[l].size(), 9u);
    EXPECT_EQ(f.p[l].back(), 1.0) << "the shared expert";
    EXPECT_NEAR(std::accumulate(f.p[l].begin(), f.p[l].end(), 0.0), 3.0, 1e-9);
  }
  EXPECT_NE(f.source.find("hearth tune"), std::string::npos) << f.source;
  const auto tps = [&](std::span<const float> asked) {
    ModelShape s = shape_of(m);
    set_active_inside(s, read, asked);
    return Planner(s, frequencies_of(s, &read, asked), {}).plan().tokens_per_second();
  };
  EXPECT_GT(tps(thresholds), 1.02 * tps({}));  // most of so small a model's time is that of its layers
  EXPECT_EQ(tps(std::vector<float>(3, 0.0f)), tps({}));

  const Planner planner(shape, f, {.vram_budget = uint64_t{1} << 30});
  const Plan plan = planner.plan();
  const std::string table = plan_table(planner, plan, explain(planner, plan));
  EXPECT_NE(table.find("inside experts: "), std::string::npos) << table;
}

TEST_F(TuneMixture, OneThresholdIsPlannedByTheCurve) {
  const Run r = run({});
  const model::Model m = model::Model::load(dir_ / "m.gguf");
  auto sidecar = model::Sidecar::empty_for(m.file(), m.config());
  sidecar.thresholds = model::TunedThresholds{r.result->chosen.thresholds, r.record, r.result->chosen_active,
                                              r.result->counted_tokens, r.result->chosen_inside};
  const CurveSetting& point = r.result->global[5];
  ModelShape shape = shape_of(m);
  set_active_inside(shape, sidecar, std::vector<float>(3, *point.global));
  for (const LayerShape& l : shape.layers) EXPECT_NEAR(l.active_inside, point.validation.density(), 1e-3);
  set_active_inside(shape, sidecar);
  for (const LayerShape& l : shape.layers) EXPECT_EQ(l.active_inside, 1.0);
}

TEST_F(TuneMixture, ExpertsThatAreNotTransposedAreRefused) {
  test::TinyMixtureOptions o = options();
  o.transposed_down = false;
  test::write_tiny_mixture(dir_ / "m.gguf", o);
  const std::string error = test::message_of([&] { (void)run({}); });
  EXPECT_NE(error.find("no neuron of the experts of '"), std::string::npos) << error;
  EXPECT_NE(error.find("--transpose-down"), std::string::npos) << error;
}

}  // namespace
}  // namespace hearth::offline
