#pragma once
// Flags as llama.cpp's users type them. CLI11 reads `-ngl 99` as `-n gl`, so such flags are rewritten before parsing.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace hearth::tools {

// `args` without the program's name. Single-dash long flags become ours (-ngl -> --gpu-layers); values of options and
// everything after `--` stay as they are. Throws Error on an unknown subcommand and on a single-dash word that is no
// flag, which CLI11 would take for a short flag with its value glued on.
std::vector<std::string> expand_aliases(const CLI::App& app, std::vector<std::string> args);

}  // namespace hearth::tools
