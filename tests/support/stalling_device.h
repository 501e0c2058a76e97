#pragma once
// A device that gets stuck: its attention and its FFNs wait until a time.
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

  void attention(const AttentionArgs& args, int64_t T, Act out) override {
    wait();
    inner_.attention(args, T, out);
  }
  void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override {
    wait();
    inner_.ffn_dense(shard, in, T, y_bias, y, next);
  }
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override {
    wait();
    inner_.sparse_ffn()->ffn_sparse(shard, sparse, in, T, y_bias, y, next);
  }

 private:
  void wait() const { std::this_thread::sleep_until(until_.load()); }

  std::atomic<std::chrono::steady_clock::time_point> until_{std::chrono::steady_clock::time_point::min()};
};

}  // namespace hearth::test
