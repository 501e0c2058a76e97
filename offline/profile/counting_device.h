#pragma once
// A Device in front of another one that looks at every dense FFN on its way: gate and up are computed once more into
// its own buffers and counted on the host. Works with any device.
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/model.h"
#include "model/sidecar.h"
#include "offline/profile/activation_counter.h"

namespace hearth::offline {

class CountingDevice final : public Device {
 public:
  // All must outlive this device. `threshold`: a neuron is active when |act(gate)| > threshold. `moments`: also gather
  // the second moments of the FFN's input.
  CountingDevice(Device& inner, ThreadTeam& team, const model::Model& model, float threshold, bool moments,
                 model::Statistics& statistics);
  ~CountingDevice() override;

  // Counted from here on: a new text, held out or not.
  void begin_sequence(bool heldout);

  std::string name() const override { return inner_.name(); }
  bool is_host() const override { return inner_.is_host(); }
  std::vector<MemoryUse> memory() const override { return inner_.memory(); }
  void upload(void* device, const void* host, size_t bytes) override { inner_.upload(device, host, bytes); }
  void download(void* host, const void* device, size_t bytes) override { inner_.download(host, device, bytes); }
  void fill_zero(void* device, size_t bytes) override { inner_.fill_zero(device, bytes); }
  void synchronize() override { inner_.synchronize(); }
  Matrix adopt(const Matrix& host) override { return inner_.adopt(host); }
  Vector adopt(const Vector& host) override { return inner_.adopt(host); }
  size_t adopted_bytes(const Matrix& host) const override { return inner_.adopted_bytes(host); }
  size_t q8_bytes(int64_t n) const override { return inner_.q8_bytes(n); }
  void reserve(const Limits& limits) override;

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override {
    inner_.embed(table, ids, positions, pos, position_offset, T, x);
  }
  void quantize(Act a, int64_t T, int64_t n) override { inner_.quantize(a, T, n); }
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override { inner_.norm(args, x, T, out); }
  void matmul(std::span<const MatmulPart> parts, Act in, int64_t T) override { inner_.matmul(parts, in, T); }
  void rope_kv(const RopeKvArgs& args, int64_t T) override { inner_.rope_kv(args, T); }
  void attention(const AttentionArgs& args, int64_t T, Act out) override { inner_.attention(args, T, out); }
  void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) override;
  void predict(const Predictor& predictor, Act in, const PredictArgs& args) override {
    inner_.predict(predictor, in, args);
  }
  // Not used while profiling: sparse steps do not compute what is to be counted.
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y) override;
  void argmax(const float* logits, int64_t n, int32_t* id) override { inner_.argmax(logits, n, id); }

 protected:
  void* allocate_bytes(size_t bytes, Purpose purpose) override;
  void release_bytes(void* data, size_t bytes, Purpose purpose) override;

 private:
  void count(size_t layer, const FfnShard& shard, Act in, int64_t T);
  void add_moments(size_t layer, const float* host_input, int64_t T);
  size_t layer_of(const FfnShard& shard);

  Device& inner_;
  model::Statistics& statistics_;
  bool moments_, heldout_ = false;
  int64_t n_embd_ = 0, n_ff_ = 0;
  std::vector<ActivationCounter> counters_;         // by layer
  std::unordered_map<const void*, size_t> layers_;  // by the gate's address on the device, in order of first use
  DeviceBuffer gate_, up_;                          // [max_tokens][n_ff]
  std::vector<float> host_gate_, host_up_, host_input_;
  std::unordered_map<void*, DeviceBuffer> buffers_;  // of inner_, handed on
};

// ||down row|| of every neuron of a layer, [n_ff], whichever way `down` is stored.
std::vector<float> down_row_norms(const FfnShard& host_shard);

}  // namespace hearth::offline
