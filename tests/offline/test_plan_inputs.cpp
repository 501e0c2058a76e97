// What a plan is made from beside the model: thresholds that leave fewer neurons active, and PowerInfer's own choice of
// hot neurons.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "core/error.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "offline/plan/explain.h"
#include "offline/plan/planner.h"
#include "plan_cases.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

using engine::Selection;
using test::message_of;

constexpr uint64_t kGiB = uint64_t{1} << 30;

// --- thresholds ---

class TunedFrequencies : public testing::Test {
 protected:
  TunedFrequencies() {
    for (LayerShape& l : shape_.layers) l.n_ff = 4;
    sidecar_.statistics.source = "test", sidecar_.statistics.tokens = 100;
    sidecar_.statistics.layers.resize(shape_.layers.size());
    for (model::LayerStatistics& l : sidecar_.statistics.layers) l.active = {80, 40, 20, 10};
    sidecar_.thresholds = model::TunedThresholds{thresholds(0.1f, 0.3f), record(), {}, 50};
    for (size_t l = 0; l < shape_.layers.size(); ++l) sidecar_.thresholds->active.push_back({l, 10, 5, 0});
  }
  std::vector<float> thresholds(float first, float others) const {
    std::vector<float> t(shape_.layers.size(), others);
    t.front() = first;
    return t;
  }
  // A density of 0.4 without a threshold, 0.2 at 0.5, 0.05 at 1.
  static std::string record() {
    nlohmann::json curve = nlohmann::json::array();
    for (const auto& [threshold, density] : {std::pair(0.0, 0.4), std::pair(0.5, 0.2), std::pair(1.0, 0.05)}) {
      curve.push_back({{"threshold", threshold}, {"validation", {{"density", density}}}});
    }
    return nlohmann::json({{"global", curve}}).dump();
  }
  Frequencies at(float all) const { return frequencies_of(shape_, &sidecar_, thresholds(all, all)); }

  ModelShape shape_ = test::llama_7b();
  model::Sidecar sidecar_;
};

TEST_F(TunedFrequencies, AreThoseCountedUnderTheVeryThresholds) {
  const Frequencies f = frequencies_of(shape_, &sidecar_, thresholds(0.1f, 0.3f));
  EXPECT_EQ(f.p[7], (std::vector<double>{7 / 50.0, 0.2, 0.1, 0}));
  EXPECT_NE(f.source.find("hearth tune"), std::string::npos) << f.source;
}

TEST_F(TunedFrequencies, AreScaledAlongTheCurveForAnotherThreshold) {
  const auto share = [&](float t) { return at(t).p[3][0] / 0.8; };
  EXPECT_DOUBLE_EQ(share(0.0f), 1.0);
  EXPECT_DOUBLE_EQ(share(0.5f), 0.5);
  EXPECT_DOUBLE_EQ(share(0.25f), 0.75);
  EXPECT_DOUBLE_EQ(share(0.75f), 0.3125);
  EXPECT_DOUBLE_EQ(share(9.0f), 0.125) << "beyond the curve its end, which is too much and never too little";
  EXPECT_NE(at(0.5f).source.find("50 %"), std::string::npos) << at(0.5f).source;
  sidecar_.thresholds->record = "{}";
  EXPECT_NE(message_of([&] { at(0.5f); }).find("hearth tune"), std::string::npos);
}

TEST_F(TunedFrequencies, StayTheProfilesWhereNothingElseIsKnown) {
  const Frequencies other = frequencies_of(shape_, &sidecar_, thresholds(0.2f, 0.3f));
  EXPECT_EQ(other.p[0], (std::vector<double>{0.8, 0.4, 0.2, 0.1}));
  EXPECT_NE(other.source.find("not under these thresholds"), std::string::npos) << other.source;
  sidecar_.thresholds.reset();
  EXPECT_NE(at(0.5f).source.find("not under these thresholds"), std::string::npos);
  sidecar_.statistics.threshold = 0.5f;  // profiled with this one
  EXPECT_EQ(at(0.5f).source.find("not under"), std::string::npos);
}

// Fewer active neurons make a faster plan, and `auto` is sparse for a family that is dense without thresholds.
TEST(ThresholdPlans, AreFasterAndSparseForEveryFamily) {
  ModelShape shape = test::llama_7b();
  shape.sparse_family = false;
  PlanRequest request;
  request.vram_budget = 8 * kGiB;
  const Plan dense = Planner(shape, uniform_frequencies(shape, 1.0), request).plan();
  EXPECT_EQ(dense.layers[5].choice.selection, Selection::all);
  request.thresholds = true;
  double before = dense.tokens_per_second();
  for (const double density : {0.5, 0.2, 0.1}) {
    const Plan plan = Planner(shape, typical_frequencies(shape, density), request).plan();
    EXPECT_EQ(plan.layers[5].choice.selection, Selection::gate);
    // From a fifth on the gate rows that the CPU reads are what a token waits for.
    EXPECT_GT(plan.tokens_per_second(), (density > 0.1 ? 1.1 : 0.99) * before) << density;
    before = plan.tokens_per_second();
  }
}

// --- PowerInfer's hot neurons ---

// Every third neuron of even layers, none of odd ones but the last, which has all.
std::vector<std::vector<int32_t>> buckets(const ModelShape& shape) {
  std::vector<std::vector<int32_t>> all;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    std::vector<int32_t>& b = all.emplace_back();
    const bool last = l + 1 == shape.layers.size();
    for (int32_t i = 0; i < shape.layers[l].n_ff && (l % 2 == 0 || last); i += last ? 1 : 3) b.push_back(i);
  }
  return all;
}

TEST(PrescribedNeurons, AreOnTheGpuAndNoOthers) {
  ModelShape shape = test::llama_7b();
  PlanRequest request;
  request.gpu_buckets = buckets(shape);
  for (const bool predictor : {false, true}) {
    for (LayerShape& l : shape.layers) l.predictor_bytes = predictor ? 31'000'000 : 0;
    const Planner planner(shape, typical_frequencies(shape, 0.11), request);
    const Planner free(shape, typical_frequencies(shape, 0.11), PlanRequest{});
    for (const uint64_t budget : {planner.smallest_budget(), 6 * kGiB, 8 * kGiB, planner.largest_useful_budget()}) {
      SCOPED_TRACE(fmt::format("{} of {}", budget, predictor ? "predictors" : "gates"));
      const Plan plan = planner.plan(budget);
      double hot = 0, all = 0;
      for (size_t l = 0; l < shape.layers.size(); ++l) {
        EXPECT_EQ(plan.placement.layers[l].gpu_bucket, request.gpu_buckets[l]);
        for (const double p : planner.frequencies().p[l]) all += p;
        for (const int32_t id : request.gpu_buckets[l]) hot += planner.frequencies().p[l][static_cast<size_t>(id)];
      }
      EXPECT_NEAR(plan.hit_rate, hot / all, 1e-9);
      EXPECT_LE(plan.gpu.total(), budget);
      EXPECT_LE(plan.bound, plan.seconds);
      EXPECT_GE(plan.seconds, free.plan(budget).bound) << "a free choice is at least as good";
      EXPECT_NE(plan_table(planner, plan, explain(planner, plan)).find("those of the GPU index"), std::string::npos);
    }
    const uint64_t least = planner.smallest_budget();
    EXPECT_GT(least, free.smallest_budget() + kGiB);
    EXPECT_NE(message_of([&] { planner.plan(least - 1); }).find("the neurons of the GPU index"), std::string::npos);
    EXPECT_NE(message_of([&] { planner.plan(0); }).find("the budget is 0"), std::string::npos);
  }
}

TEST(PrescribedNeurons, OfALayerThatCannotBeDividedAreAllOrNone) {
  ModelShape shape = test::llama_7b();
  for (LayerShape& l : shape.layers) l.by_neuron = false;
  PlanRequest request;
  request.gpu_buckets.resize(shape.layers.size());
  request.gpu_buckets[3] = {1, 5};
  EXPECT_NE(message_of([&] { Planner(shape, typical_frequencies(shape, 0.11), request); }).find("layer 3"),
            std::string::npos);
  request.gpu_buckets[3].resize(static_cast<size_t>(shape.layers[3].n_ff));
  std::iota(request.gpu_buckets[3].begin(), request.gpu_buckets[3].end(), 0);
  const Plan plan = Planner(shape, typical_frequencies(shape, 0.11), request).plan(8 * kGiB);
  EXPECT_TRUE(plan.placement.layers[3].ffn_on_gpu(shape.layers[3].n_ff));
}

// The plan is loaded and obeyed; the oracle device stands in for the GPU.
TEST(PrescribedNeurons, RunAsTheUndividedModelDoes) {
  const test::TempDir dir;
  test::write_tiny_gguf(dir / "m.gguf", {});
  model::Model plain = model::Model::load(dir / "m.gguf"), divided = model::Model::load(dir / "m.gguf");
  PlanRequest request;
  request.n_ctx = 64, request.n_batch = 8;
  request.gpu_buckets = {{0, 7, 8, 95}, {}};
  const ModelShape shape = shape_of(plain);
  const Planner planner(shape, frequencies_of(shape, nullptr), request);
  const engine::Placement placement = planner.plan(planner.largest_useful_budget()).placement;
  EXPECT_EQ(placement.layers[0].gpu_bucket, request.gpu_buckets[0]);
  EXPECT_TRUE(placement.layers[1].gpu_bucket.empty());
  ThreadTeam team(2);
  const auto cpu = cpu::make_device(team), host = cpu::make_device(team), gpu = cpu::make_reference_device();
  engine::EngineOptions options;
  options.n_ctx = 64, options.n_batch = 8;
  engine::Engine whole(plain, *cpu, options);
  engine::Engine both(divided, *gpu, options, engine::Division{*host, placement, team});
  engine::Sequence text = whole.sequence(), other = both.sequence();
  for (const int32_t id : {3, 1, 4, 1, 5}) {
    const auto a = whole.eval(text, {&id, 1}), b = both.eval(other, {&id, 1});
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-3f * (1 + std::fabs(a[i])));
  }
  EXPECT_GT(both.density().host_share(), 0.5);
  EXPECT_LT(both.density().host_share(), 1.0);
}

// How many neurons predictors name: those of the model's file as the profile found, those of the sidecar as measured
// when they were made.
TEST(NamedNeurons, ComeFromTheSidecar) {
  const test::TempDir dir;
  test::write_tiny_gguf(dir / "m.gguf", {.predictor_rank = 8});
  const model::Model m = model::Model::load(dir / "m.gguf");
  model::Sidecar sidecar = model::Sidecar::empty_for(m.file(), m.config());
  sidecar.statistics.layers[0].named = {150, 100};
  ModelShape shape = shape_of(m);
  EXPECT_FALSE(shape.layers[0].named_per_active);
  set_named_per_active(shape, sidecar);
  EXPECT_EQ(shape.layers[0].named_per_active, 1.5);
  EXPECT_FALSE(shape.layers[1].named_per_active);

  std::mt19937 rng(2);
  const int64_t n_embd = m.config().n_embd, n_ff = m.config().n_ff;
  sidecar.new_predictors.resize(2);
  for (model::PredictorData& p : sidecar.new_predictors) {
    const auto fc1 = test::random_normal(rng, static_cast<size_t>(4 * n_embd));
    const auto fc2 = test::random_normal(rng, static_cast<size_t>(n_ff * 4));
    p.method = "svd";
    p.fc1 = model::OwnedMatrix::from(fc1.data(), 4, n_embd, DType::f16);
    p.fc2 = model::OwnedMatrix::from(fc2.data(), n_ff, 4, DType::f16);
    p.threshold.resize(static_cast<size_t>(n_ff));
    p.figures = {0.99f, 0.9f, 0.99f, 0.5f, 0.25f, 0.5f, 100};
  }
  sidecar.write(dir / "m.sparse.gguf");
  set_named_per_active(shape, model::Sidecar::read(dir / "m.sparse.gguf"));
  EXPECT_EQ(shape.layers[0].named_per_active, 2.0);
  EXPECT_EQ(shape.layers[1].named_per_active, 2.0);
}

TEST(NamedNeurons, CostTheCpuTheirGateRows) {
  ModelShape shape = test::llama_7b();
  for (LayerShape& l : shape.layers) l.predictor_bytes = 31 << 20;
  const Frequencies f = typical_frequencies(shape, 0.11);
  const auto speed = [&](std::optional<double> named) {
    for (LayerShape& l : shape.layers) l.named_per_active = named;
    return 1 / Planner(shape, f, {}).plan(6 * kGiB).seconds;
  };
  EXPECT_GT(speed(1.0), 1.02 * speed(1.4));
  EXPECT_GT(speed(1.4), 1.02 * speed(3.0));
  EXPECT_EQ(speed({}), speed(CostModel{}.predicted_per_active));
}

}  // namespace
}  // namespace hearth::offline
