// From how many tokens on the CPU's weights are streamed: by the machine's figures, measured once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <vector>

#include "cpu/product_rate.h"
#include "offline/plan/explain.h"
#include "offline/plan/machine.h"
#include "plan_cases.h"
#include "support/paths.h"

namespace hearth::offline {
namespace {

TEST(Crossover, IsWhereBothWaysTakeTheSameTime) {
  CostModel c;
  c.cpu_bandwidth = 143e9, c.pcie_bandwidth = 55e9, c.cpu_flops = 1.1e12;
  const int64_t f16 = c.stream_tokens(2);
  EXPECT_EQ(f16, 20);  // 2 bytes / 55 GB/s = 36.4 ps a weight; 2 operations / 1.1 Tflop/s = 1.82 ps a token
  EXPECT_EQ(c.stream_tokens(4), 40);
  EXPECT_EQ(c.stream_tokens(18.0 / 32), 8) << "matrix-vector products do not read staged weights";
  c.cpu_flops *= 10;
  EXPECT_EQ(c.stream_tokens(2), 200) << "a faster CPU keeps longer prompts";
  c.pcie_bandwidth = 200e9;
  EXPECT_EQ(c.stream_tokens(2), 8) << "a link faster than host memory always wins";
  c.cpu_flops = 1e30, c.pcie_bandwidth = 1;
  EXPECT_GE(c.stream_tokens(2), int64_t{1} << 29) << "never, and no overflow";
}

TEST(Crossover, IsPartOfThePlan) {
  PlanRequest request;
  request.cost.cpu_bandwidth = 143e9, request.cost.pcie_bandwidth = 55e9, request.cost.cpu_flops = 1.1e12;
  const ModelShape shape = test::llama_7b();
  const Planner planner(shape, typical_frequencies(shape, 0.11), request);
  const Plan plan = planner.plan(uint64_t{6} << 30);
  EXPECT_EQ(planner.streaming(plan.placement).tokens(), 20);
  const Explanation why = explain(planner, plan);
  EXPECT_NE(plan_table(planner, plan, why).find("prompts: batches of 20 tokens or more stream"), std::string::npos);
  EXPECT_EQ(plan_json(planner, plan, why)["stream_tokens"], 20);
}

// Two layers of 64 experts of 4 MB and 8 million weights, of which a token uses 8.
struct Mixture {
  Mixture() {
    shape.layers.resize(2);
    for (LayerShape& l : shape.layers) {
      l.experts = l.gpu_experts = l.can_stream = true, l.n_ff = 64, l.n_used = 8;
      l.gate_bytes = 0, l.up_down_bytes = 4'000'000, l.expert_bytes = 64 * l.up_down_bytes;
      l.expert_weights = 8'000'000;
    }
    cost.pcie_bandwidth = 50e9, cost.cpu_bandwidth = 100e9, cost.cpu_dense_efficiency = 1, cost.cpu_flops = 1e12;
    frequencies = uniform_frequencies(shape, 1);
    for (auto& l : placement.layers) l.attention = engine::Where::gpu;
  }
  Streaming streaming() const { return {shape, frequencies, placement, cost}; }
  ModelShape shape = test::llama_7b();
  CostModel cost;
  Frequencies frequencies;
  engine::Placement placement = {.layers = std::vector<engine::LayerPlacement>(2)};
};

// As many of the 64 experts, which are alike, come over the link as makes the longer side's time shortest.
TEST(Crossover, OfAMixtureSharesOutTheExpertsThatABatchChooses) {
  Mixture m;
  m.cost.cpu_dense_efficiency = 0.8;
  struct Batch {
    double shared = 1e9, alone = 0, bytes = 0;
  };
  const auto expected = [&](int64_t T) {
    const double chosen = 4e6 * (1 - std::pow(1 - 8.0 / 64, T));
    const double products = 2 * 8.0 / 64 * static_cast<double>(T) * 8e6 / m.cost.cpu_flops;
    const double over_link = std::min(m.cost.pcie_bandwidth, 100e9), left = std::max(100e9 - over_link, 10e9);
    const double cpu = std::max(chosen / std::min(80e9, left), products);
    Batch b;
    b.alone = 2 * 64 * std::max(chosen / 80e9, products);
    for (int k = 0; k <= 64; ++k) {
      const double link = k > 0 ? m.cost.fetch_seconds + k * chosen / over_link : 0;
      if (2 * std::max(link, (64 - k) * cpu) >= b.shared) continue;
      b.shared = 2 * std::max(link, (64 - k) * cpu), b.bytes = 2 * k * chosen;
    }
    return b;
  };
  const auto expect = [&] {
    const Streaming s = m.streaming();
    for (const int64_t T : {1, 9, 40, 500}) {
      EXPECT_NEAR(s.seconds(T) / expected(T).shared, 1, 1e-9) << T;
      EXPECT_NEAR(s.cpu_seconds(T) / expected(T).alone, 1, 1e-9) << T;
      EXPECT_NEAR(s.bytes(T), expected(T).bytes, 1e-3) << T;
    }
    int64_t tokens = 9;
    while (expected(tokens).shared >= expected(tokens).alone) ++tokens;
    EXPECT_EQ(s.tokens(), tokens);
    return tokens;
  };
  EXPECT_EQ(expect(), 9) << "the CPU leaves bandwidth to the link";
  EXPECT_LT(m.streaming().seconds(500), 0.6 * m.streaming().cpu_seconds(500));
  m.cost.fetch_seconds = 8.1e-3;
  const int64_t later = expect();
  EXPECT_GT(later, 50) << "a wait must be worth it";
  m.cost.cpu_flops *= 4;
  EXPECT_GT(expect(), 2 * later) << "a faster CPU keeps longer prompts";
  m.cost.cpu_flops = 1e12, m.cost.pcie_bandwidth = 200e9, m.cost.fetch_seconds = 0;
  EXPECT_EQ(expect(), 9);
  // Memory that the CPU uses up has nothing for the link, until products are the limit.
  m.cost.cpu_dense_efficiency = 1, m.cost.pcie_bandwidth = 50e9;
  EXPECT_NEAR(m.streaming().seconds(9) / m.streaming().cpu_seconds(9), 1, 1e-9);
  EXPECT_LT(m.streaming().seconds(500), 0.6 * m.streaming().cpu_seconds(500));
  m.cost.cpu_flops = 1e30, m.cost.pcie_bandwidth = 1;
  EXPECT_GE(m.streaming().tokens(), int64_t{1} << 29) << "never";
}

TEST(Crossover, OfAMixtureIsOfTheExpertsThatTheCpuHas) {
  Mixture m;
  const int64_t all_cold = m.streaming().tokens();
  // The CPU's are chosen a tenth as often: as many bytes come for far fewer products.
  for (size_t l = 0; l < 2; ++l) {
    for (int32_t id = 0; id < 32; ++id) {
      m.placement.layers[l].gpu_experts.push_back(id);
      m.frequencies.p[l][static_cast<size_t>(id)] = 8.0 / 32 / 1.1,
      m.frequencies.p[l][static_cast<size_t>(id) + 32] = 8.0 / 32 / 11;
    }
  }
  const int64_t rare_cold = m.streaming().tokens();
  EXPECT_GT(rare_cold, 2 * all_cold);
  EXPECT_LE(m.streaming().bytes(1 << 20), 2 * 32 * 4e6 * (1 + 1e-9));
  for (auto& l : m.placement.layers) l.attention = engine::Where::cpu;
  EXPECT_EQ(m.streaming().tokens(), rare_cold) << "the GPU chooses where it has experts";
  for (auto& l : m.placement.layers) l.gpu_experts.clear();
  EXPECT_EQ(m.streaming().tokens(), 0) << "the CPU chooses";
  for (auto& l : m.placement.layers) {
    for (int32_t id = 0; id < 64; ++id) l.gpu_experts.push_back(id);
  }
  EXPECT_EQ(m.streaming().tokens(), 0) << "nothing is the CPU's";
}

TEST(Crossover, TheRateIsMeasuredOnceForEachType) {
  const test::TempDir dir;
  const auto cache = dir / "hearth/machine.json";
  int measured = 0;
  const auto rate = [&](const char* key, const char* type) {
    return cached_product_rate(cache, key, type, [&] { return ++measured * 1e9; });
  };
  EXPECT_EQ(rate("a", "f16"), 1e9);
  EXPECT_EQ(rate("a", "f16"), 1e9);
  EXPECT_EQ(rate("a", "q8_0"), 2e9);
  EXPECT_EQ(rate("b", "f16"), 3e9);
  // Bandwidths and rates of a machine do not overwrite each other, whichever comes first.
  const auto bandwidths = [&](const char* key) {
    return cached_bandwidth(cache, key, [&] {
      ++measured;
      return MachineBandwidth{1e10, 2e12, 3e9};
    });
  };
  bandwidths("a"), bandwidths("c");
  EXPECT_EQ(measured, 5);
  EXPECT_EQ(rate("c", "f16"), 6e9);
  EXPECT_EQ(rate("a", "q8_0"), 2e9);
  EXPECT_EQ(bandwidths("a").gpu, 2e12);
  EXPECT_EQ(bandwidths("c").pcie, 3e9);
  EXPECT_EQ(measured, 6);
  std::ofstream(cache) << R"({"a":{"products":{"f16":"fast","q8_0":-1}}})";
  EXPECT_EQ(rate("a", "f16"), 7e9);
  EXPECT_EQ(rate("a", "q8_0"), 8e9);
  EXPECT_EQ(cached_product_rate(std::nullopt, "a", "f16", [] { return 5.0; }), 5);
}

TEST(Crossover, ProductsOfEveryTypeAreMeasured) {
  ThreadTeam team(1);
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
    const double rate = cpu::measure_product_rate(team, type);
    EXPECT_GT(rate, 1e8) << traits(type).name;
    EXPECT_LT(rate, 1e13) << traits(type).name;
  }
}

}  // namespace
}  // namespace hearth::offline
