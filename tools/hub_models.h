#pragma once
// Models by their names on the Hugging Face hub: -hf wherever -m is taken, and what `hearth pull` shows.
#include <CLI/CLI.hpp>
#include <string>

#include "hub/pull.h"

namespace hearth::tools {

// --hf-repo (llama.cpp's -hf) beside `model`, the option -m of a subcommand, which need not be given then.
CLI::Option* add_hf_repo_option(CLI::App& sub, CLI::Option& model);

// Gives -m of the subcommands that were parsed the files that their -hf names, downloaded where they have to be. Before
// a subcommand runs. Ctrl-C ends it with the status of an interrupted program.
void resolve_hf_repos(CLI::App& app);

// Brings a model, or (for -hf) takes it from the cache where the hub cannot be asked. Shows progress on a terminal.
enum class Source { hub, hub_or_cache };
hub::Pulled bring_model(const std::string& name, Source source);

}  // namespace hearth::tools
