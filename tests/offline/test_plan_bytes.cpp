// What plans count, against what the engine's own allocations take.
#include <gtest/gtest.h>

#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "cuda/layout.h"
#include "engine/engine.h"
#include "offline/plan/planner.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"
#include "support/tiny_mixture.h"

namespace hearth::offline {
namespace {

TEST(PlanBytes, AreThoseOfTheEnginesAllocations) {
  const test::TempDir dir;
  ThreadTeam team(1);
  for (const DType type : {DType::f16, DType::q8_0}) {
    for (const int64_t n_batch : {1, 7, 48}) {
      SCOPED_TRACE(fmt::format("{} batch {}", traits(type).name, n_batch));
      test::TinyGguf tiny;
      tiny.type = type, tiny.transposed_down = true;
      test::write_tiny_gguf(dir / "m.gguf", tiny);
      model::Model m = model::Model::load(dir / "m.gguf");
      const auto main = cpu::make_reference_device(), host = cpu::make_device(team);
      PlanRequest r;
      r.n_ctx = 48, r.n_batch = n_batch, r.cost.cpu_bandwidth = 1e6;
      r.reserve.q8_bytes = [&](int64_t n) { return main->q8_bytes(n); };
      Limits limits;
      r.reserve.scratch_bytes = [&](const Limits& l) { return limits = l, uint64_t{12345}; };
      const ModelShape shape = shape_of(m);
      const Planner planner(shape, uniform_frequencies(shape, 0.5), r);
      const Plan plan = planner.plan(planner.largest_useful_budget());
      EXPECT_EQ(plan.gpu.scratch, 12345u);
      EXPECT_EQ(limits.max_tokens, n_batch);
      EXPECT_EQ(limits.n_ff, m.config().n_ff);
      const engine::Engine e(m, *main, {.n_ctx = 48, .n_batch = n_batch}, {*host, plan.placement, team});
      const auto taken = [&](Purpose purpose) {
        for (const MemoryUse& use : main->memory()) {
          if (use.purpose == purpose) return use.bytes;
        }
        return size_t{0};
      };
      EXPECT_EQ(plan.gpu.activations, taken(Purpose::activations));
      EXPECT_EQ(plan.gpu.kv_cache, taken(Purpose::kv_cache));
      EXPECT_GT(plan.gpu.kv_cache, 0u);
    }
  }
}

uint64_t gpu_bytes(const Matrix& m) {
  return m ? cuda::adopted_bytes(m.type, m.rows, m.cols) : 0;
}

// The plan with everything on a GPU, of this file's matrices as it packs them.
Plan whole_plan(const model::Model& m) {
  PlanRequest r;
  r.n_ctx = 48, r.n_batch = 8, r.cost.cpu_bandwidth = 1e6;
  r.reserve.matrix_bytes = gpu_bytes;
  const ModelShape shape = shape_of(m, r.reserve.matrix_bytes);
  const Planner planner(shape, uniform_frequencies(shape, 0.5), r);
  return planner.plan(planner.largest_useful_budget());
}

constexpr uint64_t kSlack = 8 * 256;  // of a layer's attention, and of its neurons: tensors' alignment
constexpr uint64_t kId = 4;           // of a neuron or expert

TEST(PlanBytes, CountQuantisedExpertsAsTheGpuPacksThem) {
  const test::TempDir dir;
  const test::TinyMixtureOptions o{.arch = "qwen2moe", .type = DType::q4_k, .n_embd = 256, .n_ff = 256,
                                   .n_ff_shared = 256};
  const model::Model m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf", o));
  const Plan plan = whole_plan(m);
  uint64_t experts = 0, attention = 0, in_file = 0;
  for (const model::LayerWeights& l : m.weights().layers) {
    for (const Expert& e : l.experts) {
      experts += gpu_bytes(e.ffn.gate) + gpu_bytes(e.ffn.up) + gpu_bytes(e.ffn.down) + kId, in_file += e.bytes();
    }
    experts += kSlack, attention += kSlack;
    for (const Matrix* w : {&l.wq, &l.wk, &l.wv, &l.wo, &l.router.w, &l.router.shared_gate}) attention += gpu_bytes(*w);
  }
  EXPECT_EQ(plan.gpu.neurons, experts);
  EXPECT_EQ(plan.gpu.attention, attention);
  EXPECT_EQ(plan.gpu.output, gpu_bytes(m.weights().output) + 2 * 256);
  EXPECT_GT(experts, in_file * 102 / 100);  // 148 bytes for 144
  EXPECT_GE(plan.gpu.norms, 3 * 7 * kExpertTableBytes);
  EXPECT_NEAR(plan.traffic.gpu_dense + plan.traffic.gpu_sparse,  // reads what the file says
              static_cast<double>(in_file) * 3 / 7 + static_cast<double>(m.weights().output.bytes()) +
                  plan.layers[0].attention.gpu_dense * 3,
              1.0);
}

TEST(PlanBytes, CountQuantisedNeuronsAsTheGpuPacksThem) {
  const test::TempDir dir;
  test::TinyGguf tiny;
  tiny.type = DType::q4_k, tiny.n_embd = tiny.n_ff = 256, tiny.transposed_down = true;
  test::write_tiny_gguf(dir / "m.gguf", tiny);
  const model::Model m = model::Model::load(dir / "m.gguf");
  const Plan plan = whole_plan(m);
  uint64_t neurons = 0;
  for (const model::LayerWeights& l : m.weights().layers) {
    for (const Matrix* w : {&l.ffn.gate, &l.ffn.up, &l.ffn.down_t}) neurons += gpu_bytes(*w);
    neurons += 256 * kId + kSlack;
  }
  EXPECT_EQ(plan.gpu.neurons, neurons);
  EXPECT_GT(neurons, m.weights().layers.size() * 3 * m.weights().layers[0].ffn.gate.bytes());
}

}  // namespace
}  // namespace hearth::offline
