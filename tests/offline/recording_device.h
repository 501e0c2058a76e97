#pragma once
// A CPU device that notes, for every sparse FFN, its input and the neurons that were active.
#include <memory>
#include <vector>

#include "core/error.h"
#include "cpu/cpu.h"
#include "cpu/host_device.h"

namespace hearth::test {

class RecordingDevice final : public cpu::HostDevice {
 public:
  struct Step {
    std::vector<float> input;     // [n_embd] the normed input of the FFN
    std::vector<int32_t> active;  // ascending
  };
  explicit RecordingDevice(ThreadTeam& team) : inner_(cpu::make_device(team)) {}

  // In the order of the calls: the layers of the first token, then those of the second, …
  std::vector<Step>& steps() { return steps_; }

  std::string name() const override { return "recording " + inner_->name(); }
  size_t q8_bytes(int64_t n) const override { return inner_->q8_bytes(n); }
  void reserve(const Limits& limits) override {
    inner_->reserve(limits);
    n_embd_ = limits.n_embd;
  }
  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos, int64_t offset,
             int64_t T, float* x) override {
    inner_->embed(table, ids, positions, pos, offset, T, x);
  }
  void quantize(Act a, int64_t T, int64_t n) override { inner_->quantize(a, T, n); }
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override { inner_->norm(args, x, T, out); }
  void matmul(std::span<const MatmulPart> parts, Act in, int64_t T) override { inner_->matmul(parts, in, T); }
  void rope_kv(const RopeKvArgs& args, int64_t T) override { inner_->rope_kv(args, T); }
  void attention(const AttentionArgs& args, int64_t T, Act out) override { inner_->attention(args, T, out); }
  void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector bias, float* y) override {
    inner_->ffn_dense(shard, in, T, bias, y);
  }
  void predict(const Predictor& p, Act in, const PredictArgs& args) override { inner_->predict(p, in, args); }
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector bias, float* y) override {
    Step step;
    step.input.assign(in.x, in.x + n_embd_);
    step.active.resize(static_cast<size_t>(shard.n()));
    int32_t count = 0;
    SparseArgs recorded = sparse;
    recorded.active_ids = step.active.data();
    recorded.n_active = &count;
    inner_->ffn_sparse(shard, recorded, in, bias, y);
    if (sparse.n_active != nullptr) *sparse.n_active = count;
    step.active.resize(static_cast<size_t>(count));
    steps_.push_back(std::move(step));
  }
  void argmax(const float* logits, int64_t n, int32_t* id) override { inner_->argmax(logits, n, id); }

 private:
  std::unique_ptr<Device> inner_;
  int64_t n_embd_ = 0;
  std::vector<Step> steps_;
};

}  // namespace hearth::test
