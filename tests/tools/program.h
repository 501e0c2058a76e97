#pragma once
// Runs the real binary and catches what it prints.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "support/paths.h"

namespace hearth::test {

struct Outcome {
  int status = -1;  // exit status; 128 + signal when killed
  std::string out, err;
};

inline std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A run in the background. Its stdout goes to `out_path` when that is given (/dev/full), else to a file of its own.
class Program {
 public:
  explicit Program(std::vector<std::string> args, const std::string& input = "", const std::string& out_path = "") {
    std::ofstream(files_ / "in", std::ios::binary) << input;
    const std::string out = out_path.empty() ? (files_ / "out").string() : out_path;
    const std::string in = (files_ / "in").string(), err = (files_ / "err").string();
    args.insert(args.begin(), HEARTH_BINARY);
    std::vector<char*> argv;
    for (std::string& a : args) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      redirect(in, O_RDONLY, 0), redirect(out, O_WRONLY | O_CREAT | O_TRUNC, 1);
      redirect(err, O_WRONLY | O_CREAT | O_TRUNC, 2);
      execv(argv[0], argv.data());
      _exit(127);
    }
  }
  ~Program() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // What it has printed so far.
  std::string out() const { return slurp(files_ / "out"); }
  std::string err() const { return slurp(files_ / "err"); }
  void signal(int number) const { kill(pid_, number); }
  pid_t pid() const { return pid_; }
  // Waits until it has printed `n` bytes on stdout; false after a minute, or when it ended before.
  bool wait_for_output(size_t n) {
    for (int i = 0; i < 6000; ++i) {
      if (out().size() >= n) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  Outcome wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return {code, out(), slurp(files_ / "err")};
  }

 private:
  static void redirect(const std::string& path, int flags, int fd) {
    const int opened = open(path.c_str(), flags, 0600);
    if (opened < 0) _exit(126);
    dup2(opened, fd);
    close(opened);
  }

  TempDir files_;
  pid_t pid_ = -1;
};

inline Outcome hearth(std::vector<std::string> args, const std::string& input = "", const std::string& out_path = "") {
  return Program(std::move(args), input, out_path).wait();
}

// The whole of stderr is one line that begins with "error: " and contains `text`, and the exit status is 1.
inline ::testing::AssertionResult fails_with(const Outcome& o, const std::string& text) {
  const bool one_line = !o.err.empty() && o.err.back() == '\n' && std::count(o.err.begin(), o.err.end(), '\n') == 1;
  if (o.status == 1 && one_line && o.err.rfind("error: ", 0) == 0 && o.err.find(text) != std::string::npos) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "expected status 1 and one line 'error: … " << text << " …', got status "
                                       << o.status << " and:\n"
                                       << o.err;
}

}  // namespace hearth::test
