#pragma once
// The GPUs of `hearth doctor`. One that cannot be used is a finding too, and the rest is told all the same.
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/cuda.h"

namespace hearth::tools {

struct GpuFinding {
  cuda::GpuInfo gpu;
  std::optional<cuda::Bandwidth> bandwidth;
  std::string unusable;  // why there is no bandwidth, in one line
};

// Measures every GPU by its index. What `measure` throws as Error becomes that GPU's finding.
std::vector<GpuFinding> examine_gpus(std::span<const cuda::GpuInfo> gpus,
                                     const std::function<cuda::Bandwidth(int gpu)>& measure);

// The lines for people, the GPU itself first, then its bandwidths or why it cannot be used.
std::vector<std::string> describe(const GpuFinding& finding);

}  // namespace hearth::tools
