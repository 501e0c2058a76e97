#include "engine/stall_watch.h"

#include <fmt/format.h>

#include <algorithm>

namespace hearth::engine {

StallWatch::StallWatch(std::shared_ptr<const MailboxMemory> flags, std::chrono::milliseconds patience,
                       std::chrono::milliseconds grace, Handler on_stall)
    : flags_(std::move(flags)), patience_(patience), grace_(grace), on_stall_(std::move(on_stall)), thread_([this] {
        watch();
      }) {}

StallWatch::~StallWatch() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

std::string StallWatch::stuck(std::chrono::milliseconds failed_for, std::chrono::milliseconds waited) const {
  if (failed_for >= grace_) return describe(flags_->failure(), patience_);
  if (waited < patience_ + grace_) return {};
  return fmt::format("the device has not finished in {:g} s; it may have stopped",
                     std::chrono::duration<double>(waited).count());
}

void StallWatch::watch() {
  // Ten looks in the time that matters, and no more than ten a second.
  const auto step = std::clamp(grace_ / 10, std::chrono::milliseconds{1}, std::chrono::milliseconds{100});
  constexpr std::chrono::milliseconds kNone{0};
  std::chrono::milliseconds failed_for = kNone, waited = kNone;
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, step, [this] { return ended_; })) {
    const Phase phase = phase_.load(std::memory_order_relaxed);
    const bool failed = phase != Phase::idle && flags_ && flags_->failure() != MailboxFailure::none;
    failed_for = failed ? failed_for + step : kNone;
    waited = phase == Phase::results ? waited + step : kNone;
    const std::string why = stuck(failed_for, waited);
    if (why.empty()) continue;
    lock.unlock();
    on_stall_(why);
    return;
  }
}

}  // namespace hearth::engine
