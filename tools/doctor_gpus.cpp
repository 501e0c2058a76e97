#include "tools/doctor_gpus.h"

#include <fmt/format.h>

#include "core/error.h"
#include "core/units.h"

namespace hearth::tools {

std::vector<GpuFinding> examine_gpus(std::span<const cuda::GpuInfo> gpus,
                                     const std::function<cuda::Bandwidth(int gpu)>& measure) {
  std::vector<GpuFinding> findings;
  for (const cuda::GpuInfo& gpu : gpus) {
    GpuFinding& f = findings.emplace_back(GpuFinding{.gpu = gpu});
    try {
      f.bandwidth = measure(gpu.index);
    } catch (const Error& e) {
      f.unusable = e.what();
    }
  }
  return findings;
}

std::vector<std::string> describe(const GpuFinding& f) {
  const cuda::GpuInfo& g = f.gpu;
  std::vector<std::string> lines = {fmt::format("{}, compute {}.{}, {} multiprocessors, {} of {} free", g.name,
                                                g.compute_major, g.compute_minor, g.multiprocessors,
                                                human_bytes(g.free_bytes), human_bytes(g.total_bytes))};
  if (f.bandwidth) {
    lines.push_back(fmt::format("memory reads {:.1f} GB/s, to the GPU {:.1f} GB/s, from it {:.1f} GB/s",
                                f.bandwidth->memory_read / 1e9, f.bandwidth->host_to_device / 1e9,
                                f.bandwidth->device_to_host / 1e9));
  } else {
    lines.push_back("cannot be used: " + f.unusable);
  }
  return lines;
}

}  // namespace hearth::tools
