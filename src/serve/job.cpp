#include "serve/job.h"

namespace hearth::serve {

std::optional<Job::Event> Job::next(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  if (!came_.wait_for(lock, patience, [&] { return !events_.empty(); })) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void Job::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

bool Job::cancelled() const {
  const std::lock_guard lock(mutex_);
  return cancelled_;
}

void Job::push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  came_.notify_one();
}

}  // namespace hearth::serve
