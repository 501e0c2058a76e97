#pragma once
// The program around the subcommands: parsing, and turning every failure into one line and an exit status.
#include <CLI/CLI.hpp>
#include <memory>

namespace hearth::tools {

// `hearth` with all its subcommands, not parsed yet.
std::unique_ptr<CLI::App> make_app();

// Runs the program. 0: done. 1: the user's error, told in one line on stderr. 130: ended by Ctrl-C.
int hearth_main(int argc, char** argv);

}  // namespace hearth::tools
