// What plans count, against what the engine's own allocations take.
#include <gtest/gtest.h>

#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "offline/plan/planner.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

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

}  // namespace
}  // namespace hearth::offline
