#pragma once
// Man pages and shell completions, made from the flags that `hearth --help` knows.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace hearth::tools {

// The program, its subcommands, and theirs, parents first.
std::vector<const CLI::App*> all_commands(const CLI::App& app);

// The page of one command for man(1), section 1; its file is man_page_name() + ".1".
std::string man_page(const CLI::App& command);
// "hearth-predictor-fit"
std::string man_page_name(const CLI::App& command);

// The whole program's completions for a shell.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace hearth::tools
