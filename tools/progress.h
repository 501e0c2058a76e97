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

// The progress of a download, on a terminal alone: what is there of all, the rate of the last seconds, the time left.
class TransferProgress {
 public:
  TransferProgress(std::string name, uint64_t total, uint64_t have);
  ~TransferProgress();
  TransferProgress(const TransferProgress&) = delete;
  TransferProgress& operator=(const TransferProgress&) = delete;

  void update(uint64_t have);  // cheap when called often
  void clear();                // room for a message; the next update shows it again

 private:
  using Clock = std::chrono::steady_clock;
  std::string name_;
  uint64_t total_, have_;
  double rate_ = 0;  // bytes/s
  bool shown_;
  Clock::time_point last_, begin_;
};

}  // namespace hearth::tools
