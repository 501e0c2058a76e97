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

namespace {

// The tightest limit among a folder and those above it, up to `top`. Versions 1 and 2 name their files differently.
void tighten(const std::filesystem::path& top, const std::string& path, const char* limit_file, const char* used_field,
             std::optional<CgroupMemory>& found) {
  std::filesystem::path folder = std::filesystem::path(top.string() + path).lexically_normal();
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) folder = top;  // of a container, which sees its own as the top
  for (;; folder = folder.parent_path()) {
    std::string text;
    std::ifstream(folder / limit_file) >> text;
    const size_t limit = number(text);  // "max" reads as 0; version 1 says "no limit" with a number near 2^63
    if (limit > 0 && limit < (size_t{1} << 60) && (!found || limit < found->limit)) {
      found = CgroupMemory{limit, 0};
      std::ifstream stat(folder / "memory.stat");
      size_t bytes = 0;
      for (std::string name; stat >> name >> bytes;) {
        if (name == used_field) found->used = bytes;
      }
    }
    if (folder.string().size() <= top.string().size() || !folder.has_relative_path()) return;
  }
}

}  // namespace

std::optional<CgroupMemory> cgroup_memory(const std::string& membership, const std::filesystem::path& mounted) {
  std::optional<CgroupMemory> found;
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // "4:memory:/path" or "0::/path"
    const size_t first = line.find(':'), second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) tighten(mounted, path, "memory.max", "anon", found);
    if (controllers == "memory") tighten(mounted / "memory", path, "memory.limit_in_bytes", "total_rss", found);
  }
  return found;
}

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
  std::ifstream cgroups("/proc/self/cgroup");
  if (const auto cgroup = cgroup_memory({std::istreambuf_iterator<char>(cgroups), {}}, "/sys/fs/cgroup")) {
    m.cgroup_limit = cgroup->limit, m.cgroup_used = cgroup->used;
  }
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
