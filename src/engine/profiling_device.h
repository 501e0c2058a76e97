#pragma once
// Times every operation of another device. One with a clock of its own (core/device_clock.h) is asked for time stamps
// between operations and runs on beside this thread; any other is waited for after each, which makes the sum more than
// an unprofiled pass takes. To be told apart, what waits for the CPU and what merges its answer are operations of their
// own here, although a device may do both in the kernel before; the sums may then round differently.
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/device_clock.h"
#include "core/forwarding_device.h"

namespace hearth::engine {

// Which part of a token an operation belongs to; a norm belongs to what follows it.
enum class Part {
  attention,  // from the norm to the product that is added to the residual stream
  predictor,  // with the hand-off that follows from it, where the device makes that in one go
  hand_over,  // a hand-off that is made by itself
  ffn,        // this device's neurons
  wait,       // for the other device
  merge,      // adding what it answered
  head,
  other,  // embedding, choosing the token, copies, and the time between tokens
};
constexpr int kParts = 8;
const char* to_string(Part part);

class ProfilingDevice final : public ForwardingDevice {
 public:
  struct Row {
    std::string operation;  // "matmul 1024x512 q8_0": what, and the shape and type of its weights
    int64_t calls = 0;
    double seconds = 0;
    size_t weight_bytes = 0;  // read by dense operations; 0 where it depends on the data or there are none
  };

  // `inner` must outlive this device.
  explicit ProfilingDevice(Device& inner) : ForwardingDevice(inner), clock_(dynamic_cast<DeviceClock*>(&inner)) {}

  // Off: everything is handed on as it is, recording too.
  void enable(bool on) { enabled_ = on; }
  // Since construction or the last reset(), the slowest first.
  std::vector<Row> rows();
  // Seconds by Part.
  std::array<double, kParts> parts();
  // The share of Part::ffn that ran between a hand-off and the wait for its answer.
  double ffn_beside_hand_offs();
  void reset();

  size_t packed_bytes(const Matrix& host) const override { return inner_.packed_bytes(host); }
  Matrix pack(const Matrix& host, std::byte* memory) override { return inner_.pack(host, memory); }
  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override;
  void quantize(Act a, int64_t T, int64_t n) override;
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override;
  void attention(const AttentionArgs& args, int64_t T, Act out) override;
  void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;
  void predict(const Predictor& predictor, const Input& in, int64_t T, const PredictArgs& args) override;
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override;
  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override;
  bool takes_down_t() const override { return inner_.expert_ffn()->takes_down_t(); }
  const void* adopt_experts(const ExpertSet& set) override { return inner_.expert_ffn()->adopt_experts(set); }
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override;
  void head_products(const HeadProducts& products, int64_t T) override;
  void argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) override;

  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override;
  void post(Mailbox& mailbox, const float* x, int64_t n) override;
  void collect(Mailbox& mailbox, float* x, int64_t n) override;
  void hint(const Predictor& predictor, Act in, const HintArgs& args) override;

  Recording* recording() override { return enabled_ ? nullptr : inner_.recording(); }

 private:
  // The span between two stamps.
  struct Interval {
    std::string operation;
    Part part;
    size_t weight_bytes;
  };
  template <typename F>
  void timed(std::string operation, Part part, size_t weight_bytes, F&& work);
  void begin_interval();
  void record(const Interval& what, double seconds);
  void read_clock();

  DeviceClock* clock_;  // null: the device is waited for
  bool enabled_ = true;
  std::map<std::string, Row> rows_;
  std::array<double, kParts> parts_{};
  double norm_seconds_ = 0;          // of norms by themselves, which belong to what follows
  double ffn_seconds_ = 0;           // since the last part that was not the FFN's
  double ffn_beside_ = 0;            // followed by a wait
  std::vector<Interval> intervals_;  // stamped, not read
  DeviceBuffer unused_sum_;          // where an answer goes that is only waited for
};

}  // namespace hearth::engine
