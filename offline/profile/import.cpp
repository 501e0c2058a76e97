#include "offline/profile/import.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "core/error.h"
#include "core/file.h"
#include "offline/profile/torch_tensor.h"

namespace hearth::offline {
namespace {

constexpr std::string_view kPrefix = "activation_", kSuffix = ".pt";
constexpr uint64_t kMaxLayer = 4095;

// N of activation_N.pt; nullopt for other names.
std::optional<uint64_t> layer_number(const std::string& name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  const std::string digits = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  uint64_t n = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), n);
  if (error != std::errc() || end != digits.data() + digits.size() || n > kMaxLayer) return std::nullopt;
  return n;
}

std::vector<uint64_t> read_counts(const std::filesystem::path& path) {
  const MappedFile file(path);
  const std::vector<int64_t> values = read_torch_vector(file.bytes(), path.string());
  for (const int64_t v : values) {
    if (v < 0) fail("'{}': a neuron was active {} times, expected 0 or more", path.string(), v);
  }
  return {values.begin(), values.end()};
}

}  // namespace

std::vector<std::vector<uint64_t>> read_powerinfer_counts(const std::filesystem::path& directory) {
  std::error_code error;
  std::map<uint64_t, std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const auto n = layer_number(entry.path().filename().string());
    if (!n) continue;
    if (!files.emplace(*n, entry.path()).second) fail("'{}' has layer {} twice", directory.string(), *n);
  }
  if (error) fail("cannot read the directory '{}': {}", directory.string(), error.message());
  if (files.empty())
    fail("'{}' has no activation_N.pt; expected PowerInfer's activation directory", directory.string());
  std::vector<std::vector<uint64_t>> counts;
  for (const auto& [n, path] : files) {
    if (n != counts.size()) fail("'{}' lacks activation_{}.pt", directory.string(), counts.size());
    counts.push_back(read_counts(path));
  }
  return counts;
}

void import_powerinfer(const std::filesystem::path& directory, std::optional<uint64_t> tokens,
                       model::Sidecar& sidecar) {
  if (sidecar.has_mixtures()) {
    fail("'{}' counts neurons, and '{}' is a mixture of experts; count its experts with `hearth profile -f TEXT`",
         directory.string(), sidecar.model_name);
  }
  const std::vector<std::vector<uint64_t>> counts = read_powerinfer_counts(directory);
  if (counts.size() != sidecar.n_ff.size()) {
    fail("'{}' has {} layers and the model {}", directory.string(), counts.size(), sidecar.n_ff.size());
  }
  uint64_t most = 0;
  for (size_t l = 0; l < counts.size(); ++l) {
    if (static_cast<int64_t>(counts[l].size()) != sidecar.n_ff[l]) {
      fail("'{}': layer {} has {} neurons and the model's {}", directory.string(), l, counts[l].size(),
           sidecar.n_ff[l]);
    }
    for (const uint64_t c : counts[l]) most = std::max(most, c);
  }
  if (most == 0) fail("'{}': no neuron was ever active", directory.string());
  if (tokens && *tokens < most) {
    fail("--tokens {} was given, and a neuron was active {} times; give the number of tokens counted, or leave it out",
         *tokens, most);
  }
  model::Statistics& s = sidecar.statistics;
  s = {};
  s.source = "import of PowerInfer's activation counts";
  s.tokens = tokens.value_or(most);
  s.tokens_estimated = !tokens.has_value();
  s.complete = true;
  s.layers.resize(counts.size());
  for (size_t l = 0; l < counts.size(); ++l) s.layers[l].active = counts[l];
}

}  // namespace hearth::offline
