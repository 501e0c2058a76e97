#include "offline/plan/machine.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

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

std::optional<MachineBandwidth> entry(const json& cache, const std::string& key) {
  const auto it = cache.find(key);
  if (it == cache.end() || !it->is_object()) return std::nullopt;
  MachineBandwidth b;
  for (const auto& [name, field] : {std::pair{"cpu", &b.cpu}, std::pair{"gpu", &b.gpu}, std::pair{"pcie", &b.pcie}}) {
    const auto value = it->find(name);
    if (value == it->end() || !value->is_number()) return std::nullopt;
    *field = value->get<double>();
    if (!std::isfinite(*field) || *field < 0) return std::nullopt;
  }
  return b.cpu > 0 ? std::optional(b) : std::nullopt;
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
    log::warn("the measured bandwidths are not kept: {}", e.what());
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
  if (const auto known = entry(cache, key)) return *known;
  const MachineBandwidth measured = measure();
  if (!cache[key].is_object()) cache[key] = json::object();
  cache[key].update({{"cpu", measured.cpu}, {"gpu", measured.gpu}, {"pcie", measured.pcie}});
  if (path) write_cache(*path, cache);
  return measured;
}

double cached_product_rate(const std::optional<std::filesystem::path>& path, const std::string& key,
                           const std::string& type, const std::function<double()>& measure) {
  json cache = path ? read_cache(*path) : json::object();
  if (!cache[key].is_object()) cache[key] = json::object();
  json& products = cache[key]["products"];
  if (!products.is_object()) products = json::object();
  const auto known = products.find(type);
  if (known != products.end() && known->is_number()) {
    if (const double rate = known->get<double>(); rate > 0 && std::isfinite(rate)) return rate;
  }
  const double measured = measure();
  products[type] = measured;
  if (path) write_cache(*path, cache);
  return measured;
}

}  // namespace hearth::offline
