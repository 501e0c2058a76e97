// From how many tokens on the CPU's weights are streamed: by the machine's figures, measured once.
#include <gtest/gtest.h>

#include <fstream>

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
  EXPECT_EQ(planner.stream_tokens(), 20);
  const Plan plan = planner.plan(uint64_t{6} << 30);
  const Explanation why = explain(planner, plan);
  EXPECT_NE(plan_table(planner, plan, why).find("prompts: batches of 20 tokens or more stream"), std::string::npos);
  EXPECT_EQ(plan_json(planner, plan, why)["stream_tokens"], 20);
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
