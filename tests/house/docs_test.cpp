// The docs hold together: links lead somewhere, the code names pages that exist, the README stays short, and a packaged
// tool finds no misspelt word.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "links.h"
#include "support/paths.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Files below the folders of the repository (not of builds) that end so.
std::vector<fs::path> files(const std::set<std::string>& extensions) {
  std::vector<fs::path> found;
  for (const char* folder :
       {"src", "cpu", "cuda", "predictor", "offline", "tools", "tests", "bench", "cmake", "docs", "models"}) {
    for (const auto& entry : fs::recursive_directory_iterator(source_dir() / folder)) {
      if (entry.is_regular_file() && extensions.contains(entry.path().extension().string())) found.push_back(entry);
    }
  }
  for (const auto& entry : fs::directory_iterator(source_dir())) {
    if (entry.is_regular_file() && extensions.contains(entry.path().extension().string())) found.push_back(entry);
  }
  return found;
}

TEST(House, NoLinkIsDead) {
  const auto pages = files({".md"});
  ASSERT_GT(pages.size(), 30u);
  for (const fs::path& page : pages) {
    if (page.string().find("tests/data/") != std::string::npos) continue;  // of others
    for (const std::string& dead : dead_links(page, read(page))) ADD_FAILURE() << page << " links to " << dead;
  }
}

// In comments, messages and scripts; gguf.md is ggml's.
TEST(House, PagesThatTheCodeNamesExist) {
  size_t named = 0;
  for (const fs::path& file : files({".cpp", ".h", ".cu", ".cuh", ".sh", ".txt", ".cmake", ""})) {
    if (file.filename() == "house_test.cpp" || file.string().find("tests/data/") != std::string::npos) continue;
    const std::string text = read(file);
    for (size_t at = text.find("docs/"); at != std::string::npos; at = text.find("docs/", at + 1)) {
      const size_t length = text.substr(at, 200).find(".md");
      const std::string page = text.substr(at, length == std::string::npos ? 0 : length + 3);
      if (page.empty() || page.find_first_of(" \"*\n") != std::string::npos || page == "docs/gguf.md") continue;
      EXPECT_TRUE(fs::exists(source_dir() / page)) << file << " names " << page;
      ++named;
    }
  }
  EXPECT_GT(named, 5u);
}

// Figures are in tables and plots.
TEST(House, TheReadmeIsForReadersInAHurry) {
  const std::string text = read(source_dir() / "README.md");
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 150);
  for (const std::string& sentence : sentences(text)) EXPECT_LE(figures_in(sentence), 2) << sentence;
}

TEST(House, TheIndexOfDocsLeadsToEveryPage) {
  const std::string index = read(source_dir() / "docs" / "README.md");
  for (const char* folder : {"tutorial", "how-to", "reference", "explanation", "archive"}) {
    for (const auto& page : fs::directory_iterator(source_dir() / "docs" / folder)) {
      if (page.path().extension() != ".md") continue;
      const std::string link = std::string(folder) + "/" + page.path().filename().string();
      EXPECT_NE(index.find("(" + link + ")"), std::string::npos) << "docs/README.md does not link " << link;
    }
  }
}

// tools/test installs codespell where it may; elsewhere a machine may lack it.
TEST(House, NoWordIsMisspelt) {
  if (std::system("codespell --version >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "needs codespell, which is not installed";
  const TempDir dir;
  const auto log = dir / "codespell.log";
  const std::string command =
      "cd '" + source_dir().string() + "' && codespell --skip '*.svg' README.md CHANGELOG.md docs" +
      " models/README.md src cpu cuda predictor offline tools bench >'" + log.string() + "' 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0) << read(log);
}

// Each check is shown what it is there to find.
TEST(House, TheChecksOfDocsBite) {
  const TempDir dir;
  std::ofstream(dir / "b.md") << "# Two words\n\n```\n# no heading\n```\n# Two words\n";
  const auto dead = [&](const std::string& text) { return dead_links(dir / "a.md", text).size(); };
  EXPECT_EQ(dead("[x](b.md) [x](b.md#two-words) [x](b.md#two-words-1) [x](https://example.org/none) `[x](none.md)`"),
            0u);
  EXPECT_EQ(dead("[x](none.md)"), 1u);
  EXPECT_EQ(dead("![x](none.svg)"), 1u);
  EXPECT_EQ(dead("[x](b.md#no-heading)"), 1u);
  EXPECT_EQ(dead("[x](b.md#two-words-2)"), 1u);
  EXPECT_EQ(dead("# Own\n[x](#own) [x](#other)"), 1u);
  EXPECT_EQ(dead("```\n[x](none.md)\n```\n"), 0u);
  EXPECT_EQ(sentences("# Head\n\nOne 1.5,\ntwo `3`. Three!\n| 1 | 2 |\n- Four\n").size(), 4u);
  EXPECT_EQ(figures_in("The H200 made 1.5 to 2 of 3,000 on 2026-11-23 ([x](y2.md))."), 4);
  EXPECT_EQ(anchor_of("PowerInfer's files, 1.2 `x`"), "powerinfers-files-12-x");
}

}  // namespace
}  // namespace hearth::test
