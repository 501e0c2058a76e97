#pragma once
// Ctrl-C as a request: the first one asks the running work to end cleanly, the second one kills as usual.

namespace hearth::tools {

// Takes SIGINT over for its lifetime. One at a time.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  bool requested() const;
};

constexpr int kInterruptedStatus = 130;  // 128 + SIGINT, what shells report

}  // namespace hearth::tools
