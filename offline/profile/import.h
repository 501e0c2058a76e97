#pragma once
// PowerInfer's activation statistics: a directory of activation_N.pt, one torch vector a layer with the number of
// tokens that had each neuron active.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "model/sidecar.h"

namespace hearth::offline {

// Counts by layer NUMBER (PowerInfer's solver orders the files by name, where activation_10 comes before activation_2).
// Throws Error when a layer is missing or a file is not what it should be.
std::vector<std::vector<uint64_t>> read_powerinfer_counts(const std::filesystem::path& directory);

// Puts them in place of the sidecar's statistics. `tokens`: how many tokens were counted, which the files do not say;
// without it the most active neuron of all layers is taken to be always active. Throws Error when the shapes differ or
// a count exceeds `tokens`.
void import_powerinfer(const std::filesystem::path& directory, std::optional<uint64_t> tokens, model::Sidecar& sidecar);

}  // namespace hearth::offline
