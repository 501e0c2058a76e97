// Plans for one H200 beside 16 threads against what was measured there (docs/reference/performance.md): where layers are
// short, time is that of their kernels and of hand-offs more than of bytes.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "model/model.h"
#include "offline/plan/planner.h"
#include "offline/synth_sparsity.h"
#include "plan_cases.h"
#include "support/paths.h"

namespace hearth::offline {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

PlanRequest on_h200(DType type, int64_t n_ctx) {
  PlanRequest r;
  r.n_ctx = n_ctx;
  r.cost.gpu_bandwidth = 4.3e12, r.cost.cpu_bandwidth = 140e9, r.cost.pcie_bandwidth = 55e9;
  r.cost.set_weights(type);
  return r;
}

// Qwen3-30B-A3B in Q4_K: 48 layers of 128 experts of 768 neurons, of which a token uses 8.
ModelShape qwen3_30b() {
  constexpr auto q4_k = [](uint64_t values) { return values * 9 / 16; };
  ModelShape s;
  s.name = "qwen3-30b-a3b", s.fingerprint = "0123456789abcdef", s.type_name = "q4_k";
  s.quantized = true, s.sparse_family = false;
  s.config.n_layer = 48, s.config.n_embd = 2048, s.config.n_ff = 768, s.config.n_vocab = 151936;
  s.config.n_head = 32, s.config.n_head_kv = 4, s.config.head_dim = 128, s.config.n_ctx_train = 40960;
  s.embedding_bytes = s.output_bytes = q4_k(151936ull * 2048);
  LayerShape l;
  l.experts = l.gpu_experts = l.can_stream = true, l.n_ff = 128, l.n_used = 8;
  l.attention_bytes = q4_k(2 * 2048ull * 4096 + 2 * 2048ull * 512) + 2048ull * 128 * 4;
  l.kv_token_bytes = 2 * 512 * 2;
  l.up_down_bytes = q4_k(3 * 2048ull * 768), l.expert_bytes = 128 * l.up_down_bytes;
  s.layers.assign(48, l);
  return s;
}

// Each expert's logits are normal, and their means are, too: the deviation of these is `skew` times that of the others.
std::vector<double> expert_frequencies(int64_t n, double used, double skew) {
  std::vector<double> p(static_cast<size_t>(n));
  double low = -20, high = 20;  // of what a logit must exceed
  for (int step = 0; step < 60; ++step) {
    const double least = (low + high) / 2;
    double sum = 0;
    for (size_t e = 0; e < p.size(); ++e) {
      sum += p[e] = normal_cdf(skew * normal_quantile((static_cast<double>(e) + 0.5) / static_cast<double>(n)) - least);
    }
    (sum > used ? low : high) = least;
  }
  return p;
}

TEST(PlanMeasured, AMixtureByBudget) {
  const ModelShape shape = qwen3_30b();
  // So that the hottest 43 % take 92 % of the choices, as of the model that was measured.
  const Frequencies f{.p = std::vector(48, expert_frequencies(128, 8, 0.88)), .known = true, .source = "made"};
  const Planner planner(shape, f, on_h200(DType::q4_k, 640));
  struct Measured {
    double budget, tokens_per_second, hit_rate;
  };
  for (const Measured m : {Measured{4, 148.8, 0.691}, {7.75, 320, 0.923}, {12, 387.1, 0.98}, {18, 487.1, 1}}) {
    const Plan plan = planner.plan(static_cast<uint64_t>(m.budget * kGiB));
    std::printf("    %5.2f GiB: %6.1f tok/s, measured %.1f; hits %.1f %%, measured %.1f\n", m.budget,
                plan.tokens_per_second(), m.tokens_per_second, 100 * plan.hit_rate, 100 * m.hit_rate);
    EXPECT_NEAR(plan.tokens_per_second() / m.tokens_per_second, 1, 0.25) << m.budget;
    EXPECT_NEAR(plan.hit_rate, m.hit_rate, 0.03) << m.budget;
  }
}

// The same for a 7B with predictors, all of it on the GPU: its kernels hide more of their own steps.
TEST(PlanMeasured, ASparseModelOnTheGpu) {
  struct Measured {
    DType type;
    double tokens_per_second;
  };
  for (const Measured m : {Measured{DType::f16, 429.7}, {DType::q8_0, 629}, {DType::q4_0, 756.4}}) {
    ModelShape shape = test::llama_7b();
    const auto bytes = [&](DType type, uint64_t values) { return values / 32 * row_bytes(type, 32); };
    shape.embedding_bytes = shape.output_bytes = bytes(m.type, 32000ull * 4096);
    for (LayerShape& l : shape.layers) {
      l.attention_bytes = bytes(m.type, 4ull * 4096 * 4096);
      l.gate_bytes = bytes(m.type, 4096), l.up_down_bytes = 2 * l.gate_bytes;
      l.predictor_bytes = bytes(m.type == DType::f16 ? m.type : DType::q8_0, 1024ull * (4096 + 11008));
    }
    PlanRequest r = on_h200(m.type, 128);
    r.sparsity = engine::Sparsity::predict;
    const Planner planner(shape, typical_frequencies(shape, 0.11), r);
    const Plan plan = planner.plan(planner.largest_useful_budget());
    std::printf("    %s: %.1f tok/s, measured %.1f\n", traits(m.type).name, plan.tokens_per_second(),
                m.tokens_per_second);
    EXPECT_NEAR(plan.tokens_per_second() / m.tokens_per_second, 1, 0.1);
  }
}

// 35.7M parameters in Q4_0, all on the GPU. The CPU alone, which nobody asked, is no more than as fast.
TEST(PlanMeasured, TheDemo) {
  const auto model = model::Model::load(test::source_dir() / "models" / "hearth-demo.gguf");
  const ModelShape shape = shape_of(model);
  PlanRequest r = on_h200(DType::q4_0, 512);
  const double cpu_alone = Planner(shape, frequencies_of(shape, nullptr), r).plan(0).tokens_per_second();
  for (const LayerShape& l : shape.layers) {
    std::vector<int32_t>& all = r.gpu_buckets.emplace_back(static_cast<size_t>(l.n_ff));
    std::iota(all.begin(), all.end(), 0);
  }
  const Planner planner(shape, frequencies_of(shape, nullptr), r);
  const Plan plan = planner.plan(planner.largest_useful_budget());
  std::printf("    %.0f tok/s, measured 3715; on the CPU alone %.0f\n", plan.tokens_per_second(), cpu_alone);
  EXPECT_TRUE(plan.placement.uses_gpu());
  EXPECT_NEAR(plan.tokens_per_second() / 3715, 1, 0.25);
  EXPECT_LT(cpu_alone, plan.tokens_per_second());
}

}  // namespace
}  // namespace hearth::offline
