// What is measured of a machine, and the file that keeps it.
#include <gtest/gtest.h>

#include <fstream>

#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "offline/plan/machine.h"
#include "offline/plan/rates.h"
#include "support/paths.h"

namespace hearth::offline {
namespace {

TEST(PlanMachine, IsMeasuredOnce) {
  const test::TempDir dir;
  const auto cache = dir / "hearth/machine.json";
  int measured = 0;
  const auto measure = [&] {
    ++measured;
    return MachineBandwidth{1e10, 2e12, 3e9};
  };
  EXPECT_EQ(cached_bandwidth(cache, "a", measure).gpu, 2e12);
  EXPECT_EQ(cached_bandwidth(cache, "a", measure).pcie, 3e9);
  EXPECT_EQ(measured, 1);
  cached_bandwidth(cache, "b", measure);  // another machine, or another number of threads
  EXPECT_EQ(measured, 2);
  cached_bandwidth(cache, "a", measure);
  EXPECT_EQ(measured, 2);
  for (const char* damage : {"not json", "[]", R"({"a":{"cpu":0,"gpu":1,"pcie":1}})", R"({"a":{"cpu":"x"}})"}) {
    std::ofstream(cache) << damage;
    const int before = measured;
    EXPECT_EQ(cached_bandwidth(cache, "a", measure).cpu, 1e10);
    EXPECT_EQ(measured, before + 1) << damage;
  }
  EXPECT_EQ(cached_bandwidth(std::nullopt, "a", measure).cpu, 1e10);
  EXPECT_NE(machine_key(3, "").find("3 threads | no GPU"), std::string::npos);
}

constexpr KernelRates kHost = {.cpu_dense = 5e10, .cpu_sparse = 4e10, .fetched_speedup = 2};
constexpr KernelRates kAll = {.cpu_dense = 5e10,
                              .cpu_sparse = 4e10,
                              .gpu_dense = 9e11,
                              .gpu_sparse = 6e11,
                              .fetched_speedup = 2,
                              .handoff_seconds = 9e-6};

// Beside what an older hearth kept, by type, and again when the GPU's are wanted, too.
TEST(PlanMachine, KeepsTheRatesOfKernels) {
  const test::TempDir dir;
  const auto cache = dir / "machine.json";
  std::ofstream(cache) << R"({"a":{"cpu":1e10,"gpu":2e12,"pcie":3e9,"products":{"f16":7}}})";
  int measured = 0;
  const auto rates = [&](const char* type, bool with_gpu) {
    return cached_rates(cache, "a", type, with_gpu, [&] { return ++measured, with_gpu ? kAll : kHost; });
  };
  EXPECT_EQ(rates("f16", false).cpu_dense, 5e10);
  EXPECT_EQ(rates("f16", false).fetched_speedup, 2);
  EXPECT_EQ(measured, 1);
  EXPECT_EQ(rates("q8_0", false).cpu_sparse, 4e10);
  EXPECT_EQ(measured, 2);
  EXPECT_EQ(rates("f16", true).gpu_dense, 9e11);
  EXPECT_EQ(measured, 3);
  EXPECT_EQ(rates("f16", true).handoff_seconds, 9e-6);
  EXPECT_EQ(rates("f16", false).gpu_dense, 0) << "not asked for";
  EXPECT_EQ(measured, 3);
  EXPECT_EQ(cached_bandwidth(cache, "a", [] { return MachineBandwidth{}; }).gpu, 2e12);
  EXPECT_EQ(cached_product_rate(cache, "a", "f16", [] { return 0.0; }), 7);
}

TEST(PlanMachine, MeasuresAgainWhatIsDamaged) {
  const test::TempDir dir;
  const auto cache = dir / "machine.json";
  for (const char* damage :
       {"", "{", "[]", R"({"a":7})", R"({"a":{"kernels":[]}})", R"({"a":{"kernels":{"f16":null}}})",
        R"({"a":{"kernels":{"f16":{"cpu_dense":1,"cpu_sparse":1}}}})",
        R"({"a":{"kernels":{"f16":{"cpu_dense":0,"cpu_sparse":1,"fetched":1}}}})",
        R"({"a":{"kernels":{"f16":{"cpu_dense":-1,"cpu_sparse":1,"fetched":1}}}})",
        R"({"a":{"kernels":{"f16":{"cpu_dense":"5","cpu_sparse":1,"fetched":1}}}})"}) {
    SCOPED_TRACE(damage);
    std::ofstream(cache) << damage;
    int measured = 0;
    const auto measure = [&] { return ++measured, kHost; };
    EXPECT_EQ(cached_rates(cache, "a", "f16", false, measure).cpu_dense, 5e10);
    EXPECT_EQ(cached_rates(cache, "a", "f16", false, measure).cpu_dense, 5e10);
    EXPECT_EQ(measured, 1);
  }
  // A GPU that could not be measured is tried again; what is known is used.
  int measured = 0;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(cached_rates(cache, "b", "f16", true, [&] { return ++measured, kHost; }).cpu_dense, 5e10);
  }
  EXPECT_EQ(measured, 2);
}

TEST(PlanMachine, RatesBecomeSharesOfTheBandwidths) {
  CostModel c;
  c.cpu_bandwidth = 1e11, c.gpu_bandwidth = 1e12;
  const CostModel unmeasured = c;
  c.set_rates({});
  EXPECT_EQ(c.cpu_dense_efficiency, unmeasured.cpu_dense_efficiency);
  EXPECT_EQ(c.handoff_seconds, unmeasured.handoff_seconds);
  c.set_rates(kAll);
  EXPECT_DOUBLE_EQ(c.cpu_dense(5e10), 1);
  EXPECT_DOUBLE_EQ(c.cpu_sparse(4e10), 1);
  EXPECT_DOUBLE_EQ(c.gpu_dense(9e11), 1);
  EXPECT_DOUBLE_EQ(c.gpu_sparse(6e11), 1);
  EXPECT_DOUBLE_EQ(c.handoff_seconds, 1e-5);
  EXPECT_LT(c.asking_seconds, c.handoff_seconds);
  c.set_rates({.cpu_dense = 3e11, .cpu_sparse = 1});  // faster than memory: a cache; slower: somebody else's work
  EXPECT_EQ(c.cpu_dense_efficiency, 1);
  EXPECT_EQ(c.cpu_sparse_efficiency, 0.1);
}

// Through any device: here the CPU's, and one in a GPU's place. How fast they are, nobody can know.
TEST(PlanMachine, MeasuresDevices) {
  ThreadTeam team(2);
  for (const DType type : {DType::f16, DType::q4_0}) {
    const DeviceRates r = measure_rates(*cpu::make_device(team), type);
    EXPECT_GT(r.dense, 1e7);
    EXPECT_LT(r.dense, 1e13);
    EXPECT_GT(r.sparse, 1e6);
    EXPECT_LE(r.sparse, r.dense);
    EXPECT_GE(r.fetched_speedup, 1);
  }
  const double hand_off = measure_hand_off(*cpu::make_reference_device());
  EXPECT_GT(hand_off, 1e-8);
  EXPECT_LT(hand_off, 1);
}

}  // namespace
}  // namespace hearth::offline
