#pragma once
// What Linux says about this machine and this process.
#include <algorithm>
#include <cstdint>
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

struct SystemMemory {
  size_t total = 0, available = 0;     // bytes
  std::optional<size_t> cgroup_limit;  // bytes, where a cgroup sets one
  std::string transparent_huge_pages;  // "always", "madvise", "never"; empty when unknown
  size_t huge_pages = 0, huge_pages_free = 0;
  // What this process may take, at most.
  size_t usable() const { return std::min(available, cgroup_limit.value_or(available)); }
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
