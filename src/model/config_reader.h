#pragma once
// Numbers and lists of a file's metadata under an architecture's prefix, checked. For the files that make a Config.
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "gguf/gguf.h"
#include "model/architectures.h"
#include "model/config.h"

namespace hearth::model {

class KeyReader {
 public:
  KeyReader(const gguf::File& file, std::string prefix) : file_(file), prefix_(std::move(prefix)) {}

  const gguf::File& file() const { return file_; }
  std::string key(const char* name) const { return prefix_ + name; }
  bool has(const char* name) const { return file_.find(key(name)) != nullptr; }
  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) const {
    fail("'{}': {}", file_.path().string(), fmt::format(text, std::forward<Args>(args)...));
  }

  // A dimension: positive and small enough that products of three stay far below 2^63.
  int64_t dimension(const char* name, int64_t limit = int64_t{1} << 20) const {
    const auto value = file_.require<int64_t>(key(name));
    if (value < 1 || value > limit) refuse("{} is {}, expected 1 to {}", key(name), value, limit);
    return value;
  }
  int64_t dimension_or(const char* name, int64_t otherwise, int64_t limit = int64_t{1} << 20) const {
    return has(name) ? dimension(name, limit) : otherwise;
  }
  double positive(const char* name, double otherwise) const {
    const double value = file_.get<float>(key(name)).value_or(static_cast<float>(otherwise));
    if (!(value > 0) || !std::isfinite(value)) refuse("{} is {}, expected a positive number", key(name), value);
    return value;
  }
  // The same, or 0 for none.
  double positive_or_none(const char* name, double otherwise) const {
    return file_.get<float>(key(name)).value_or(static_cast<float>(otherwise)) == 0 ? 0 : positive(name, otherwise);
  }
  // A truth for every layer; nothing where the key is absent. `full_key` has its prefix.
  std::optional<std::vector<bool>> by_layer(const std::string& full_key, int64_t n_layer) const {
    const gguf::Value* value = file_.find(full_key);
    if (value == nullptr) return std::nullopt;
    const auto* array = std::get_if<gguf::Array>(value);
    const auto* flags = array != nullptr ? std::get_if<std::vector<bool>>(array) : nullptr;
    if (flags == nullptr) refuse("{} is not a list of true and false", full_key);
    if (std::ssize(*flags) != n_layer) {
      refuse("{} has {} entries, expected one for each of {} layers", full_key, flags->size(), n_layer);
    }
    return *flags;
  }

 private:
  const gguf::File& file_;
  std::string prefix_;
};

// Sizes of multi-head latent attention.
void read_latent(const KeyReader& keys, Config& config);
// The attention's part of a configuration whose sizes are there: rotations, windows, scales and caps, by layer.
void read_attention(const KeyReader& keys, const Architecture& arch, Config& config);

}  // namespace hearth::model
