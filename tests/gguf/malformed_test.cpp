// Every damaged or hostile file ends in one clear line, and never in a crash or in memory that the file's size does not
// justify.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <set>

#include "core/error.h"
#include "gguf/gguf.h"
#include "gguf/malformed.h"
#include "support/paths.h"

namespace hearth {
namespace {

using test::as_bytes;
using test::Malformed;

// The error of opening an image; empty when there was none.
std::string error_of(std::string_view image) {
  const std::vector<char> aligned(image.begin(), image.end());
  try {
    gguf::File::from_bytes(as_bytes({aligned.data(), aligned.size()}), "hostile.gguf");
    return {};
  } catch (const Error& e) {
    return e.what();
  }
}

TEST(GgufMalformed, EachKindHasItsMessage) {
  const std::vector<Malformed> all = test::malformed_images();
  EXPECT_GE(all.size(), 40u);
  std::set<std::string> names;
  for (const Malformed& m : all) {
    SCOPED_TRACE(m.name);
    EXPECT_TRUE(names.insert(m.name).second);
    const std::string error = error_of(m.image);
    EXPECT_NE(error.find(m.message), std::string::npos) << "message: " << error;
    EXPECT_NE(error.find("hostile.gguf"), std::string::npos) << "message: " << error;
    EXPECT_EQ(error.find('\n'), std::string::npos);
    EXPECT_LT(error.size(), 300u);
  }
}

TEST(GgufMalformed, SoundImageIsRead) {
  EXPECT_EQ(error_of(test::sound_image()), "");
}

TEST(GgufMalformed, EveryTruncationIsRefused) {
  const std::string sound = test::sound_image();
  for (size_t n = 1; n < sound.size(); ++n) EXPECT_NE(error_of(sound.substr(0, n)), "") << n << " bytes";
}

// Whatever single bit is wrong: an Error or a file whose tensors can all be read, nothing else.
TEST(GgufMalformed, EveryFlippedBitIsSurvived) {
  const std::string sound = test::sound_image();
  for (size_t bit = 0; bit < sound.size() * 8; ++bit) {
    std::string flipped = sound;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    try {
      const std::vector<char> aligned(flipped.begin(), flipped.end());
      const gguf::File file = gguf::File::from_bytes(as_bytes({aligned.data(), aligned.size()}), "flipped.gguf");
      size_t sum = 0;
      for (const gguf::TensorInfo& t : file.tensors()) sum += file.data(t).size();
      EXPECT_LE(sum, flipped.size());
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()), "");
    }
  }
}

// Runs `body` in a child process that may map at most `extra` bytes more than it has now; true when it returned 0.
template <typename Body>
bool within_memory([[maybe_unused]] size_t extra, Body body) {
  const pid_t child = fork();
  if (child == 0) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    // (Sanitizers map terabytes for themselves, and refuse absurd allocations on their own.)
    std::ifstream statm("/proc/self/statm");
    size_t pages = 0;
    statm >> pages;
    const rlim_t limit = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + extra;
    const rlimit memory{limit, limit};
    if (setrlimit(RLIMIT_AS, &memory) != 0) _exit(99);
#endif
    int rc = 98;
    try {
      rc = body();
    } catch (...) {  // std::bad_alloc above all
    }
    _exit(rc);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(GgufMalformed, NoRunawayAllocation) {
  EXPECT_TRUE(within_memory(size_t{8} << 20, [] {
    for (const Malformed& m : test::malformed_images()) {
      if (error_of(m.image).empty()) return 1;
    }
    return 0;
  }));
}

// The check above has teeth: the same limit stops an allocation of 64 MiB.
TEST(GgufMalformed, MemoryLimitWorks) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers do not run under a memory limit";
#endif
  EXPECT_FALSE(within_memory(size_t{8} << 20, [] {
    std::vector<char> v(size_t{64} << 20, 'x');
    return v[v.size() / 2] == 'x' ? 0 : 1;
  }));
}

// 8 GiB that take no disk space: the claim fits the file, but no metadata is that long.
TEST(GgufMalformed, HugeSparseFileIsRefused) {
  const test::TempDir dir;
  const auto path = dir / "sparse.gguf";
  test::write_file(path, test::ImageBuilder().header(0, 1).key("k", 9).put(uint32_t{8}).put(uint64_t{1} << 29).bytes());
  std::error_code ec;
  std::filesystem::resize_file(path, uint64_t{8} << 30, ec);
  if (ec) GTEST_SKIP() << "the file system has no sparse files: " << ec.message();
  EXPECT_TRUE(within_memory((size_t{8} << 30) + (size_t{64} << 20), [&] {  // the mapping itself counts
    try {
      gguf::File::open(path);
    } catch (const Error& e) {
      return std::string(e.what()).find("128 MiB that metadata may take") != std::string::npos ? 0 : 2;
    }
    return 1;
  }));
}

TEST(GgufMalformed, NotAFile) {
  const test::TempDir dir;
  test::write_file(dir / "empty.gguf", "");
  EXPECT_THROW(gguf::File::open(dir / "empty.gguf"), Error);
  EXPECT_THROW(gguf::File::open(dir.path()), Error);
  EXPECT_THROW(gguf::File::open(dir / "absent.gguf"), Error);
  EXPECT_THROW(gguf::File::open("/dev/null"), Error);
  EXPECT_FALSE(gguf::File::looks_like_gguf(dir / "empty.gguf"));
  EXPECT_FALSE(gguf::File::looks_like_gguf(dir / "absent.gguf"));
  test::write_file(dir / "good.gguf", test::sound_image());
  EXPECT_TRUE(gguf::File::looks_like_gguf(dir / "good.gguf"));
}

// A few of the kinds are committed as files, for other programs to try. HEARTH_WRITE_TEST_DATA=1 writes them anew.
TEST(GgufMalformed, CommittedFilesAreWhatTheGeneratorMakes) {
  const std::set<std::string> committed = {"big_endian",        "huge_array",       "huge_string",
                                           "nested_array",      "duplicate_tensor", "overlapping_tensors",
                                           "elements_overflow", "cut_in_data"};
  const auto dir = test::data_dir() / "malformed";
  size_t seen = 0;
  for (const Malformed& m : test::malformed_images()) {
    if (committed.count(m.name) == 0) continue;
    ++seen;
    const auto path = dir / (m.name + ".gguf");
    if (std::getenv("HEARTH_WRITE_TEST_DATA") != nullptr) {
      std::filesystem::create_directories(dir);
      test::write_file(path, m.image);
    }
    std::ifstream in(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    EXPECT_EQ(bytes, m.image) << path;
    EXPECT_THROW(gguf::File::open(path), Error) << path;
  }
  EXPECT_EQ(seen, committed.size());
}

}  // namespace
}  // namespace hearth
