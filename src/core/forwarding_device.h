#pragma once
// A Device that hands everything on to another one: the base of those that look at, or change, one kind of operation.
// Graphs are not handed on: what such a device does beside its operations could not be recorded.
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/device.h"

namespace hearth {

class ForwardingDevice : public Device {
 public:
  // `inner` must outlive this device.
  explicit ForwardingDevice(Device& inner) : inner_(inner) {}

  std::string name() const override { return inner_.name(); }
  bool is_host() const override { return inner_.is_host(); }
  std::vector<MemoryUse> memory() const override { return inner_.memory(); }
  void use_from_this_thread() override { inner_.use_from_this_thread(); }
  void upload(void* device, const void* host, size_t bytes) override { inner_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { inner_.download(host, device, bytes); }
  void fill_zero(void* device, size_t bytes) override { inner_.fill_zero(device, bytes); }
  void synchronize() override { inner_.synchronize(); }
  Matrix adopt(const Matrix& host) override { return inner_.adopt(host); }
  Vector adopt(const Vector& host) override { return inner_.adopt(host); }
  size_t adopted_bytes(const Matrix& host) const override { return inner_.adopted_bytes(host); }
  size_t q8_bytes(int64_t n) const override { return inner_.q8_bytes(n); }
  void reserve(const Limits& limits) override { inner_.reserve(limits); }

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override {
    inner_.embed(table, ids, positions, pos, position_offset, T, x);
  }
  void quantize(Act a, int64_t T, int64_t n) override { inner_.quantize(a, T, n); }
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override { inner_.norm(args, x, T, out); }
  void matmul(std::span<const MatmulPart> parts, Act in, int64_t T) override { inner_.matmul(parts, in, T); }
  void rope_kv(const RopeKvArgs& args, int64_t T) override { inner_.rope_kv(args, T); }
  void attention(const AttentionArgs& args, int64_t T, Act out) override { inner_.attention(args, T, out); }
  void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) override {
    inner_.ffn_dense(shard, in, T, y_bias, y);
  }
  void predict(const Predictor& predictor, Act in, const PredictArgs& args) override {
    inner_.predict(predictor, in, args);
  }
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y) override {
    inner_.ffn_sparse(shard, sparse, in, y_bias, y);
  }
  void argmax(const float* logits, int64_t n, int32_t* id) override { inner_.argmax(logits, n, id); }

  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override {
    return inner_.open_mailbox(capacity, max_ids);
  }
  void post(Mailbox& mailbox, const float* x, int64_t n) override { inner_.post(mailbox, x, n); }
  void collect(Mailbox& mailbox, float* x, int64_t n) override { inner_.collect(mailbox, x, n); }
  void hint(const Predictor& predictor, Act in, const HintArgs& args) override { inner_.hint(predictor, in, args); }
  void fetch(const FfnShard& shard, std::span<const int32_t> ids, const Mailbox& until) override {
    inner_.fetch(shard, ids, until);
  }
  void fetch_input(const FfnShard& shard, Act in, const Mailbox& hand_off) override {
    inner_.fetch_input(shard, in, hand_off);
  }
  void pin(void* host, size_t bytes) override { inner_.pin(host, bytes); }
  void unpin(void* host) override { inner_.unpin(host); }
  bool can_link(const FfnShard& host) const override { return inner_.can_link(host); }
  size_t link_bytes(const FfnShard& host) const override { return inner_.link_bytes(host); }
  FfnShard link(const FfnShard& host, std::byte* memory) override { return inner_.link(host, memory); }
  void open_staging(int n_slots, size_t bytes) override { inner_.open_staging(n_slots, bytes); }
  size_t staged_bytes(const FfnShard& host) const override { return inner_.staged_bytes(host); }
  FfnShard stage(int slot, const FfnShard& host) override { return inner_.stage(slot, host); }
  void acquire(int slot) override { inner_.acquire(slot); }
  void release(int slot) override { inner_.release(slot); }

 protected:
  void* allocate_bytes(size_t bytes, Purpose purpose) override;
  void release_bytes(void* data, size_t bytes, Purpose purpose) override;

  Device& inner_;

 private:
  std::unordered_map<void*, DeviceBuffer> buffers_;  // of inner_, handed on
};

}  // namespace hearth
