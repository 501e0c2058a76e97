#include "offline/plan/machine.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace hearth::offline {
namespace {

using nlohmann::json;

std::string processor_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

// All entries of the cache; an object, empty when there is none.
json read_cache(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return json::object();
  try {
    json j = json::parse(read_text_file(path, 1 << 20), nullptr, false);
    if (j.is_object()) return j;
    log::warn("'{}' is damaged; measuring again", path.string());
  } catch (const Error& e) {
    log::warn("{}; measuring again", e.what());
  }
  return json::object();
}

using Figures = std::vector<std::pair<const char*, double*>>;

// Reads all of them, or returns false: one is missing, or no number of at least 0.
bool read_figures(const json& kept, const Figures& figures) {
  if (!kept.is_object()) return false;
  for (const auto& [name, figure] : figures) {
    const auto value = kept.find(name);
    if (value == kept.end() || !value->is_number()) return false;
    *figure = value->get<double>();
    if (!std::isfinite(*figure) || *figure < 0) return false;
  }
  return true;
}

void write_figures(json& kept, const Figures& figures) {
  if (!kept.is_object()) kept = json::object();
  for (const auto& [name, figure] : figures) kept[name] = *figure;
}

// The member of an object, which it becomes if it is none.
json& member(json& object, const std::string& name) {
  if (!object.is_object()) object = json::object();
  return object[name];
}

void write_cache(const std::filesystem::path& path, const json& cache) {
  try {
    std::error_code error;
    std::filesystem::create_directories(path.parent_path(), error);
    if (error) fail("cannot make '{}': {}", path.parent_path().string(), error.message());
    const std::string text = cache.dump(2) + "\n";
    AtomicFile out(path);
    out.write(text.data(), text.size());
    out.commit();
  } catch (const Error& e) {
    log::warn("what was measured is not kept: {}", e.what());
  }
}

}  // namespace

std::optional<std::filesystem::path> machine_cache_path() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return std::filesystem::path(cache) / "hearth" / "machine.json";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::filesystem::path(home) / ".cache" / "hearth" / "machine.json";
  }
  return std::nullopt;
}

std::string machine_key(int n_threads, const std::string& gpu_name) {
  return fmt::format("{}, {} threads | {}", processor_name(), n_threads, gpu_name.empty() ? "no GPU" : gpu_name);
}

MachineBandwidth cached_bandwidth(const std::optional<std::filesystem::path>& path, const std::string& key,
                                  const std::function<MachineBandwidth()>& measure) {
  json cache = path ? read_cache(*path) : json::object();
  json& kept = member(cache, key);
  MachineBandwidth b;
  const Figures figures = {{"cpu", &b.cpu}, {"gpu", &b.gpu}, {"pcie", &b.pcie}};
  if (read_figures(kept, figures) && b.cpu > 0) return b;
  b = measure();
  write_figures(kept, figures);
  if (path) write_cache(*path, cache);
  return b;
}

double cached_product_rate(const std::optional<std::filesystem::path>& path, const std::string& key,
                           const std::string& type, const std::function<double()>& measure) {
  json cache = path ? read_cache(*path) : json::object();
  json& kept = member(member(cache, key), "products");
  double rate = 0;
  const Figures figures = {{type.c_str(), &rate}};
  if (read_figures(kept, figures) && rate > 0) return rate;
  rate = measure();
  write_figures(kept, figures);
  if (path) write_cache(*path, cache);
  return rate;
}

KernelRates cached_rates(const std::optional<std::filesystem::path>& path, const std::string& key,
                         const std::string& type, bool with_gpu, const std::function<KernelRates()>& measure) {
  json cache = path ? read_cache(*path) : json::object();
  json& kept = member(member(member(cache, key), "kernels"), type);
  KernelRates r;
  Figures figures = {{"cpu_dense", &r.cpu_dense}, {"cpu_sparse", &r.cpu_sparse}, {"fetched", &r.fetched_speedup}};
  if (with_gpu) {
    figures.insert(figures.end(),
                   {{"gpu_dense", &r.gpu_dense}, {"gpu_sparse", &r.gpu_sparse}, {"handoff", &r.handoff_seconds}});
  }
  const auto complete = [&] {
    return std::all_of(figures.begin(), figures.end(), [](auto& f) { return *f.second > 0; });
  };
  if (read_figures(kept, figures) && complete()) return r;
  r = measure();
  if (!complete()) return r;
  write_figures(kept, figures);
  if (path) write_cache(*path, cache);
  return r;
}

Speeds kept_speeds(const std::optional<std::filesystem::path>& path, const std::string& key, const std::string& model) {
  json cache = path ? read_cache(*path) : json::object();
  json& kept = member(member(member(cache, key), "speeds"), model);
  Speeds speeds;
  for (const auto& [way, speed] : kept.items()) {
    if (speed.is_number() && std::isfinite(speed.get<double>()) && speed.get<double>() >= 0) speeds[way] = speed;
  }
  return speeds;
}

void keep_speeds(const std::optional<std::filesystem::path>& path, const std::string& key, const std::string& model,
                 const Speeds& speeds) {
  if (!path) return;
  json cache = read_cache(*path);
  member(member(member(cache, key), "speeds"), model) = speeds;
  write_cache(*path, cache);
}

}  // namespace hearth::offline
