#pragma once
// Times every operation of another device. Each operation is followed by a synchronisation, so the sum is more than an
// unprofiled pass takes; the shares are what it is for.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/forwarding_device.h"

namespace hearth::engine {

class ProfilingDevice final : public ForwardingDevice {
 public:
  struct Row {
    std::string operation;  // "matmul 1024x512 q8_0": what, and the shape and type of its weights
    int64_t calls = 0;
    double seconds = 0;
    size_t weight_bytes = 0;  // read by dense operations; 0 where it depends on the data or there are none
  };

  // `inner` must outlive this device.
  explicit ProfilingDevice(Device& inner) : ForwardingDevice(inner) {}

  // Since construction or the last reset(), the slowest first.
  std::vector<Row> rows() const;
  void reset() { rows_.clear(); }

  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override;
  void quantize(Act a, int64_t T, int64_t n) override;
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override;
  void matmul(std::span<const MatmulPart> parts, Act in, int64_t T) override;
  void rope_kv(const RopeKvArgs& args, int64_t T) override;
  void attention(const AttentionArgs& args, int64_t T, Act out) override;
  void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) override;
  void predict(const Predictor& predictor, Act in, const PredictArgs& args) override;
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y) override;
  void argmax(const float* logits, int64_t n, int32_t* id) override;
  void post(Mailbox& mailbox, const float* x, int64_t n) override;
  void collect(Mailbox& mailbox, float* x, int64_t n) override;

 private:
  template <typename F>
  void timed(std::string operation, size_t weight_bytes, F&& work);

  std::map<std::string, Row> rows_;
};

}  // namespace hearth::engine
