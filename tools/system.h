#pragma once
// Facts from Linux about this machine and this process.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace hearth::tools {

struct ProcessMemory {
  size_t peak_resident = 0;  // bytes, mapped files included
};
ProcessMemory process_memory();

// Seconds since this process was started, to a hundredth; 0 when unknown.
double process_seconds();

// A limit that this process's cgroup, or one above it, sets.
struct CgroupMemory {
  size_t limit = 0, used = 0;  // bytes; used: by memory that is no file's
};
// `membership`: the text of /proc/self/cgroup. The tightest limit on the way up; nullopt where there is none.
std::optional<CgroupMemory> cgroup_memory(const std::string& membership, const std::filesystem::path& mounted);

struct SystemMemory {
  size_t total = 0, available = 0;     // bytes
  std::optional<size_t> cgroup_limit;  // bytes, where a cgroup sets one
  size_t cgroup_used = 0;
  std::string transparent_huge_pages;  // "always", "madvise", "never"; empty when unknown
  size_t huge_pages = 0, huge_pages_free = 0;
  // This process may take so much at most.
  size_t usable() const {
    if (!cgroup_limit) return available;
    return std::min(available, *cgroup_limit - std::min(*cgroup_limit, cgroup_used));
  }
};
SystemMemory system_memory();

struct Processor {
  std::string model;                  // as /proc/cpuinfo names it
  std::vector<std::string> features;  // of those that hearth's kernels could use
  int online = 0;                     // logical CPUs of the machine
  int affinity = 0;                   // of those, how many this process may run on
  std::optional<double> cgroup_cpus;  // quota, where a cgroup sets one
};
Processor processor();

}  // namespace hearth::tools
