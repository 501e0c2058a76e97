// The house's rules hold in every file: include arrows, CUDA headers, file sizes, nothing left unfinished.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>

#include "rules.h"
#include "support/paths.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

constexpr std::array kFolders = {"src",   "cpu",   "cuda",  "predictor", "offline",
                                 "tools", "tests", "bench", "cmake",     "docs"};

bool is_checked(const fs::path& path) {
  static constexpr std::array kExtensions = {".cpp", ".h", ".cu", ".cuh", ".cmake", ".txt", ".md", ".sh", ""};
  const std::string extension = path.extension().string();
  return std::find(kExtensions.begin(), kExtensions.end(), extension) != kExtensions.end();
}

std::vector<std::string> source_files() {
  std::vector<std::string> files;
  for (const char* folder : kFolders) {
    if (!fs::exists(source_dir() / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(source_dir() / folder)) {
      const std::string relative = fs::relative(entry.path(), source_dir()).generic_string();
      const bool data = relative.rfind("tests/data/", 0) == 0 || relative.rfind("tests/fuzz/corpus", 0) == 0;
      if (entry.is_regular_file() && !data && is_checked(entry.path())) files.push_back(relative);
    }
  }
  return files;
}

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(House, EveryFileKeepsTheRules) {
  const std::vector<std::string> files = source_files();
  ASSERT_GT(files.size(), 50u) << "the sources were not found under " << source_dir();
  for (const std::string& file : files) {
    for (const std::string& v : violations(file, read(source_dir() / file))) ADD_FAILURE() << v;
  }
}

TEST(House, EveryFolderOfTheLayoutHasItsRow) {
  for (const auto& entry : fs::directory_iterator(source_dir() / "src")) {
    if (!entry.is_directory()) continue;
    EXPECT_NE(detail::arrows_of(entry.path().filename().string()), nullptr) << entry.path();
  }
}

TEST(House, ArrowsHaveNoCycle) {
  // Each row may only point at rows above it.
  std::vector<std::string_view> above;
  for (const Arrows& a : arrows()) {
    for (const std::string_view to : a.to) EXPECT_NE(std::find(above.begin(), above.end(), to), above.end()) << to;
    above.push_back(a.from);
  }
}

using Targets = std::map<std::string, std::set<std::string>>;

Targets documented_in_the_rules() {
  Targets targets;
  for (const Arrows& a : arrows()) targets[std::string(a.from)].insert(a.to.begin(), a.to.end());
  return targets;
}

// The second group of every match of `line` is a folder that the file's own folder points at.
void add_matches(const std::string& text, const std::regex& line, const std::string& from, Targets& targets) {
  for (std::sregex_iterator m(text.begin(), text.end(), line), end; m != end; ++m) {
    const std::string to = (*m)[1];
    if (to != from && detail::arrows_of(to) != nullptr) targets[from].insert(to);
  }
}

TEST(House, ArrowsAreExactlyThoseOfTheCode) {
  static const std::regex include(R"(#\s*include\s*"(\w+)/[^"]*")");
  Targets targets;
  for (const Arrows& a : arrows()) targets[std::string(a.from)];
  for (const std::string& file : source_files()) {
    const std::string from = module_of(file);
    const bool source = fs::path(file).extension() != ".md" && fs::path(file).extension() != ".txt";
    if (source && detail::arrows_of(from) != nullptr) add_matches(read(source_dir() / file), include, from, targets);
  }
  EXPECT_EQ(targets, documented_in_the_rules());
}

TEST(House, ArrowsAreExactlyThoseOfCMake) {
  static const std::regex library(R"(hearth_(\w+))");
  Targets targets;
  for (const Arrows& a : arrows()) {
    const std::string from(a.from);
    targets[from];
    fs::path folder = source_dir() / "src" / from;
    if (!fs::exists(folder)) folder = source_dir() / from;
    const std::string text = read(folder / "CMakeLists.txt");
    const std::regex links("target_link_libraries\\(hearth_" + from + "\\b([^)]*)\\)");
    for (std::sregex_iterator m(text.begin(), text.end(), links), end; m != end; ++m) {
      add_matches((*m)[1], library, from, targets);
    }
  }
  EXPECT_EQ(targets, documented_in_the_rules());
}

// A line of docs/explanation/architecture.md: "engine    -> model core".
TEST(House, ArrowsAreExactlyThoseOfTheDocs) {
  const std::string text = read(source_dir() / "docs/explanation/architecture.md");
  static const std::regex line(R"((^|\n)(\w+) +->([\w -]*)(?=\n))"), word(R"((\w+))");
  Targets targets;
  for (std::sregex_iterator m(text.begin(), text.end(), line), end; m != end; ++m) {
    targets[(*m)[2]];
    add_matches((*m)[3], word, (*m)[2], targets);
  }
  EXPECT_EQ(targets, documented_in_the_rules());
}

// Each rule is shown a file that breaks it.
TEST(House, TheRulesBite) {
  const auto n = [](const std::string& path, const std::string& text) { return violations(path, text).size(); };
  EXPECT_EQ(n("src/core/a.h", "#include \"gguf/gguf.h\"\n"), 1u);
  EXPECT_EQ(n("src/model/a.cpp", "#include \"engine/engine.h\"\n"), 1u);
  EXPECT_EQ(n("cpu/a.cpp", "  #  include \"cuda/cuda.h\"\n"), 1u);
  EXPECT_EQ(n("src/engine/a.cpp", "#include \"tools/common.h\"\n"), 1u);
  EXPECT_EQ(n("offline/x/a.cpp", "#include \"cuda/cuda.h\"\n"), 1u);
  EXPECT_EQ(n("src/engine/a.cpp", "#include <cuda_runtime.h>\n"), 1u);
  EXPECT_EQ(n("cuda/a.h", "#include <cublas_v2.h>\n"), 1u);
  EXPECT_EQ(n("tools/a.cpp", "#include <cub/cub.cuh>\n"), 1u);
  EXPECT_EQ(n("tools/a.cpp",
              "#ifdef HEARTH_"
              "CUDA\n"),
            1u);
  EXPECT_EQ(n("src/core/a.cpp",
              "#if defined(HEARTH_HAS_"
              "CUDA)\n"),
            1u);
  EXPECT_EQ(n("docs/a.md",
              "a TO"
              "DO remains\n"),
            1u);
  EXPECT_EQ(n("tools/a.cpp",
              "// FIX"
              "ME\n"),
            1u);
  std::string lengthy;
  for (int i = 0; i <= kMostLines; ++i) lengthy += "\n";
  EXPECT_EQ(n("tools/a.cpp", lengthy), 1u);

  EXPECT_EQ(n("src/engine/a.cpp", "#include \"cuda/cuda.h\"\n"), 1u);
  EXPECT_EQ(n("tools/a.cpp", "#include \"cuda/cuda.h\"\n#include \"engine/b.h\"\n#include <vector>\n"), 0u);
  EXPECT_EQ(n("cuda/a.cu", "#include <cuda_runtime.h>\n#include <cub/cub.cuh>\n#include \"core/device.h\"\n"), 0u);
  EXPECT_EQ(n("cuda/a.cpp",
              "#ifdef HEARTH_"
              "CUDA\n"),
            0u);
  EXPECT_EQ(n("tools/a.cpp", "#include \"offline/a.h\"\n#include \"text/b.h\"\n"), 0u);
}

}  // namespace
}  // namespace hearth::test
