// Mixtures of experts: synthetic ones, and experts as what a plan places.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/model.h"
#include "offline/plan/explain.h"
#include "offline/plan/explain_experts.h"
#include "offline/synth.h"
#include "offline/synth_sparsity.h"
#include "offline/synth_vocab.h"
#include "plan_cases.h"
#include "support/paths.h"

namespace hearth::offline {
namespace {

SynthOptions small_mixture(double skew) {
  SynthOptions o;
  o.shape = {"small", "qwen3moe", 2, 64, 32, 4, 2, 700, 64, 1e4f, 32, 16, 4};
  o.type = DType::f32, o.dense = true, o.activation = "silu", o.expert_skew = skew;
  o.transposed_down = false;
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
    named.emplace_back(choice.ids, choice.ids + T * choice.n_named);
  }
  std::vector<std::vector<int>> layers;
  std::vector<std::vector<int32_t>> named;  // [layer][T * n_named]
};

// The share of the choices that goes to the most popular quarter of the experts, mean over layers.
double top_quarter(CountsExperts& device) {
  double share = 0;
  for (std::vector<int>& counts : device.layers) {
    std::sort(counts.rbegin(), counts.rend());
    double top = 0, all = 0;
    for (size_t i = 0; i < counts.size(); ++i) all += counts[i], top += i < counts.size() / 4 ? counts[i] : 0;
    share += top / all / static_cast<double>(device.layers.size());
  }
  return share;
}

// The share of the choices that goes to the most popular quarter of the experts, over random words.
double top_quarter(const std::filesystem::path& path) {
  auto model = model::Model::load(path);
  const auto oracle = cpu::make_reference_device();
  CountsExperts device(*oracle);
  engine::Engine e(model, device, {.n_ctx = 512});
  engine::Sequence text = e.sequence();
  e.eval(text, synthetic_text(700, 300, 64, 5));
  return top_quarter(device);
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

// Of a smallthinker's chosen experts as many neurons are active as was asked for, in every layer; transposed down
// projections hold the same numbers.
TEST(SynthMixture, DensityInsideExperts) {
  const test::TempDir dir;
  ThreadTeam team(2);
  SynthOptions o = small_mixture(0.5);
  o.shape = {"small", "smallthinker", 4, 256, 128, 4, 2, 700, 256, 1e4f, 64, 16, 4};
  o.dense = false, o.activation = "relu", o.density = 0.35, o.hot_share = 0.5, o.transposed_down = true;
  check_synth_options(o);
  write_synthetic(dir / "t.gguf", o, team);
  o.transposed_down = false;
  write_synthetic(dir / "s.gguf", o, team);
  auto transposed = model::Model::load(dir / "t.gguf");
  auto standard = model::Model::load(dir / "s.gguf", {.activation = {}, .transpose_down = {.wanted = true}});
  ASSERT_FALSE(standard.prepare_sparse().has_value());
  const Matrix &a = transposed.weights().layers[1].experts[3].ffn.down_t,
               &b = standard.weights().layers[1].experts[3].ffn.down_t;
  ASSERT_EQ(a.bytes(), b.bytes());
  EXPECT_EQ(std::memcmp(a.data, b.data, a.bytes()), 0);

  const auto device = cpu::make_device(team);
  engine::Engine e(transposed, *device, {.n_ctx = 256});
  engine::Sequence text = e.sequence();
  for (const int32_t id : synthetic_text(700, 200, 64, 5)) e.eval_greedy(text, id);
  const engine::DensityStats& d = e.density();
  for (size_t l = 0; l < 4; ++l) EXPECT_NEAR(d.active[l] / d.neurons[l], 0.35, 0.06) << "layer " << l;
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

// Of a text that goes through all topics: how many experts 2, 4 and 8 consecutive tokens use together, times those of
// one, and the share of the most popular quarter; means over layers.
struct Persistence {
  std::array<double, 3> together{};
  double top = 0;
};
Persistence persistence_of(double prescribed, ThreadTeam& team) {
  constexpr int64_t kTokens = 64 * 32, kVocab = 3000;
  const test::TempDir dir;
  SynthOptions o = small_mixture(0.8);
  o.shape = {"small", "qwen3moe", 3, 512, 32, 4, 2, kVocab, kTokens, 1e4f, 32, 64, 4};
  o.expert_persistence = prescribed;
  write_synthetic(dir / "m.gguf", o, team);
  auto model = model::Model::load(dir / "m.gguf");
  const auto cpu = cpu::make_device(team);
  CountsExperts device(*cpu);
  engine::Engine e(model, device, {.n_ctx = kTokens, .n_batch = kTokens});
  engine::Sequence text = e.sequence();
  e.eval(text, synthetic_text(kVocab, kTokens, 32, 5));
  Persistence p;
  for (const std::vector<int32_t>& ids : device.named) {
    for (size_t w = 0; w < p.together.size(); ++w) {
      const size_t n = size_t{4} * (size_t{2} << w);  // ids of 2, 4, 8 tokens
      double all = 0;
      for (size_t i = 0; i + n <= ids.size(); i += 4) all += static_cast<double>(std::set(&ids[i], &ids[i] + n).size());
      all /= static_cast<double>(ids.size() / 4 + 1 - n / 4);
      p.together[w] += all / 4 / static_cast<double>(device.named.size());
    }
  }
  p.top = top_quarter(device);
  std::printf("    %.1f: %.2f %.2f %.2f, top quarter %.2f\n", prescribed, p.together[0], p.together[1], p.together[2],
              p.top);
  return p;
}

TEST(SynthMixture, PersistenceKeepsExpertsChosen) {
  ThreadTeam team(2);
  const Persistence none = persistence_of(0, team);
  Persistence before = none;
  std::vector<Persistence> all;
  for (const double prescribed : {0.3, 0.6, 0.9}) {
    const Persistence& p = all.emplace_back(persistence_of(prescribed, team));
    for (size_t w = 0; w < 3; ++w) EXPECT_LT(p.together[w], before.together[w] - 0.02) << prescribed;
    EXPECT_NEAR(p.top, none.top, 0.06) << "the skew is as prescribed";
    before = p;
  }
  // Within a topic choices are independent draws whose skew has the topic's share of the variance, too.
  const auto expected = [](double share, int tokens) {
    const double skew = std::sqrt((0.8 * 0.8 + share) / (1 - share));
    double low = -20, high = 20, together = 0;  // of what a logit must exceed, so that 4 of 64 do
    for (int step = 0; step < 60; ++step) {
      const double least = (low + high) / 2;
      double sum = 0;
      together = 0;
      for (int e = 0; e < 64; ++e) {
        const double f = normal_cdf(skew * normal_quantile((e + 0.5) / 64) - least);
        sum += f, together += 1 - std::pow(1 - f, tokens);
      }
      (sum > 4 ? low : high) = least;
    }
    return together;
  };
  const Persistence& some = all.front();
  for (size_t w = 0; w < 3; ++w) {
    const int tokens = 2 << w;
    EXPECT_NEAR(some.together[w] / none.together[w], expected(0.3, tokens) / expected(0, tokens), 0.08) << tokens;
  }
}

TEST(SynthMixture, ContradictingOptionsAreRefused) {
  SynthOptions o = small_mixture(0.5);
  o.dense = false;
  EXPECT_THROW(check_synth_options(o), Error);
  o = small_mixture(0.5), o.shape.n_expert_used = 17;
  EXPECT_THROW(check_synth_options(o), Error);
  o = small_mixture(0.5), o.shape.arch = "opt";
  EXPECT_THROW(check_synth_options(o), Error);
  o = small_mixture(0.5), o.expert_persistence = 0.95;
  EXPECT_THROW(check_synth_options(o), Error);
  o.expert_persistence = 0.5, o.shape.n_vocab = 400;  // too few words for topics
  EXPECT_THROW(check_synth_options(o), Error);
  o.shape = find_synth_shape("llama-7b");
  EXPECT_THROW(check_synth_options(o), Error);
}

// Four layers of 64 experts of 4 MB, of which 8 are used.
ModelShape mixture_shape() {
  ModelShape s = test::llama_7b();
  s.layers.resize(4);
  s.config.n_layer = 4;
  for (LayerShape& l : s.layers) {
    l.experts = l.gpu_experts = l.can_stream = true, l.n_ff = 64, l.n_used = 8;
    l.gate_bytes = 0, l.up_down_bytes = 4 << 20, l.expert_bytes = 64ull * (4 << 20);
  }
  return s;
}

TEST(PlanMixture, LeavesExpertsToTheCpuWhereTheGpuHasNoKernels) {
  ModelShape shape = mixture_shape();
  for (LayerShape& l : shape.layers) l.gpu_experts = l.can_stream = false;
  const Planner planner(shape, uniform_frequencies(shape, 1), {.vram_budget = 6ull << 30});
  const Plan plan = planner.plan();
  EXPECT_TRUE(plan.placement.uses_gpu());
  EXPECT_EQ(planner.streaming(plan.placement).tokens(), 0);
  for (const engine::LayerPlacement& l : plan.placement.layers) {
    EXPECT_EQ(l.attention, engine::Where::gpu);
    EXPECT_TRUE(l.gpu_experts.empty() && l.gpu_bucket.empty());
    EXPECT_EQ(l.selection, engine::Selection::all);
  }
  // What is read of experts is what tokens use.
  EXPECT_NEAR(plan.traffic.cpu_dense, 4.0 * 8 * (4 << 20), 1.0);
}

// Prompts stream experts through two slots, which a plan counts.
TEST(PlanMixture, LargeExpertsNeedLargeSlots) {
  ModelShape shape = mixture_shape();
  for (LayerShape& l : shape.layers) l.expert_weights = l.up_down_bytes * 2;
  const auto staging = [&] {
    const Planner planner(shape, uniform_frequencies(shape, 1), {.vram_budget = 2ull << 30});
    const Plan plan = planner.plan();
    const std::string table = plan_table(planner, plan, explain(planner, plan));
    EXPECT_NE(table.find("stream some of the host's experts that they choose while the CPU computes the others"),
              std::string::npos)
        << table;
    EXPECT_EQ(plan_json(planner, plan, {}).at("stream_tokens"), planner.streaming(plan.placement).tokens());
    return plan.gpu.staging;
  };
  EXPECT_EQ(staging(), GpuReserve().staging_bytes);
  for (LayerShape& l : shape.layers) l.up_down_bytes *= 16, l.expert_bytes *= 16;
  EXPECT_GT(staging(), 2 * shape.layers[0].up_down_bytes);
  EXPECT_LT(staging(), 2.1 * static_cast<double>(shape.layers[0].up_down_bytes));
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

// The k-th most frequent expert is chosen in proportion to 1 / (k + 4), 8 for each token.
Frequencies skewed(const ModelShape& shape) {
  Frequencies f{{}, true, "made"};
  for (const LayerShape& l : shape.layers) {
    std::vector<double>& p = f.p.emplace_back();
    double sum = 0;
    for (int64_t e = 0; e < l.n_ff; ++e) p.push_back(1.0 / static_cast<double>(e + 4)), sum += p.back();
    for (double& x : p) x *= l.n_used / sum;
  }
  return f;
}

TEST(PlanMixture, SaysFromWhichHitRateOnExpertsPay) {
  const ModelShape shape = mixture_shape();
  for (const double kernel_seconds : {1.3e-6, 40e-6, 1.0}) {
    SCOPED_TRACE(kernel_seconds);
    PlanRequest request;
    request.cost.kernel_seconds = kernel_seconds;
    const Planner planner(shape, skewed(shape), request);
    double least = 2;
    for (uint64_t mib = 1024; mib < 3400; mib += 100) {
      const Plan plan = planner.plan(mib << 20);
      if (!plan.placement.uses_gpu()) continue;
      for (size_t l = 0; l < plan.layers.size(); ++l) {
        const LayerReport& r = plan.layers[l];
        const std::optional<double> pays = planner.break_even(l, r.choice);
        const double hit = r.hot_activations / r.activations;
        EXPECT_TRUE(r.choice.hot == 0 || hit >= pays.value_or(2)) << hit;
        least = std::min(least, pays.value_or(2));
      }
    }
    const bool first_pays = least<0.1, some_pay = least> 0.1 && least < 1;
    EXPECT_TRUE(kernel_seconds > 0.1 ? least == 2 : kernel_seconds > 1e-5 ? some_pay : first_pays) << least;
  }
}

// Experts of the CPU are read where the file is mapped: less memory than they take is no reason to refuse.
TEST(PlanMixture, ExpertsMayBeOnDisk) {
  const ModelShape shape = mixture_shape();
  PlanRequest request;
  const Planner planner(shape, skewed(shape), request);
  const Plan plan = planner.plan(planner.smallest_budget());
  EXPECT_EQ(plan.mapped_bytes, 4 * 64 * (4ull << 20));  // no expert is on the GPU
  EXPECT_LE(plan.mapped_bytes, plan.host_bytes);
  request.host_memory = plan.host_bytes - plan.mapped_bytes;
  EXPECT_NO_THROW(Planner(shape, skewed(shape), request).plan(planner.smallest_budget()));
  --request.host_memory;
  EXPECT_THROW(Planner(shape, skewed(shape), request).plan(planner.smallest_budget()), Error);
}

TEST(PlanMixture, SaysUpToWhichBudgetMemoryPays) {
  const ModelShape shape = mixture_shape();
  PlanRequest request;
  request.host_memory = uint64_t{1} << 30;  // small budgets leave more than that to the host
  const Planner planner(shape, skewed(shape), request);
  const uint64_t budget = worthwhile_budget(planner), gib = uint64_t{1} << 30;
  EXPECT_GT(budget, planner.smallest_budget());
  EXPECT_LE(budget, planner.largest_useful_budget());
  request.host_memory = 0;
  const Planner any(shape, skewed(shape), request);
  EXPECT_EQ(worthwhile_budget(any), budget);
  EXPECT_LT(any.plan(budget + gib).tokens_per_second(), (1 + kWorthPerGib) * any.plan(budget).tokens_per_second());

  const Plan plan = any.plan(budget);
  const Explanation e = explain(any, plan);
  const std::string table = plan_table(any, plan, e);
  for (const char* said : {"break-even", "on GPU", "more GPU memory pays up to"}) {
    EXPECT_NE(table.find(said), std::string::npos) << said << "\n" << table;
  }
  const nlohmann::json j = plan_json(any, plan, e);
  EXPECT_EQ(j.at("worthwhile_budget"), budget);
  const nlohmann::json& layer = j.at("layers").at(0).at("experts");
  EXPECT_EQ(layer.at("experts"), 64);
  EXPECT_EQ(layer.at("experts_on_gpu"), plan.placement.layers[0].gpu_experts.size());
  EXPECT_GE(layer.at("hit_rate").get<double>(), layer.at("break_even_hit_rate").get<double>());
}

}  // namespace
}  // namespace hearth::offline
