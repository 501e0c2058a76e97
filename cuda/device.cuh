#pragma once
// The CUDA device: core/device.h and all that a device may offer besides, over one GPU and one stream.
#include <optional>
#include <string>
#include <vector>

#include "core/cold_rows.h"
#include "core/device.h"
#include "core/device_clock.h"
#include "core/experts.h"
#include "core/hand_off.h"
#include "core/latent_attention.h"
#include "core/recording.h"
#include "core/sparse_ffn.h"
#include "cuda/cuda.h"
#include "cuda/device_scratch.cuh"
#include "cuda/experts.cuh"
#include "cuda/gemm.cuh"
#include "cuda/layout.h"
#include "cuda/mailbox.cuh"
#include "cuda/memory.cuh"
#include "cuda/side_stream.cuh"
#include "cuda/sparse.cuh"
#include "cuda/staged_input.cuh"
#include "cuda/staging.cuh"
#include "cuda/stamps.cuh"

namespace hearth::cuda {

// The last operation has left this for the norm of its result (NextNorm): the half of it that quantised readers can go
// on from.
struct LeftNorm {
  const float* y = nullptr;  // [T][n]; null: nothing is left
  const float* weight = nullptr;
  int64_t T = 0, n = 0;
  // The row of y that x is, if the norm of `rows` rows from there on with these weights is the one; otherwise -1.
  int64_t row_of(const float* x, const float* norm_weight, int64_t rows) const;
};

class CudaDevice final : public Device,
                         public SparseFfn,
                         public ExpertFfn,
                         public LatentAttention,
                         public HandOffs,
                         public ColdRows,
                         public Recording,
                         public DeviceClock {
 public:
  CudaDevice(int gpu, const GpuShape& at_most);
  ~CudaDevice() override;

  std::string name() const override { return name_; }
  bool is_host() const override { return false; }
  std::vector<MemoryUse> memory() const override { return account_.uses(); }
  void use_from_this_thread() override;
  SparseFfn* sparse_ffn() override { return this; }
  ExpertFfn* expert_ffn() override { return this; }
  LatentAttention* latent_attention() override { return this; }
  HandOffs* hand_offs() override { return this; }
  ColdRows* cold_rows() override { return this; }
  Recording* recording() override { return this; }

  // --- device_memory.cu ---
  void upload(void* device, const void* host, size_t bytes) override;
  void download(void* host, const void* device, size_t bytes) override;
  void copy(void* to, const void* from, size_t bytes) override;
  void fill_zero(void* device, size_t bytes) override;
  void synchronize() override;
  Matrix adopt(const Matrix& host) override;
  Vector adopt(const Vector& host) override;
  size_t adopted_bytes(const Matrix& host) const override;
  size_t q8_bytes(int64_t n) const override { return static_cast<size_t>(q8_row_bytes(n)); }
  void reserve(const Limits& limits) override;
  void pin(void* host, size_t bytes) override;
  void unpin(void* host) override;
  bool can_link(const FfnShard& host) const override;
  size_t link_bytes(const FfnShard& host) const override;
  FfnShard link(const FfnShard& host, std::byte* memory) override;
  void open_staging(int n_slots, size_t bytes) override;
  size_t staged_bytes(const FfnShard& host) const override { return Staging::bytes(host); }
  FfnShard stage(int slot, const FfnShard& host) override { return staging_slots_->stage(slot, host); }
  size_t staged_bytes(const ExpertSet& host, std::span<const int32_t> ids) const override {
    return Staging::bytes(host, ids);
  }
  ExpertSet stage(int slot, const ExpertSet& host, std::span<const int32_t> ids) override {
    return staging_slots_->stage(slot, host, ids);
  }
  void acquire(int slot) override { staging_slots_->acquire(slot); }
  void release(int slot) override { staging_slots_->release(slot); }

  // --- device.cu ---
  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override;
  void quantize(Act a, int64_t T, int64_t n) override;
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override;
  void add_norm(const NormArgs& args, float* x, int64_t T, float* y) override;
  void scale(float factor, int64_t n, float* x) override;
  void soft_cap(float cap, int64_t n, float* x) override;
  using Device::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override;
  void attention(const AttentionArgs& args, int64_t T, Act out) override;
  void head_products(const HeadProducts& products, int64_t T) override;
  void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                 const NextNorm* next) override;
  void argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) override;
  void begin() override;
  int end() override;
  void launch(int id) override;
  void stamp() override;
  std::vector<double> read_stamps() override { return stamps_.read(); }

  // --- device_sparse.cu ---
  void predict(const Predictor& predictor, const Input& in, int64_t T, const PredictArgs& args) override;
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override;
  std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids) override;
  void post(Mailbox& mailbox, const float* x, int64_t n) override;
  void collect(Mailbox& mailbox, float* x, int64_t n) override;
  void hint(const Predictor& predictor, Act in, const HintArgs& args) override;

  // --- device_experts.cu ---
  bool takes_down_t() const override { return false; }
  const void* adopt_experts(const ExpertSet& adopted) override;
  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override;
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override;

 protected:
  void* allocate_bytes(size_t bytes, Purpose purpose) override;
  void release_bytes(void* data, size_t bytes, Purpose purpose) override;

 private:
  void check_reserved(int64_t T) const;
  void check_few(int64_t T) const;
  // Operations from here on wait for the hints, too.
  void finish_hints() { side_->join(gpu_); }
  // After a wait for the GPU: throws if blocks of a kernel gave up waiting for each other.
  void check_blocks() const;

  // --- norms on the way ---
  struct Output {
    const float* data;  // [T][stride]
    int64_t n, stride;  // elements of a row, and from one to the next
  };
  // The norm of `in` for T tokens, if a kernel that multiplies it by w and writes `outputs` can do it on the way.
  // Products with quantised w do it from the half that the maker has left, and need as many rows (elements of
  // `outputs`) as columns to write the norm's result; other readers can do without that half.
  enum class Reader { product, any };
  std::optional<InputNorm> norm_on_the_way(const Input& in, const Matrix& w, int64_t T, std::span<const Output> outputs,
                                           Reader reader = Reader::product) const;
  // A norm that nobody does on the way.
  void norm_first(const Input& in, int64_t T);
  // The half that the maker of y [T][n] should leave.
  std::optional<OutputNorm> half_of(const NextNorm* next, int64_t T, int64_t n) const;
  UnscaledNorm unscaled() const;

  // gate, up and activation into scratch; returns where the neurons' values are.
  Act ffn_hidden(const FfnShard& shard, const Input& in, int64_t T);
  void ffn_masked(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next);
  void ffn_selected(const FfnShard& shard, const SparseArgs& sparse, Act in, int64_t T, Vector y_bias, float* y);
  void run_experts(ExpertRun run, Act in, int64_t T, float* y);
  NameTarget name_target(int64_t n, const PredictArgs& args, int64_t t, int64_t T);
  void predict_by_scores(const Predictor& predictor, Act in, int64_t T, const PredictArgs& args);

  Gpu gpu_;
  std::string name_;
  Stream stream_;
  Account account_;
  std::optional<Heap> heap_;
  std::optional<WeightArena> weights_;
  std::optional<Uploader> uploader_;
  std::optional<Gemm> gemm_;
  PinnedMemory staging_;  // for small copies: a ring for those to the device, then a buffer for those from it
  size_t staging_at_ = 0;
  PinnedMemory gave_up_;            // Patience::failed of kernels whose blocks wait for each other
  std::optional<SideStream> side_;  // for hints, which nothing on this device waits for
  bool hinted_ = false;             // since the last FFN
  LeftNorm left_;
  std::vector<GraphExec> graphs_;
  Stamps stamps_;

  DeviceBuffer staging_memory_;
  std::optional<Staging> staging_slots_;

  Limits limits_;
  DeviceBuffer storage_;
  DeviceScratch scratch_;
};

constexpr size_t kStagingBytes = size_t{1} << 20;  // of the ring, and of the buffer

}  // namespace hearth::cuda
