#pragma once
// Whether a model fits the host's memory, and what is said when it does not.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "model/model.h"

namespace hearth::tools {

// Bytes of the weights if every matrix were of this type; those that take less as they are stay so.
uint64_t bytes_as(const model::Model& model, DType type);

// The types that `hearth quantize` makes of a whole model and that are worth naming, the largest first.
struct TypeSize {
  DType type;
  uint64_t bytes = 0;
};
std::vector<TypeSize> smaller_types(const model::Model& model);

// Throws Error, with the -c that would do, when the KV cache alone takes more than is available. `position_bytes`: of the
// cache, of one position of every sequence.
void check_cache_fits(int64_t n_ctx, uint64_t position_bytes, uint64_t available);

struct HostNeed {
  uint64_t weights = 0;    // bytes that the CPU reads
  uint64_t available = 0;  // for them
  double token_bytes = 0;  // of the weights that one token reads at most
  bool experts = false;    // of which a token reads a few
  std::vector<TypeSize> smaller;
  std::optional<double> disk_rate;  // bytes/s, where it was measured
};
// One line for weights that do not fit and are read from the disk as they are needed; nothing when they fit.
std::optional<std::string> disk_warning(const HostNeed& need);

// Bytes/s of reading a file past the system's cache, in pieces as small as Linux reads ahead of a mapped file, a fraction
// of a second; nullopt where that cannot be done.
constexpr size_t kDiskPiece = size_t{128} << 10;
std::optional<double> measure_disk(const std::filesystem::path& file);

}  // namespace hearth::tools
