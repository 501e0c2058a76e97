// Ten thousand FFNs divided between a GPU and the CPU, through mapped host memory.
#include "cuda/cuda.h"
#include "support/hybrid_steps.h"

namespace hearth {
namespace {

class GpuHybridSteps : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

TEST_F(GpuHybridSteps, TenThousandInARow) {
  const auto gpu = cuda::make_device(0);
  test::expect_hybrid_steps(*gpu, 0, 10'000);
}

// The same in ten pieces, each on a new device of a few blocks, with few kernels waiting at a time: for tools that do
// not bear more.
class GpuHybridPieces : public GpuHybridSteps, public ::testing::WithParamInterface<int> {};
TEST_P(GpuHybridPieces, OfAThousand) {
  const auto gpu = cuda::make_device(0, {.multiprocessors = 8});
  test::expect_hybrid_steps(*gpu, GetParam() * 1'000, 1'000, 10);
}
INSTANTIATE_TEST_SUITE_P(TenOf, GpuHybridPieces, ::testing::Range(0, 10));

}  // namespace
}  // namespace hearth
