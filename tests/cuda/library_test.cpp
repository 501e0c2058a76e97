// NVIDIA's libraries are loaded when a GPU is used, and their absence is told in one line.
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "cuda/cuda.h"

namespace hearth::test {
namespace {

TEST(Libraries, AreThereOrTheLineSaysWhatToInstall) {
  try {
    cuda::require_libraries();
  } catch (const Error& e) {
    const std::string line = e.what();
    EXPECT_EQ(line.find('\n'), std::string::npos) << line;
    if (line == "this hearth was built without CUDA") return;
    EXPECT_NE(line.find("libcublas.so."), std::string::npos) << line;
    EXPECT_NE(line.find("install its package libcublas-"), std::string::npos) << line;
  }
}

}  // namespace
}  // namespace hearth::test
