// The words for a machine without a GPU, or without a driver that this build can use.
#include <gtest/gtest.h>

#include "cuda/cuda.h"
#include "cuda/driver.h"

namespace hearth::test {
namespace {

using cuda::why_no_gpu;

TEST(WhyNoGpu, TheWordsAreNotCudas) {
  EXPECT_EQ(why_no_gpu(0, 12040, "CUDA driver version is insufficient for CUDA runtime version"),
            "no NVIDIA GPU found (there is no NVIDIA driver)");
  EXPECT_EQ(why_no_gpu(12080, 12040, ""), "no NVIDIA GPU found");
  EXPECT_EQ(why_no_gpu(11000, 12040, ""), "no NVIDIA GPU found");
}

TEST(WhyNoGpu, AnOldDriverIsToldWithBothVersions) {
  const std::string why = why_no_gpu(11040, 12080, "CUDA driver version is insufficient for CUDA runtime version");
  EXPECT_NE(why.find("supports CUDA 11.4"), std::string::npos) << why;
  EXPECT_NE(why.find("built with 12.8"), std::string::npos) << why;
  EXPECT_NE(why.find("install a newer driver"), std::string::npos) << why;
}

TEST(WhyNoGpu, OtherTroubleIsTheDriversWord) {
  EXPECT_EQ(why_no_gpu(12080, 12080, "unknown error"), "the NVIDIA driver says: unknown error");
}

TEST(WhyNoGpu, HereToo) {
  std::string why;
  if (!cuda::list_gpus(&why).empty()) GTEST_SKIP() << "there is a GPU";
  EXPECT_NE(why, "");
  EXPECT_EQ(why.find("insufficient"), std::string::npos) << why;
  EXPECT_EQ(why.find("cuda"), std::string::npos) << why;
}

}  // namespace
}  // namespace hearth::test
