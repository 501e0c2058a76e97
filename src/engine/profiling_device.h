#pragma once
// Times every operation of another device. Each operation is followed by a synchronisation, so the sum is more than an
// unprofiled pass takes; the shares are what it is for.
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/device.h"

namespace hearth::engine {

class ProfilingDevice final : public Device {
 public:
  struct Row {
    std::string operation;  // "matmul 1024x512 q8_0": what, and the shape and type of its weights
    int64_t calls = 0;
    double seconds = 0;
    size_t weight_bytes = 0;  // read by dense operations; 0 where it depends on the data or there are none
  };

  // `inner` must outlive this device.
  explicit ProfilingDevice(Device& inner) : inner_(inner) {}

  // Since construction or the last reset(), the slowest first.
  std::vector<Row> rows() const;
  void reset() { rows_.clear(); }

  std::string name() const override { return inner_.name(); }
  bool is_host() const override { return inner_.is_host(); }
  std::vector<MemoryUse> memory() const override { return inner_.memory(); }
  void use_from_this_thread() override { inner_.use_from_this_thread(); }
  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;
  void fill_zero(void* device, size_t bytes) override { inner_.fill_zero(device, bytes); }
  void synchronize() override { inner_.synchronize(); }
  Matrix adopt(const Matrix& host) override { return inner_.adopt(host); }
  Vector adopt(const Vector& host) override { return inner_.adopt(host); }
  size_t adopted_bytes(const Matrix& host) const override { return inner_.adopted_bytes(host); }
  size_t q8_bytes(int64_t n) const override { return inner_.q8_bytes(n); }
  void reserve(const Limits& limits) override { inner_.reserve(limits); }

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
  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override;
  void post(Mailbox& mailbox, const float* x, int64_t n) override;
  void collect(Mailbox& mailbox, float* x, int64_t n) override;
  void pin(void* host, size_t bytes) override { inner_.pin(host, bytes); }
  void unpin(void* host) override { inner_.unpin(host); }
  void open_staging(int n_slots, size_t bytes) override { inner_.open_staging(n_slots, bytes); }
  size_t staged_bytes(const FfnShard& host) const override { return inner_.staged_bytes(host); }
  FfnShard stage(int slot, const FfnShard& host) override { return inner_.stage(slot, host); }
  void acquire(int slot) override { inner_.acquire(slot); }
  void release(int slot) override { inner_.release(slot); }

 protected:
  void* allocate_bytes(size_t bytes, Purpose purpose) override;
  void release_bytes(void* data, size_t bytes, Purpose purpose) override;

 private:
  template <typename F>
  void timed(std::string operation, size_t weight_bytes, F&& work);

  Device& inner_;
  std::map<std::string, Row> rows_;
  std::unordered_map<void*, DeviceBuffer> buffers_;  // memory of inner_, handed on
};

}  // namespace hearth::engine
