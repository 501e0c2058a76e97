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

// One line on a terminal's stderr, redrawn and gone at the end; nothing where stderr is no terminal, and with --quiet.
class LiveLine {
 public:
  // `beside_text`: stdout gets text meanwhile. Where that is a terminal too, the line stays at its bottom.
  explicit LiveLine(bool beside_text);
  ~LiveLine();
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  // Whether a call of show() would draw now: at most five times a second.
  bool due() const { return terminal_ && Clock::now() >= next_; }
  void show(const std::string& text);
  void clear();

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  int columns_ = 80, rows_ = 0;  // rows: of the terminal, while its last one is kept free of text; 0: none is
  bool drawn_ = false;
  Clock::time_point next_;
};

// "120 of 400 tokens, 38.2 tokens/s, 92.1 % hits, 7 s left". rate: tokens/s, 0 = not known yet; hits: share of the
// active neurons on the GPU, NaN = none is counted; seconds: left, below 0 = not known.
std::string live_text(const std::string& unit, int64_t done, int64_t total, double rate, double hits, double seconds);

// The progress of a download, on a LiveLine: what is there of all, the rate of the last seconds, the time left.
class TransferProgress {
 public:
  TransferProgress(std::string name, uint64_t total, uint64_t have);
  void update(uint64_t have);      // cheap when called often
  void clear() { line_.clear(); }  // room for a message; the next update shows it again

 private:
  using Clock = std::chrono::steady_clock;
  LiveLine line_{false};
  std::string name_;
  uint64_t total_, have_;
  double rate_ = 0;  // bytes/s
  Clock::time_point last_, begin_;
};

}  // namespace hearth::tools
