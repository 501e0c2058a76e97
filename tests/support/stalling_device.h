#pragma once
// A device that gets stuck: its norms, of which every layer has some, wait until a time.
#include <atomic>
#include <chrono>
#include <thread>

#include "core/forwarding_device.h"

namespace hearth::test {

class StallingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  // From now on operations wait until `after` from now.
  void stall_for(std::chrono::milliseconds after) { until_ = std::chrono::steady_clock::now() + after; }

  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override {
    std::this_thread::sleep_until(until_.load());
    inner_.norm(args, x, T, out);
  }

 private:
  std::atomic<std::chrono::steady_clock::time_point> until_{std::chrono::steady_clock::time_point::min()};
};

}  // namespace hearth::test
