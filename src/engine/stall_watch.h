#pragma once
// The last resort against a hang. When one side of a divided model falls silent, the other gives up after the mailbox's
// patience and throws; but a thread or a GPU that is stuck in the middle of an operation cannot be stopped, and ending
// the pass, waiting for its results, or freeing the device's memory, would take for ever. This watch then reports.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/mailbox.h"

namespace hearth::engine {

class StallWatch {
 public:
  using Handler = std::function<void(const std::string& why)>;

  // The stuck phase is handed to `on_stall` in one line, once, in a thread of the watch's own; the handler's only
  // sensible end is that of the process. flags: of the mailbox between the two sides; null for an undivided model.
  StallWatch(std::shared_ptr<const MailboxMemory> flags, std::chrono::milliseconds patience,
             std::chrono::milliseconds grace, Handler on_stall);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

  // Watched for: nothing; that a pass, or the device's end, does not go on for `grace` after the mailbox failed; and
  // besides that results which the device alone works at take no longer than `patience` and `grace`.
  enum class Phase { idle, hand_offs, results };
  void enter(Phase phase) { phase_.store(phase, std::memory_order_relaxed); }

 private:
  void watch();
  std::string stuck(std::chrono::milliseconds failed_for, std::chrono::milliseconds waited) const;  // empty: nothing

  std::shared_ptr<const MailboxMemory> flags_;
  std::chrono::milliseconds patience_, grace_;
  Handler on_stall_;
  std::atomic<Phase> phase_{Phase::idle};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ended_ = false;  // under mutex_
  std::thread thread_;
};

}  // namespace hearth::engine
