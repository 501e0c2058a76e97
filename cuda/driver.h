#pragma once
// Why there is no GPU, in words for someone who does not know CUDA.
#include <fmt/format.h>

#include <string>
#include <string_view>

namespace hearth::cuda {

// "12.4", as CUDA counts it: 12040.
inline std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// `driver`: the newest CUDA that the driver knows, 0 = there is no driver; `needed`: the one of this build. `error`: what
// the driver says is wrong; empty when it says that there is no GPU.
inline std::string why_no_gpu(int driver, int needed, std::string_view error) {
  if (driver == 0) return "no NVIDIA GPU found (there is no NVIDIA driver)";
  if (error.empty()) return "no NVIDIA GPU found";
  if (driver < needed) {
    return fmt::format(
        "the NVIDIA driver is too old: it supports CUDA {} and this hearth is built with {}; install a newer driver",
        version_text(driver), version_text(needed));
  }
  return fmt::format("the NVIDIA driver says: {}", error);
}

}  // namespace hearth::cuda
