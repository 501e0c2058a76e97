#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/error.h"
#include "core/file.h"
#include "support/paths.h"

namespace hearth {
namespace {

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(AtomicFile, AppearsOnlyOnCommit) {
  const test::TempDir dir;
  {
    AtomicFile f(dir / "a");
    f.write("hello", 5);
    f.pad_to(8);
    EXPECT_FALSE(std::filesystem::exists(dir / "a"));
    f.commit();
  }
  EXPECT_EQ(read_text_file(dir / "a"), std::string("hello\0\0\0", 8));
}

TEST(AtomicFile, AbandonedLeavesTheOldFileAndNoOther) {
  const test::TempDir dir;
  std::ofstream(dir / "a") << "old";
  {
    AtomicFile f(dir / "a");
    f.write("new", 3);
  }
  EXPECT_EQ(read_text_file(dir / "a"), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

// Nothing has a name before commit(), so that nothing stays behind when the process is killed.
TEST(AtomicFile, HasNoNameWhileItIsWritten) {
  const test::TempDir dir;
  AtomicFile f(dir / "a");
  f.write("new", 3);
  const auto entries = std::distance(std::filesystem::directory_iterator(dir.path()), {});
  const int unnamed = ::open(dir.path().c_str(), O_TMPFILE | O_WRONLY, 0600);
  if (unnamed < 0) GTEST_SKIP() << "this file system has no files without a name: " << std::strerror(errno);
  ::close(unnamed);
  EXPECT_EQ(entries, 0);
  // The name that it takes for a moment may be left from a process of the same number.
  std::ofstream(dir / fmt::format("a.tmp-{}", getpid())) << "left";
  std::ofstream(dir / "a") << "old";
  f.commit();
  EXPECT_EQ(read_text_file(dir / "a"), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

TEST(AtomicFile, NamesThePathAndTheReason) {
  EXPECT_NE(error_of([] { AtomicFile f("/nonexistent-dir/x"); }).find("/nonexistent-dir/x"), std::string::npos);
  const test::TempDir dir;
  EXPECT_NE(error_of([&] { AtomicFile f(dir.path()); }).find("directory"), std::string::npos);
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const test::TempDir dir;
  std::ofstream(dir / "empty");
  EXPECT_NE(error_of([&] { MappedFile f(dir / "empty"); }).find("empty"), std::string::npos);
  EXPECT_NE(error_of([&] { MappedFile f(dir.path()); }).find("directory"), std::string::npos);
  EXPECT_NE(error_of([&] { MappedFile f(dir / "absent"); }).find("No such file"), std::string::npos);
  EXPECT_NE(error_of([] { MappedFile f("/dev/null"); }).find("regular"), std::string::npos);
}

TEST(MappedFile, MovesItsMapping) {
  const test::TempDir dir;
  std::ofstream(dir / "a") << "abc";
  MappedFile a(dir / "a");
  const MappedFile b = std::move(a);
  EXPECT_EQ(static_cast<char>(b.bytes()[2]), 'c');
}

TEST(ReadTextFile, KeepsToItsLimit) {
  const test::TempDir dir;
  std::ofstream(dir / "a") << std::string(100, 'x');
  EXPECT_EQ(read_text_file(dir / "a", 100).size(), 100u);
  EXPECT_NE(error_of([&] { read_text_file(dir / "a", 99); }).find("at most 99"), std::string::npos);
}

}  // namespace
}  // namespace hearth
