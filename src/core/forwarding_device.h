#pragma once
// A Device that hands everything on to another one: the base of those that look at, or change, one kind of operation.
// Recording is not handed on: what such a device does beside its operations could not be recorded.
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/cold_rows.h"
#include "core/device.h"
#include "core/experts.h"
#include "core/hand_off.h"
#include "core/latent_attention.h"
#include "core/sparse_ffn.h"

namespace hearth {

class ForwardingDevice : public Device,
                         public SparseFfn,
                         public ExpertFfn,
                         public LatentAttention,
                         public HandOffs,
                         public RowPrefetch,
                         public ColdRows {
 public:
  // `inner` must outlive this device.
  explicit ForwardingDevice(Device& inner) : inner_(inner) {}

  std::string name() const override { return inner_.name(); }
  bool is_host() const override { return inner_.is_host(); }
  std::vector<MemoryUse> memory() const override { return inner_.memory(); }
  void use_from_this_thread() override { inner_.use_from_this_thread(); }
  SparseFfn* sparse_ffn() override { return inner_.sparse_ffn() != nullptr ? this : nullptr; }
  ExpertFfn* expert_ffn() override { return inner_.expert_ffn() != nullptr ? this : nullptr; }
  LatentAttention* latent_attention() override { return inner_.latent_attention() != nullptr ? this : nullptr; }
  HandOffs* hand_offs() override { return inner_.hand_offs() != nullptr ? this : nullptr; }
  RowPrefetch* row_prefetch() override { return inner_.row_prefetch() != nullptr ? this : nullptr; }
  ColdRows* cold_rows() override { return inner_.cold_rows() != nullptr ? this : nullptr; }

  void upload(void* device, const void* host, size_t bytes) override { inner_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { inner_.download(host, device, bytes); }
  void copy(void* to, const void* from, size_t bytes) override { inner_.copy(to, from, bytes); }
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
  void add_norm(const NormArgs& args, float* x, int64_t T, float* y) override { inner_.add_norm(args, x, T, y); }
  void scale(float factor, int64_t n, float* x) override { inner_.scale(factor, n, x); }
  void soft_cap(float cap, int64_t n, float* x) override { inner_.soft_cap(cap, n, x); }
  using Device::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override {
    inner_.matmul(parts, in, T, next);
  }
  void attention(const AttentionArgs& args, int64_t T, Act out) override { inner_.attention(args, T, out); }
  void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override {
    inner_.ffn_dense(shard, in, T, y_bias, y, next);
  }
  void argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) override { inner_.argmax(logits, n, T, ids); }

  void predict(const Predictor& predictor, const Input& in, int64_t T, const PredictArgs& args) override {
    inner_.sparse_ffn()->predict(predictor, in, T, args);
  }
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override {
    inner_.sparse_ffn()->ffn_sparse(shard, sparse, in, T, y_bias, y, next);
  }

  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
    inner_.expert_ffn()->route(router, in, T, choice);
  }
  bool takes_down_t() const override { return inner_.expert_ffn()->takes_down_t(); }
  const void* adopt_experts(const ExpertSet& set) override { return inner_.expert_ffn()->adopt_experts(set); }
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override {
    inner_.expert_ffn()->ffn_experts(set, choice, in, T, y);
  }

  void head_products(const HeadProducts& products, int64_t T) override {
    inner_.latent_attention()->head_products(products, T);
  }

  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override {
    return inner_.hand_offs()->open_mailbox(capacity, max_ids);
  }
  void post(Mailbox& mailbox, const float* x, int64_t n) override { inner_.hand_offs()->post(mailbox, x, n); }
  void collect(Mailbox& mailbox, float* x, int64_t n) override { inner_.hand_offs()->collect(mailbox, x, n); }
  void hint(const Predictor& predictor, Act in, const HintArgs& args) override {
    inner_.hand_offs()->hint(predictor, in, args);
  }

  void fetch(const FfnShard& shard, std::span<const int32_t> ids, const Mailbox& until) override {
    inner_.row_prefetch()->fetch(shard, ids, until);
  }
  void fetch_input(const FfnShard& shard, Act in, const Mailbox& hand_off) override {
    inner_.row_prefetch()->fetch_input(shard, in, hand_off);
  }
  void fetch_experts(const ExpertSet& set, const ExpertChoice& choice, const Mailbox& until) override {
    inner_.row_prefetch()->fetch_experts(set, choice, until);
  }

  void pin(void* host, size_t bytes) override { inner_.cold_rows()->pin(host, bytes); }
  void unpin(void* host) override { inner_.cold_rows()->unpin(host); }
  bool can_link(const FfnShard& host) const override { return inner_.cold_rows()->can_link(host); }
  size_t link_bytes(const FfnShard& host) const override { return inner_.cold_rows()->link_bytes(host); }
  FfnShard link(const FfnShard& host, std::byte* memory) override { return inner_.cold_rows()->link(host, memory); }
  void open_staging(int n_slots, size_t bytes) override { inner_.cold_rows()->open_staging(n_slots, bytes); }
  size_t staged_bytes(const FfnShard& host) const override { return inner_.cold_rows()->staged_bytes(host); }
  FfnShard stage(int slot, const FfnShard& host) override { return inner_.cold_rows()->stage(slot, host); }
  size_t staged_bytes(const ExpertSet& host, std::span<const int32_t> ids) const override {
    return inner_.cold_rows()->staged_bytes(host, ids);
  }
  ExpertSet stage(int slot, const ExpertSet& host, std::span<const int32_t> ids) override {
    return inner_.cold_rows()->stage(slot, host, ids);
  }
  void acquire(int slot) override { inner_.cold_rows()->acquire(slot); }
  void release(int slot) override { inner_.cold_rows()->release(slot); }

 protected:
  void* allocate_bytes(size_t bytes, Purpose purpose) override;
  void release_bytes(void* data, size_t bytes, Purpose purpose) override;

  Device& inner_;

 private:
  std::unordered_map<void*, DeviceBuffer> buffers_;  // of inner_, handed on
};

}  // namespace hearth
