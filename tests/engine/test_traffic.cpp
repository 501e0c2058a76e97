// Bytes of a token by side, and the floor made of them.
#include <gtest/gtest.h>

#include "cpu/cpu.h"
#include "engine/engine.h"
#include "support/paths.h"
#include "support/tiny_model.h"

namespace hearth {
namespace {

using engine::DensityStats;
using engine::Engine;
using engine::LayerTraffic;
using engine::SideBytes;
using engine::TokenTraffic;

constexpr double kRow = 64 * 4;                                 // of a neuron's matrix: f32
constexpr double kAttention = (64 * 64 * 2 + 32 * 64 * 2) * 4;  // q, o; k, v
constexpr double kHead = 259 * 64 * 4;
double cache(int64_t n_kv) {
  return static_cast<double>(n_kv) * 2 * 32 * 2;  // keys and values of two heads of 16, f16
}

class Traffic : public testing::Test {
 protected:
  std::unique_ptr<Engine> divided(const engine::Placement& placement, engine::Sparsity sparsity) {
    EXPECT_FALSE(model_.prepare_sparse().has_value());
    return std::make_unique<Engine>(model_, *main_, engine::EngineOptions{.sparsity = sparsity},
                                    engine::Division{*host_, placement, team_});
  }
  // Layer 0: a third of the neurons hot. Layer 1: on the CPU.
  static engine::Placement placement() {
    engine::Placement p;
    p.embedding = engine::Where::gpu, p.output = engine::Where::cpu;
    p.layers.resize(2);
    p.layers[0].attention = engine::Where::gpu;
    for (int32_t id = 0; id < 96; id += 3) p.layers[0].gpu_bucket.push_back(id);
    p.layers[1].attention = engine::Where::cpu;
    return p;
  }
  test::TempDir dir_;
  model::Model model_ = model::Model::load(test::write_tiny_model(dir_ / "m.gguf"));
  ThreadTeam team_{1};
  std::unique_ptr<Device> main_ = cpu::make_reference_device(), host_ = cpu::make_device(team_);
};

void expect_bytes(const SideBytes& b, double main, double host, const char* what) {
  EXPECT_DOUBLE_EQ(b.main, main) << what;
  EXPECT_DOUBLE_EQ(b.host, host) << what;
}

TEST_F(Traffic, OfEveryNeuron) {
  const auto e = divided(placement(), engine::Sparsity::off);
  const TokenTraffic t = e->traffic(e->density(), 10);
  ASSERT_EQ(t.layers.size(), 2u);
  expect_bytes(t.head, 0, kHead, "head");
  expect_bytes(t.layers[0].attention, kAttention + cache(10), 0, "attention 0");
  expect_bytes(t.layers[1].attention, 0, kAttention + cache(10), "attention 1");
  expect_bytes(t.layers[0].ffn, 32 * 3 * kRow, 64 * 3 * kRow, "ffn 0");
  expect_bytes(t.layers[1].ffn, 0, 96 * 3 * kRow, "ffn 1");
  expect_bytes(t.layers[0].selection, 0, 0, "selection 0");
}

TEST_F(Traffic, OfTheNeuronsThatWereActive) {
  const auto e = divided(placement(), engine::Sparsity::exact);
  const DensityStats counted = {.steps = 2, .active = {20, 12}, .active_on_host = {8, 12}, .active_linked = {0, 0}};
  const TokenTraffic t = e->traffic(counted, 1000);
  expect_bytes(t.layers[0].attention, kAttention + cache(64), 0, "no more positions than the context has");
  // Every gate where it lives; up and down of 6 and 4 active neurons a token.
  expect_bytes(t.layers[0].ffn, (32 + 2 * 6) * kRow, (64 + 2 * 4) * kRow, "ffn 0");
  expect_bytes(t.layers[0].selection, 0, 0, "selection 0");
  expect_bytes(t.layers[1].selection, 0, 0, "selection 1");
  expect_bytes(t.layers[1].ffn, 0, (96 + 2 * 6) * kRow, "ffn 1");
  SideBytes sum = t.head;
  for (const LayerTraffic& l : t.layers) sum += l.attention, sum += l.selection, sum += l.ffn;
  expect_bytes(t.total(), sum.main, sum.host, "total");
}

TEST_F(Traffic, IsCountedSinceAMoment) {
  const DensityStats before = {
      .steps = 1, .active = {5, 6}, .active_on_host = {1, 2}, .active_linked = {1, 0}, .neurons = {10, 10}};
  const DensityStats after = {
      .steps = 4, .active = {11, 18}, .active_on_host = {3, 6}, .active_linked = {2, 2}, .neurons = {40, 40}};
  const DensityStats d = after.since(before);
  EXPECT_EQ(d.steps, 3);
  EXPECT_EQ(d.active, (std::vector<double>{6, 12}));
  EXPECT_EQ(d.active_on_host, (std::vector<double>{2, 4}));
  EXPECT_EQ(d.active_linked, (std::vector<double>{1, 2}));
  EXPECT_DOUBLE_EQ(d.density(), 18.0 / 3 / 20);
  EXPECT_DOUBLE_EQ(d.host_share(), 0.5);
  const DensityStats experts = {.experts = {16, 0}, .experts_on_host = {4, 0}};
  EXPECT_DOUBLE_EQ(experts.host_share(), 0.25);
  EXPECT_TRUE(std::isnan(experts.since(experts).host_share()));
  EXPECT_TRUE(std::isnan(before.since(before).density()));
}

TEST(Floor, IsTheLongerSideOfEachFfnAndTheSumOfTheRest) {
  TokenTraffic t;
  t.head = {1000, 0};
  t.layers.push_back({.attention = {300, 0}, .selection = {50, 0}, .ffn = {200, 70}});  // 2 s against 7 s
  t.layers.push_back({.attention = {0, 20}, .selection = {0, 5}, .ffn = {900, 10}});    // 9 s against 1 s
  const SideBytes bandwidths = {100, 10, 2};
  EXPECT_DOUBLE_EQ(engine::floor_seconds(t, bandwidths), 10 + (3 + 0.5 + 7) + (2 + 0.5 + 9));
  t.parallel_block = true;  // both sides work at attention and FFN at the same time
  EXPECT_DOUBLE_EQ(engine::floor_seconds(t, bandwidths), 10 + (0.5 + 7) + (0.5 + 9));
  t.layers[0].ffn.link = 16;  // 8 s, while the others wait
  EXPECT_DOUBLE_EQ(engine::floor_seconds(t, bandwidths), 10 + (0.5 + 8) + (0.5 + 9));
}

}  // namespace
}  // namespace hearth
