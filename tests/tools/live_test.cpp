// The line that shows progress on a terminal, and only there.
#include <sys/ioctl.h>

#include <cmath>

#include "program.h"
#include "support/tiny_model.h"
#include "tools/progress.h"

namespace hearth::test {
namespace {

TEST(LiveText, SaysWhatIsKnown) {
  EXPECT_EQ(tools::live_text("tokens", 120, 400, 38.21, 0.9213, 7.3),
            "120 of 400 tokens, 38.2 tokens/s, 92.1 % hits, 7 s left");
  EXPECT_EQ(tools::live_text("repetitions", 0, 5, 0, NAN, -1), "0 of 5 repetitions");
}

// What the program writes to a terminal of 24 rows and 60 columns that is its stderr, and its stdout if `both`.
std::string on_terminal(std::vector<std::string> args, bool both) {
  const int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) return "";
  const winsize size{.ws_row = 24, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
  ioctl(master, TIOCSWINSZ, &size);
  args.insert(args.begin(), HEARTH_BINARY);
  std::vector<char*> argv;
  for (std::string& a : args) argv.push_back(a.data());
  argv.push_back(nullptr);
  const std::string name = ptsname(master);
  const pid_t pid = fork();
  if (pid == 0) {
    const int terminal = open(name.c_str(), O_RDWR | O_NOCTTY), null = open("/dev/null", O_RDWR);
    dup2(null, 0), dup2(both ? terminal : null, 1), dup2(terminal, 2);
    execv(argv[0], argv.data());
    _exit(127);
  }
  std::string text;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(master, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(n));
  int status = 0;
  waitpid(pid, &status, 0);
  close(master);
  EXPECT_EQ(status, 0) << text;
  return text;
}

class Live : public testing::Test {
 protected:
  void SetUp() override { write_tiny_model(model_, {.n_ctx = 512}); }
  std::vector<std::string> run(std::vector<std::string> more) const {
    std::vector<std::string> args = {"run", "-m",           model_,     "-p",  "the",          "-n", "200", "--temp",
                                     "0",   "--ignore-eos", "--device", "cpu", "--no-measure", "-c", "256"};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  TempDir dir_;
  std::string model_ = (dir_ / "m.gguf").string();
};

TEST_F(Live, RunShowsALineAndTakesItAway) {
  const std::string text = on_terminal(run({"--stats"}), false);
  const size_t shown = text.find("\r\033[K"), cleared = text.rfind("\r\033[K");
  ASSERT_NE(shown, std::string::npos) << text;
  EXPECT_NE(text.find(" of 200 tokens"), std::string::npos) << text;
  EXPECT_LT(shown, cleared);
  EXPECT_EQ(text.find("tokens, ", cleared), std::string::npos) << "something is left of it";
  EXPECT_EQ(on_terminal(run({}), false).find('\033'), std::string::npos) << "nobody asked for it";
  EXPECT_EQ(on_terminal(run({"--stats", "-q"}), false).find('\033'), std::string::npos);
}

TEST_F(Live, TheLineStaysBelowTheText) {
  const std::string text = on_terminal(run({"--stats"}), true);
  const size_t reserved = text.find("\033[1;23r"), drawn = text.find("\033[24;1H"), released = text.rfind("\033[r");
  ASSERT_NE(reserved, std::string::npos) << text;
  EXPECT_LT(reserved, drawn);
  EXPECT_LT(drawn, released);
  EXPECT_NE(released, std::string::npos);
}

TEST_F(Live, NothingWhereThereIsNoTerminal) {
  const Outcome o = hearth(run({"--stats"}));
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(o.err.find('\033'), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find(" of 200 tokens"), std::string::npos) << o.err;
}

TEST_F(Live, BenchShowsOneToo) {
  const std::vector<std::string> args = {"bench", "-m", model_, "-p", "0", "-n", "8", "-r", "3", "--device", "cpu"};
  const std::string text = on_terminal(args, false);
  EXPECT_NE(text.find("tg8: 0 of 3 repetitions"), std::string::npos) << text;
  EXPECT_EQ(hearth(args).err.find('\033'), std::string::npos);
}

}  // namespace
}  // namespace hearth::test
