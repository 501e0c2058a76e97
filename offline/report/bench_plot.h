#pragma once
// Plots of what `hearth bench -o json` measured.
#include <nlohmann/json.hpp>
#include <string>

namespace hearth::offline {

// Tokens per second of the rows that generate, with the floor and the plan's expectation where they are known, against
// whichever of budget, threads, context in use, link share, density and context length takes the most values; one line
// for each combination of the others. A complete SVG file. Throws Error when no row generates.
std::string bench_plot_svg(const nlohmann::ordered_json& rows);

}  // namespace hearth::offline
