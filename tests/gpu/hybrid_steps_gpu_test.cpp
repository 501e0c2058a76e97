// Ten thousand FFNs divided between a GPU and the CPU, through mapped host memory.
#include "cuda/cuda.h"
#include "support/hybrid_steps.h"

namespace hearth {
namespace {

TEST(GpuHybridSteps, TenThousandInARow) {
  std::string why;
  if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
  const auto gpu = cuda::make_device(0);
  test::expect_hybrid_steps(*gpu, 10'000);
}

}  // namespace
}  // namespace hearth
