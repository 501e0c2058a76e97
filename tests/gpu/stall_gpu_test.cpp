// A GPU and a CPU that wait for each other: silence on the CPU's side ends in an error, step by step and in a recorded
// graph, and the GPU is left usable.
#include <gtest/gtest.h>

#include <chrono>

#include "core/error.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "engine/engine.h"
#include "support/halves.h"
#include "support/paths.h"
#include "support/stalling_device.h"
#include "support/tiny_model.h"

namespace hearth {
namespace {

using engine::Engine;
using namespace std::chrono_literals;

class GpuStall : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

TEST_P(GpuStall, ACpuThatFallsSilentIsAnErrorAndTheGpuGoesOn) {
  test::TempDir dir;
  const auto path = test::write_tiny_model(dir / "m.gguf");
  ThreadTeam team(1);
  for (const bool stall : {true, false}) {
    model::Model model = model::Model::load(path);
    ASSERT_FALSE(model.prepare_sparse().has_value());
    const auto gpu = cuda::make_device(0);
    const auto cpu = cpu::make_device(team);
    test::StallingDevice host(*cpu);
    Engine e(model, *gpu, {.use_graph = GetParam(), .patience = 500ms}, {host, test::halves(model.config()), team});
    engine::Sequence text = e.sequence();
    EXPECT_NO_THROW(e.eval_greedy(text, 1));
    EXPECT_NO_THROW(e.eval_greedy(text, 2));
    if (!stall) continue;
    host.stall_for(1500ms);
    const auto begin = std::chrono::steady_clock::now();
    try {
      e.eval_greedy(text, 3);
      ADD_FAILURE() << "a token without the CPU's part";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "the CPU has not answered a layer in 0.5 s; it may have stopped");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
    EXPECT_THROW(e.eval_greedy(text, 4), Error);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, GpuStall, testing::Bool(),
                         [](const auto& p) { return p.param ? "recorded" : "step_by_step"; });

}  // namespace
}  // namespace hearth
