#include "tools/system.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>

namespace hearth::tools {
namespace {

// "Key:   value" lines of /proc files: the value of the first line with this key.
std::string field(const char* file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t colon = line.find(':');
    const size_t begin = colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

size_t number(const std::string& text) {
  return static_cast<size_t>(std::strtoull(text.c_str(), nullptr, 10));
}

std::optional<size_t> cgroup_memory_limit() {
  for (const char* file : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::string text;
    if (!(std::ifstream(file) >> text)) continue;
    const size_t limit = number(text);  // "max" reads as 0; v1 says "no limit" with a number near 2^63
    if (limit > 0 && limit < (size_t{1} << 60)) return limit;
  }
  return std::nullopt;
}

std::optional<double> cgroup_cpu_quota() {
  std::string quota;
  double period = 0;
  if (std::ifstream("/sys/fs/cgroup/cpu.max") >> quota >> period && quota != "max" && period > 0) {
    return std::strtod(quota.c_str(), nullptr) / period;
  }
  double q = -1;
  if (std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> q &&
      std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period && q > 0 && period > 0) {
    return q / period;
  }
  return std::nullopt;
}

// The features that matter to the kernels, among the flags the kernel lists.
std::vector<std::string> known_features() {
  static constexpr std::array<std::string_view, 13> kKnown = {
      "avx",      "f16c",     "fma",         "avx2",        "avx_vnni",    "avx512f", "avx512bw",
      "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8"};
  std::string text = field("/proc/cpuinfo", "flags");
  if (text.empty()) text = field("/proc/cpuinfo", "Features");  // Arm
  std::vector<std::string> found;
  std::istringstream flags(text);
  for (std::string flag; flags >> flag;) {
    for (const std::string_view known : kKnown) {
      if (flag == known) found.push_back(flag);
    }
    if (flag == "asimd" || flag == "asimddp" || flag == "sve" || flag == "i8mm") found.push_back(flag);
  }
  return found;
}

}  // namespace

ProcessMemory process_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {static_cast<size_t>(usage.ru_maxrss) * 1024};
}

double process_seconds() {
  // proc(5): after the name in brackets, field 22 of all is the start, in clock ticks since boot.
  std::ifstream in("/proc/self/stat");
  std::string text{std::istreambuf_iterator<char>(in), {}};
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  constexpr int kFieldsBefore = 19;  // from field 3 on
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  double ticks = 0;
  timespec now{};
  if (!(fields >> ticks) || clock_gettime(CLOCK_BOOTTIME, &now) != 0) return 0;
  const double started = ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
  return std::max(0.0, static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 - started);
}

SystemMemory system_memory() {
  SystemMemory m;
  m.total = number(field("/proc/meminfo", "MemTotal")) * 1024;
  m.available = number(field("/proc/meminfo", "MemAvailable")) * 1024;
  m.huge_pages = number(field("/proc/meminfo", "HugePages_Total"));
  m.huge_pages_free = number(field("/proc/meminfo", "HugePages_Free"));
  m.cgroup_limit = cgroup_memory_limit();
  std::string modes;  // "always [madvise] never"
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/enabled");
  std::getline(in, modes);
  const size_t open = modes.find('['), close = modes.find(']');
  if (open != std::string::npos && close != std::string::npos && open < close) {
    m.transparent_huge_pages = modes.substr(open + 1, close - open - 1);
  }
  return m;
}

Processor processor() {
  Processor p;
  p.model = field("/proc/cpuinfo", "model name");
  p.features = known_features();
  p.online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  p.affinity = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : p.online;
  p.cgroup_cpus = cgroup_cpu_quota();
  return p;
}

}  // namespace hearth::tools
