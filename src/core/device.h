#pragma once
// The interface between the engine and the hardware. The forward pass (src/engine) is written once, over Device;
// implementations: the scalar oracle and the SIMD CPU device (cpu/), the CUDA device (cuda/). What a device may offer
// besides are interfaces of their own: core/sparse_ffn.h, experts.h, latent_attention.h, hand_off.h, cold_rows.h,
// recording.h.
//
// Rules that every implementation keeps:
//  * Pointers and views passed to operations are in the device's own address space: memory from allocate(), matrices
//    from adopt(). On the CPU devices that is host memory, and adopt() returns the matrix as it is.
//  * Operations are ordered among themselves and may return before they are done; download() and synchronize() wait.
//  * Operations never allocate: reserve() is told the largest shapes once. That keeps them capturable in a CUDA graph.
//  * What varies from pass to pass (ids, positions, pages, lists of neurons) is read from device memory.
//  * Results depend neither on the number of threads, nor on timing, nor, up to kFewTokens tokens, on other tokens.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/ops.h"

namespace hearth {

class SparseFfn;
class ExpertFfn;
class LatentAttention;
class HandOffs;
class RowPrefetch;
class ColdRows;
class Recording;

// Purposes of device memory; every byte is accounted under one of these.
enum class Purpose { weights, kv_cache, activations, scratch, predictor, context };
const char* to_string(Purpose purpose);

struct MemoryUse {
  Purpose purpose;
  size_t bytes;
};

// Owns a piece of device memory. Move-only; frees on destruction. Must not outlive its device.
class Device;
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device* device, void* data, size_t bytes, Purpose purpose)
      : device_(device), data_(data), bytes_(bytes), purpose_(purpose) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Purpose purpose_ = Purpose::scratch;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu (avx512-vnni, 16 threads)", "NVIDIA H200"
  virtual bool is_host() const = 0;      // its address space is the host's
  virtual std::vector<MemoryUse> memory() const = 0;

  // Called first in any thread but the device's creator that issues operations; one thread at a time does.
  virtual void use_from_this_thread() {}

  // --- what it offers besides; null where it does not ---
  virtual SparseFfn* sparse_ffn() { return nullptr; }
  virtual ExpertFfn* expert_ffn() { return nullptr; }
  virtual LatentAttention* latent_attention() { return nullptr; }
  virtual HandOffs* hand_offs() { return nullptr; }
  virtual RowPrefetch* row_prefetch() { return nullptr; }
  virtual ColdRows* cold_rows() { return nullptr; }
  virtual Recording* recording() { return nullptr; }

  // --- memory ---
  DeviceBuffer allocate(size_t bytes, Purpose purpose) {
    return {this, allocate_bytes(bytes, purpose), bytes, purpose};
  }
  virtual void upload(void* device, const void* host, size_t bytes) = 0;
  virtual void download(void* host, const void* device, size_t bytes) = 0;  // waits
  virtual void copy(void* to, const void* from, size_t bytes) = 0;          // within the device
  virtual void fill_zero(void* device, size_t bytes) = 0;
  virtual void synchronize() = 0;
  // Weights for this device. The host view must stay valid as long as the device uses it (is_host()), or until return.
  virtual Matrix adopt(const Matrix& host) = 0;
  virtual Vector adopt(const Vector& host) = 0;
  // Bytes that adopt() will take for this matrix (0 when is_host()).
  virtual size_t adopted_bytes(const Matrix& host) const = 0;
  // A host device may multiply whole matrices faster in a layout of its own: bytes that this matrix takes there, or 0.
  // pack() lays it out at `memory`; matmul(), ffn_dense() and embed() take the result in its place, except as down_t.
  virtual size_t packed_bytes(const Matrix& /*host*/) const { return 0; }
  virtual Matrix pack(const Matrix& host, std::byte* memory);
  // Bytes of a row of n activations in the device's 8-bit form (Act::q8).
  virtual size_t q8_bytes(int64_t n) const = 0;
  // Allocates all scratch for operations up to these limits. Called once, before the first operation.
  virtual void reserve(const Limits& limits) = 0;

  // --- operations ---
  // x[t] = table[ids[t]] (+ positions[pos[t] + position_offset] when `positions` is set).
  virtual void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
                     int64_t position_offset, int64_t T, float* x) = 0;
  // a.q8 of T rows of n activations from a.x, for inputs that no norm made. Nothing when a.q8 is null.
  virtual void quantize(Act a, int64_t T, int64_t n) = 0;
  // out.x[t] = norm(x[t]); also out.q8 when set. out.x may equal x.
  virtual void norm(const NormArgs& args, const float* x, int64_t T, Act out) = 0;
  // y[t] += norm(x[t]), of the result of half a layer. x is undefined afterwards.
  virtual void add_norm(const NormArgs& args, float* x, int64_t T, float* y) = 0;
  virtual void scale(float factor, int64_t n, float* x) = 0;  // x[i] *= factor
  virtual void soft_cap(float cap, int64_t n, float* x) = 0;  // x[i] = cap tanh(x[i] / cap)
  // Quantised weights read in.act.q8 (it must be set), others in.act.x. `next`: the norm that reads the one part's y, or
  // null.
  virtual void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) = 0;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T) { matmul(parts, in, T, nullptr); }
  virtual void attention(const AttentionArgs& args, int64_t T, Act out) = 0;  // out [T][n_head * value_dim()]
  // y[t] += y_bias + FFN(in[t]) over all neurons of the shard. `next`: the norm that reads y, or null.
  virtual void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector y_bias, float* y,
                         const NextNorm* next) = 0;
  // ids[t] = the smallest index of the largest of logits[t], [T][n]. NaN never wins.
  virtual void argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) = 0;

 protected:
  friend class DeviceBuffer;
  virtual void* allocate_bytes(size_t bytes,
                               Purpose purpose) = 0;  // zero-filled; throws Error when there is not enough
  virtual void release_bytes(void* data, size_t bytes, Purpose purpose) = 0;
};

inline DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(purpose_, other.purpose_);
  return *this;
}
inline DeviceBuffer::~DeviceBuffer() {
  if (device_ != nullptr) device_->release_bytes(data_, bytes_, purpose_);
}

}  // namespace hearth
