// Mixtures of experts: synthetic ones, and experts as what a plan places.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/model.h"
#include "offline/synth.h"
#include "offline/synth_vocab.h"
#include "plan_cases.h"
#include "support/paths.h"

namespace hearth::offline {
namespace {

SynthOptions small_mixture(double skew) {
  SynthOptions o;
  o.shape = {"small", "qwen3moe", 2, 64, 32, 4, 2, 700, 64, 1e4f, 32, 16, 4};
  o.type = DType::f32, o.dense = true, o.activation = "silu", o.expert_skew = skew;
  return o;
}

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Counts how often each expert of all layers is chosen.
class CountsExperts final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
    ForwardingDevice::route(router, in, T, choice);
    auto& counts = layers.emplace_back(static_cast<size_t>(router.routing.n_expert));
    for (int64_t i = 0; i < T * choice.n_named; ++i) ++counts[static_cast<size_t>(choice.ids[i])];
  }
  std::vector<std::vector<int>> layers;
};

// The share of the choices that goes to the most popular quarter of the experts, over random words.
double top_quarter(const std::filesystem::path& path) {
  auto model = model::Model::load(path);
  const auto oracle = cpu::make_reference_device();
  CountsExperts device(*oracle);
  engine::Engine e(model, device, {.n_ctx = 512});
  engine::Sequence text = e.sequence();
  e.eval(text, synthetic_text(700, 300, 64, 5));
  double share = 0;
  for (std::vector<int>& counts : device.layers) {
    std::sort(counts.rbegin(), counts.rend());
    double top = 0, all = 0;
    for (size_t i = 0; i < counts.size(); ++i) all += counts[i], top += i < counts.size() / 4 ? counts[i] : 0;
    share += top / all / static_cast<double>(device.layers.size());
  }
  return share;
}

TEST(SynthMixture, HoldsTheExpertsThatWereAskedFor) {
  const test::TempDir dir;
  ThreadTeam one(1), two(2);
  write_synthetic(dir / "a.gguf", small_mixture(0.5), one);
  write_synthetic(dir / "b.gguf", small_mixture(0.5), two);
  EXPECT_EQ(bytes_of(dir / "a.gguf"), bytes_of(dir / "b.gguf"));
  const auto m = model::Model::load(dir / "a.gguf");
  EXPECT_EQ(m.config().experts.routing.n_expert, 16);
  EXPECT_EQ(m.config().experts.routing.n_used, 4);
  EXPECT_EQ(m.config().experts.n_ff, 32);
  EXPECT_EQ(m.config().head_dim, 32);
  EXPECT_EQ(m.weights().layers[1].experts.size(), 16u);
}

// Files of today's architectures run, with what makes them differ.
TEST(SynthMixture, GptOssAndSmallThinker) {
  const test::TempDir dir;
  ThreadTeam team(2);
  for (const char* arch : {"gpt-oss", "smallthinker"}) {
    SynthOptions o = small_mixture(0.5);
    o.shape.arch = arch, o.shape.window = 8, o.activation = o.shape.default_activation();
    check_synth_options(o);
    write_synthetic(dir / "m.gguf", o, team);
    auto m = model::Model::load(dir / "m.gguf");
    EXPECT_EQ(m.config().ffn.activation, o.activation);
    EXPECT_EQ(m.config().layer(o.shape.gpt_oss() ? 0 : 1).window, 8);
    EXPECT_EQ(m.config().layer(o.shape.gpt_oss() ? 1 : 0).window, 0);
    EXPECT_EQ(static_cast<bool>(m.weights().layers[0].sinks), o.shape.gpt_oss());
    EXPECT_EQ(static_cast<bool>(m.weights().layers[0].experts[3].down_bias), o.shape.gpt_oss());
    const auto oracle = cpu::make_reference_device();
    engine::Engine e(m, *oracle, {.n_ctx = 64});
    engine::Sequence text = e.sequence();
    for (const float x : e.eval(text, synthetic_text(700, 20, 64, 5))) ASSERT_TRUE(std::isfinite(x));
    o.activation = "silu";
    EXPECT_THROW(check_synth_options(o), Error);
  }
}

TEST(SynthMixture, SkewMakesSomeExpertsPopular) {
  const test::TempDir dir;
  ThreadTeam team(2);
  write_synthetic(dir / "even.gguf", small_mixture(0), team);
  write_synthetic(dir / "skewed.gguf", small_mixture(2), team);
  const double even = top_quarter(dir / "even.gguf"), skewed = top_quarter(dir / "skewed.gguf");
  EXPECT_LT(even, 0.5);
  EXPECT_GT(skewed, 0.6);
}

TEST(SynthMixture, ContradictingOptionsAreRefused) {
  SynthOptions o = small_mixture(0.5);
  o.dense = false;
  EXPECT_THROW(check_synth_options(o), Error);
  o = small_mixture(0.5), o.shape.n_expert_used = 17;
  EXPECT_THROW(check_synth_options(o), Error);
  o = small_mixture(0.5), o.shape.arch = "opt";
  EXPECT_THROW(check_synth_options(o), Error);
}

// Four layers of 64 experts of 4 MB, of which 8 are used.
ModelShape mixture_shape() {
  ModelShape s = test::llama_7b();
  s.layers.resize(4);
  s.config.n_layer = 4;
  for (LayerShape& l : s.layers) {
    l.experts = l.gpu_experts = true, l.n_ff = 64, l.n_used = 8;
    l.gate_bytes = 0, l.up_down_bytes = 4 << 20, l.expert_bytes = 64ull * (4 << 20);
  }
  return s;
}

TEST(PlanMixture, LeavesExpertsToTheCpuWhereTheGpuHasNoKernels) {
  ModelShape shape = mixture_shape();
  for (LayerShape& l : shape.layers) l.gpu_experts = false;
  const Planner planner(shape, uniform_frequencies(shape, 1), {.vram_budget = 6ull << 30});
  const Plan plan = planner.plan();
  EXPECT_TRUE(plan.placement.uses_gpu());
  EXPECT_EQ(planner.stream_tokens(), 0);
  for (const engine::LayerPlacement& l : plan.placement.layers) {
    EXPECT_EQ(l.attention, engine::Where::gpu);
    EXPECT_TRUE(l.gpu_experts.empty() && l.gpu_bucket.empty());
    EXPECT_EQ(l.selection, engine::Selection::all);
  }
  // What is read of experts is what tokens use.
  EXPECT_NEAR(plan.traffic.cpu_sparse, 4.0 * 8 * (4 << 20), 1.0);
}

TEST(PlanMixture, PlacesWholeExpertsWithinTheBudget) {
  const PlanRequest request{.vram_budget = 2ull << 30};
  const Planner planner(mixture_shape(), uniform_frequencies(mixture_shape(), 1), request);
  const Plan plan = planner.plan();
  int64_t hot = 0;
  for (const engine::LayerPlacement& l : plan.placement.layers) {
    hot += std::ssize(l.gpu_experts);
    EXPECT_TRUE(std::is_sorted(l.gpu_experts.begin(), l.gpu_experts.end()));
    EXPECT_TRUE(l.gpu_bucket.empty());
  }
  EXPECT_GT(hot, 0);
  EXPECT_LE(plan.gpu.total(), request.vram_budget);
  EXPECT_NEAR(plan.hit_rate, static_cast<double>(hot) / 256, 1e-9);
}

}  // namespace
}  // namespace hearth::offline
