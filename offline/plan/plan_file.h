#pragma once
// A plan as a JSON file: what loading needs (engine::Placement) and nothing else.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/placement.h"

namespace hearth::offline {

nlohmann::json placement_json(const engine::Placement& placement);

// Atomically.
void save_placement(const engine::Placement& placement, const std::filesystem::path& path);
// Throws Error when the file is no plan, or of another version. Whether it fits a model: engine::check_placement().
engine::Placement load_placement(const std::filesystem::path& path);
engine::Placement parse_placement(const std::string& text, const std::string& file);

}  // namespace hearth::offline
