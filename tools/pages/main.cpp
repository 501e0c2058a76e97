// Writes the program's man pages and shell completions; run by the build, not installed.
// Usage: hearth-pages FOLDER
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "tools/cli.h"
#include "tools/pages/pages.h"

namespace {

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream out(path, std::ios::binary);
  if (!(out << text << std::flush)) hearth::fail("cannot write {}", path.string());
}

void write_all(const std::filesystem::path& folder) {
  using namespace hearth::tools;
  std::filesystem::remove_all(folder / "man1");  // pages of subcommands that there were
  const auto app = make_app();
  for (const CLI::App* command : all_commands(*app)) {
    write(folder / "man1" / (man_page_name(*command) + ".1"), man_page(*command));
  }
  write(folder / "hearth.bash", bash_completion(*app));
  write(folder / "_hearth", zsh_completion(*app));
  write(folder / "hearth.fish", fish_completion(*app));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2) hearth::fail("usage: hearth-pages FOLDER");
    write_all(argv[1]);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
