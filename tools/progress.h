#pragma once
// Progress of long work on stderr: in place on a terminal, a line now and then in a log.
#include <chrono>
#include <cstdint>
#include <string>

namespace hearth::tools {

class Progress {
 public:
  explicit Progress(int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of the total; `note` is shown with it. Cheap when called often.
  void update(int64_t done, const std::string& note);

 private:
  using Clock = std::chrono::steady_clock;
  int64_t total_;
  bool terminal_;
  bool line_open_ = false;
  Clock::time_point begin_, next_;
};

}  // namespace hearth::tools
