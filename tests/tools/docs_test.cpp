// The pages under docs/commands say what --help says, and the walk-through does what it says.
#include <cstdlib>

#include "program.h"

namespace hearth::test {
namespace {

int shell(const std::string& command) {
  return std::system(command.c_str());  // NOLINT: a script of this repository
}

TEST(Docs, CommandPagesAreWhatHelpPrints) {
  TempDir fresh;
  const auto committed = source_dir() / "docs" / "commands";
  ASSERT_EQ(shell((source_dir() / "docs" / "commands.sh").string() + " " HEARTH_BINARY " " + fresh.path().string()), 0);
  size_t pages = 0;
  for (const auto& page : std::filesystem::directory_iterator(fresh.path())) {
    const auto name = page.path().filename();
    EXPECT_EQ(slurp(committed / name), slurp(page.path()))
        << name << " is not up to date; run docs/commands.sh with the program's path";
    ++pages;
  }
  EXPECT_GE(pages, 12u);
  for (const auto& page : std::filesystem::directory_iterator(committed)) {
    EXPECT_TRUE(std::filesystem::exists(fresh.path() / page.path().filename())) << page.path() << " has no subcommand";
  }
}

TEST(Docs, TheWalkThroughRuns) {
  TempDir dir;
  const std::string log = (dir / "log").string();
  const int status =
      shell((source_dir() / "tools" / "walkthrough").string() + " --quick --binary " HEARTH_BINARY " --dir " +
            (dir / "work").string() + " >" + log + " 2>&1");
  const std::string text = slurp(log);
  ASSERT_EQ(status, 0) << text;
  for (const char* said : {"hit rate", "expected: ", "Chosen: ", "against dense", "report.html"}) {
    EXPECT_NE(text.find(said), std::string::npos) << said << " is missing in\n" << text;
  }
  const std::string page = slurp(dir / "work" / "report.html");
  for (const char* said : {"</html>", "How often neurons fire", "What thresholds cost", "prefers-color-scheme"}) {
    EXPECT_NE(page.find(said), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace hearth::test
