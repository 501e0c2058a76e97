// Killed at any moment, while it loads, while it generates or while it writes a file, the program leaves nothing
// behind: no temporary file, no shared memory, no half of a file under its final name.
#include <algorithm>
#include <cstdlib>
#include <set>

#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

namespace fs = std::filesystem;

std::set<std::string> entries(const fs::path& folder) {
  std::set<std::string> names;
  if (!fs::exists(folder)) return names;
  for (const auto& e : fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied))
    names.insert(fs::relative(e.path(), folder).string());
  return names;
}

class Kill : public ::testing::Test {
 protected:
  void SetUp() override {
    demo_ = (source_dir() / "models" / "hearth-demo.gguf").string();
    setenv("XDG_CACHE_HOME", (dir_ / "cache").c_str(), 1);
  }
  void TearDown() override { unsetenv("XDG_CACHE_HOME"); }

  // What is in the program's folders. The measured bandwidths are meant to stay.
  std::set<std::string> left() const {
    std::set<std::string> names = entries(dir_.path());
    for (const char* meant : {"cache", "cache/hearth", "cache/hearth/machine.json"}) names.erase(meant);
    return names;
  }
  static void kill_now(Program& program) {
    const std::string pid = std::to_string(program.pid());
    program.signal(SIGKILL);
    program.wait();
    for (const std::string& name : entries("/dev/shm")) {
      EXPECT_EQ(name.find(pid), std::string::npos) << "shared memory " << name << " of process " << pid;
      EXPECT_EQ(name.find("hearth"), std::string::npos) << "shared memory " << name;
    }
  }
  static void kill_after(const std::vector<std::string>& args, std::chrono::milliseconds time) {
    Program program(args);
    std::this_thread::sleep_for(time);
    kill_now(program);
  }

  TempDir dir_;
  std::string demo_;
};

constexpr int kMoments[] = {0, 1, 3, 10, 20, 40, 80, 160, 320};  // ms

TEST_F(Kill, WhileItLoadsAndGenerates) {
  const std::set<std::string> before = left();
  for (const int ms : kMoments) {
    kill_after({"run", "-m", demo_, "-p", "Once", "-n", "400", "--device", "cpu"}, std::chrono::milliseconds(ms));
    EXPECT_EQ(left(), before) << "killed after " << ms << " ms";
  }
  Program program({"run", "-m", demo_, "-p", "Once", "-n", "400", "--ignore-eos", "--device", "cpu"});
  ASSERT_TRUE(program.wait_for_output(40)) << "it was to be in the middle of a text";
  kill_now(program);
  EXPECT_EQ(left(), before);
}

// Two threads, a mailbox and a page-locked arena; the oracle stands in for the GPU. The first ones measure the machine.
TEST_F(Kill, ADividedModel) {
  const std::set<std::string> before = left();
  const std::vector<std::string> args = {"run",  "-m",    demo_,       "-p",          "Once", "-n",
                                         "400",  "-c",    "128",       "-b",          "16",   "--vram-budget",
                                         "0.21", "--isa", "reference", "--ignore-eos"};
  for (const int ms : {30, 100, 400, 1600}) {
    kill_after(args, std::chrono::milliseconds(ms));
    EXPECT_EQ(left(), before) << "killed after " << ms << " ms";
  }
  Program program(args);
  ASSERT_TRUE(program.wait_for_output(10)) << program.wait().err;
  kill_now(program);
  EXPECT_EQ(left(), before);
}

TEST_F(Kill, WhileItWritesAFile) {
  const std::string out = (dir_ / "out.gguf").string();
  const std::vector<std::string> args = {"quantize", demo_, out, "f16", "--allow-requantize"};
  const std::set<std::string> before = left();
  const Outcome whole = hearth(args);
  ASSERT_EQ(whole.status, 0) << whole.err;
  const std::string expected = slurp(out);
  fs::remove(out);
  for (const int ms : kMoments) {
    kill_after(args, std::chrono::milliseconds(ms));
    std::set<std::string> now = left();
    if (now.erase("out.gguf") == 1) {
      EXPECT_TRUE(slurp(out) == expected) << "half a file under its final name, killed after " << ms << " ms";
      fs::remove(out);
    }
    EXPECT_EQ(now, before) << "killed after " << ms << " ms";
  }
}

}  // namespace
}  // namespace hearth::test
