#pragma once
// Where tests find data. tests/data travels with the repository; ../shared holds the large models and is optional.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace hearth::test {

inline std::filesystem::path source_dir() {
  return HEARTH_SOURCE_DIR;
}
inline std::filesystem::path data_dir() {
  return source_dir() / "tests" / "data";
}
inline std::filesystem::path shared_dir() {
  return source_dir().parent_path() / "shared";
}

// A directory of this test's own, removed with the object.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "hearth-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace hearth::test

// Skips the test, by name, where the shared material is absent.
#define HEARTH_NEEDS_SHARED(relative)                                                                          \
  do {                                                                                                         \
    if (!std::filesystem::exists(::hearth::test::shared_dir() / (relative))) {                                 \
      GTEST_SKIP() << "needs " << (::hearth::test::shared_dir() / (relative)).string() << ", which is absent"; \
    }                                                                                                          \
  } while (0)
