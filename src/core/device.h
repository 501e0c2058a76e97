#pragma once
// The one interface between the engine and the hardware. The forward pass (src/engine) is written once, over Device;
// implementations: the scalar oracle and the SIMD CPU device (cpu/), the CUDA device (cuda/).
//
// Rules that every implementation keeps:
//  * Pointers and views passed to operations are in the device's own address space: memory from allocate(), matrices
//  from
//    adopt(). On the CPU devices that is host memory, and adopt() returns the matrix as it is.
//  * Operations are ordered among themselves and may return before they are done; download() and synchronize() wait.
//  * Operations never allocate: reserve() is told the largest shapes once. That keeps them capturable in a CUDA graph.
//  * What varies from token to token (ids, positions, lists of neurons) is read from device memory.
//  * Results do not depend on the number of threads, nor on timing.
// Shapes are written [rows][cols], row-major; T is the number of tokens (rows of activations) in the call.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/mailbox.h"
#include "core/tensor.h"

namespace hearth {

enum class NormKind { rms, layer };

// What is applied to the gate's pre-activation z. `fat_relu`: z > threshold ? z : 0 (ProSparse). `relu2`: relu(z)^2.
enum class Activation { relu, fat_relu, relu2, silu, gelu };

enum class RopeKind { none, interleaved, neox };  // pairs (2i, 2i+1), or (i, i + n_rot/2)

// What device memory is used for; every byte is accounted under one of these.
enum class Purpose { weights, kv_cache, activations, scratch, predictor, context };
const char* to_string(Purpose purpose);

struct MemoryUse {
  Purpose purpose;
  size_t bytes;
};

// The largest shapes the engine will ask for.
struct Limits {
  int64_t max_tokens = 1;  // T
  int64_t max_context = 1;
  int64_t max_cols = 1;  // longest row of any matrix
  int64_t max_rows = 1;  // most rows of any matrix (without the output head)
  int64_t n_vocab = 1;
  int64_t n_ff = 1;
  int64_t n_embd = 1;
  int64_t n_head = 1, n_head_kv = 1, head_dim = 1;
  bool quantized_weights = false;
};

// One product of a group that shares its input: y[t][r] (+)= sum_c w[r][c] x[t][c] + bias[r].
struct MatmulPart {
  Matrix w;
  Vector bias;              // w.rows elements, or empty
  float* y = nullptr;       // [T][y_stride]
  int64_t y_stride = 0;     // elements between the rows of y; 0 = w.rows
  bool accumulate = false;  // add to y (the residual add)
};

struct NormArgs {
  NormKind kind = NormKind::rms;
  Vector weight, bias;  // [n]; bias may be empty
  float eps = 1e-5f;
  int64_t n = 0;
  // y = (x - mean) / sqrt(var + eps) * weight + bias, or x / sqrt(mean(x^2) + eps) * weight
};

// Per-head q/k norm (Qwen3), rotary embedding, and the write of k and v into one layer's cache.
struct RopeKvArgs {
  float* q = nullptr;                                // [T][n_head][head_dim], rotated in place
  float* k = nullptr;                                // [T][n_head_kv][head_dim]; contents undefined afterwards
  const float* v = nullptr;                          // [T][n_head_kv][head_dim]
  int64_t q_stride = 0, k_stride = 0, v_stride = 0;  // elements between tokens
  int64_t n_head = 0, n_head_kv = 0, head_dim = 0;
  RopeKind rope = RopeKind::none;
  int64_t n_rot = 0;                // rotated elements of a head, even; the rest pass through
  const float* inv_freq = nullptr;  // [n_rot / 2], scaling already applied
  float attention_factor = 1.0f;    // multiplies cos and sin (YaRN-like scalings; 1 otherwise)
  Vector q_norm, k_norm;            // [head_dim], or empty
  float norm_eps = 1e-6f;
  const int32_t* pos = nullptr;  // [T] positions, each < n_ctx
  f16_t* k_cache = nullptr;      // [n_head_kv][n_ctx][head_dim]
  f16_t* v_cache = nullptr;      // [n_head_kv][n_ctx][head_dim]
  int64_t n_ctx = 0;
};

// Causal attention of T new tokens over the cache (which already holds them). Token t sees positions
// max(0, pos[t] - window + 1) .. pos[t]; window 0 = all. Query head h uses kv head h / (n_head / n_head_kv).
struct AttentionArgs {
  const float* q = nullptr;  // [T][q_stride]
  int64_t q_stride = 0;
  const f16_t* k_cache = nullptr;
  const f16_t* v_cache = nullptr;
  int64_t n_ctx = 0;
  int64_t n_head = 0, n_head_kv = 0, head_dim = 0;
  float scale = 1.0f;  // multiplies q.k
  int64_t window = 0;
  const int32_t* pos = nullptr;  // [T], consecutive: pos[t] = pos[0] + t
  int64_t max_kv = 0;            // host-known upper bound of pos[T-1] + 1: fixes the grid, results do not depend on it
};

// The neurons of one FFN layer that one device owns. Row k of each matrix is the device's neuron k.
//   value_k = act(gate_k . h + gate_bias_k) * up_act(up_k . h + up_bias_k)        (without `up`: the first factor
//   alone) y      += sum_k value_k * down_t[k]
// OPT, Falcon and other ungated families keep their first matrix in `gate`.
struct FfnShard {
  Matrix gate, up;  // [n][n_embd]
  Matrix down_t;    // [n][n_embd]: transposed down; what sparse kernels need
  Matrix down;      // [n_embd][n]: as other programs store it; dense only. Exactly one of down_t, down is set.
  Vector gate_bias, up_bias;
  Activation act = Activation::silu;
  float act_threshold = 0.0f;  // fat_relu's
  bool up_relu = false;        // dReLU: up_act = relu
  int64_t n() const { return gate.rows; }
  // Neurons whose up and down rows are here too: all, except in a shard that holds gate rows of the CPU's neurons
  // behind those of its own (see SparseArgs::hand_off).
  int64_t n_whole() const { return down_t ? down_t.rows : gate.rows; }
};

// How to tell from a layer's input which of its neurons will fire, without reading their gate rows.
//   h = fc1 in + fc1_bias, relu'd if `relu`;   score = fc2 h;   neuron k is predicted when score[k] > threshold[k]
// Without fc1, fc2 multiplies the input itself: a low-bit copy of the gate. With `signs` instead of both, the score
// counts agreeing signs: n_signs - 2 popcount(signs[k] ^ signs of in), bit c set where element c is negative
// (SparseInfer, arXiv 2411.12692).
struct Predictor {
  Matrix fc1;                       // [rank][n_embd], or empty
  Vector fc1_bias;                  // [rank], or empty
  bool relu = false;                // between the two
  Matrix fc2;                       // [n][rank]; without fc1 [n][n_embd]
  const uint32_t* signs = nullptr;  // [n][ceil(n_signs / 32)], bit c % 32 of word c / 32
  int64_t n_signs = 0;              // n_embd, with `signs`
  Vector threshold;                 // [n]
  int64_t n() const { return threshold.n; }
  explicit operator bool() const { return static_cast<bool>(threshold); }
};

// Ids of neurons, ascending, and how many there are, in the device's memory.
struct NeuronList {
  int32_t* ids = nullptr;
  int32_t* count = nullptr;
};

// What goes to the CPU along with a list of its neurons: x [n], posted in `mailbox` (null: nothing is posted).
struct HandOff {
  Mailbox* mailbox = nullptr;
  const float* x = nullptr;
  int64_t n = 0;
};

// Where the predicted neurons are listed: rows [0, n_first) of the predictor in `first`; the others are numbered from 0
// again, the first n_linked of them listed in `linked`, what follows in `rest`, or in the hand-off where there is one.
struct PredictArgs {
  int64_t n_first = 0;
  NeuronList first;  // room for n_first ids
  NeuronList rest;   // room for n - n_first - n_linked ids; unused with a hand-off
  HandOff hand_off;
  int64_t n_linked = 0;
  NeuronList linked;  // room for n_linked ids
};

// Of which neurons a hint tells: those of rows [n_first + n_linked, n) of the predictor, numbered from n_first on.
struct HintArgs {
  Mailbox* mailbox = nullptr;
  int64_t n_first = 0, n_linked = 0;
};

// Neurons whose rows the device does not hold: it reads them from page-locked host memory, over the link, for each
// token that needs them.
struct LinkedNeurons {
  FfnShard shard;               // from Device::link()
  NeuronList named;             // those of a token, as predicted
  int32_t* n_active = nullptr;  // out, optional: how many of them are active
};

// Which neurons an FFN computes.
struct SparseArgs {
  float threshold = 0.0f;  // a neuron is active when |act(gate)| > threshold; 0 loses nothing for ReLU families
  const int32_t* predicted = nullptr;  // ids whose gate is evaluated; null = all (exact mode)
  const int32_t* n_predicted = nullptr;
  const float* gate_values = nullptr;  // [n_predicted] act(gate) of the predicted, all active: no gate row is read
  int32_t* active_ids = nullptr;       // out, optional: ids of the active neurons, ascending, [n]
  int32_t* n_active = nullptr;         // out, optional: their number (of the shard's whole neurons)
  // For gate rows at the end of the shard whose up and down rows the CPU has: ids (from 0) and act(gate) of the active
  // ones are posted, as soon as they are known. Set if and only if shard.n() > shard.n_whole(); needs all gates
  // (predicted null).
  HandOff hand_off;
  // y also gets the CPU's answer to the last hand-off, in the same pass over y (as collect() does); the CPU publishes
  // it (Mailbox::publish()).
  Mailbox* collect = nullptr;
  // With `collect`, a hint: the matrices of the product that comes first when the answer has come, or empty ones. What
  // of them a device can bring nearer while it waits costs nothing.
  std::array<Matrix, 3> next = {};
  // y also gets the sum of these neurons, by the same threshold; with `predicted` alone.
  const LinkedNeurons* linked = nullptr;
  // Of the CPU, which serves this mailbox: y is its answer, and nothing is added to it later, so that it is published,
  // each part as soon as it is complete. Not with `linked`.
  Mailbox* answer = nullptr;
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

  // --- memory ---
  DeviceBuffer allocate(size_t bytes, Purpose purpose) {
    return {this, allocate_bytes(bytes, purpose), bytes, purpose};
  }
  virtual void upload(void* device, const void* host, size_t bytes) = 0;
  virtual void download(void* host, const void* device, size_t bytes) = 0;  // waits
  virtual void fill_zero(void* device, size_t bytes) = 0;
  virtual void synchronize() = 0;
  // Weights for this device. The host view must stay valid as long as the device uses it (is_host()), or until return.
  virtual Matrix adopt(const Matrix& host) = 0;
  virtual Vector adopt(const Vector& host) = 0;
  // Bytes that adopt() will take for this matrix (0 when is_host()).
  virtual size_t adopted_bytes(const Matrix& host) const = 0;
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
  // Quantised weights read in.q8 (it must be set), others in.x.
  virtual void matmul(std::span<const MatmulPart> parts, Act in, int64_t T) = 0;
  virtual void rope_kv(const RopeKvArgs& args, int64_t T) = 0;
  virtual void attention(const AttentionArgs& args, int64_t T, Act out) = 0;  // out [T][n_head * head_dim]
  // y[t] += FFN(in[t]) over all neurons of the shard. y_bias (down's bias) is added too when set.
  virtual void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) = 0;
  // One token: the neurons that `predictor` names. `in` is the predictor's input.
  virtual void predict(const Predictor& predictor, Act in, const PredictArgs& args) = 0;
  // One token: gate first, then up and down of the active neurons alone. Needs down_t.
  virtual void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, Act in, Vector y_bias, float* y) = 0;
  // id[0] = the smallest index of the largest of n logits. NaN never wins.
  virtual void argmax(const float* logits, int64_t n, int32_t* id) = 0;

  // --- hand-offs to the CPU (core/mailbox.h); devices that cannot refuse to open one ---
  // Room for `capacity` floats each way, and for a list of `max_ids` neurons.
  virtual std::unique_ptr<Mailbox> open_mailbox(int64_t capacity, int64_t max_ids);
  // Posts n floats and no neurons; the CPU may read them from then on.
  virtual void post(Mailbox& mailbox, const float* x, int64_t n);
  // Waits for the answer to the last post, then x += answer.
  virtual void collect(Mailbox& mailbox, float* x, int64_t n);
  // One token: tells the CPU which of its neurons the predictor of a layer to come names for the input at hand, which
  // is much like that layer's own. To be called between a hand-off and the next one, which is that layer's. Nothing
  // depends on it: the CPU fetches rows while it waits, and a device that is not good at it does nothing. May run
  // beside the operations that follow: names of an input that they have overwritten by then are wrong, no more than
  // that.
  virtual void hint(const Predictor& /*predictor*/, Act /*in*/, const HintArgs& /*args*/) {}
  // Of host devices: brings the rows of these neurons (ascending) near the cores that read them if about the same are
  // listed in the next ffn_sparse() of this shard. Ends when the mailbox's next hand-off is there.
  virtual void fetch(const FfnShard& /*shard*/, std::span<const int32_t> /*ids*/, const Mailbox& /*until*/) {}
  // The same for the input of the next ffn_sparse(), in about 3 us: to be called when a hand-off has begun and its list
  // is not there yet. Until that comes, goes on with what fetch() began for this shard.
  virtual void fetch_input(const FfnShard& /*shard*/, Act /*in*/, const Mailbox& /*hand_off*/) {}

  // --- staging: weights that live in host memory and visit the device for one batch of tokens ---
  // Page-locks host memory, so that copies from it run at the link's speed beside other work; undone by unpin().
  virtual void pin(void* /*host*/, size_t /*bytes*/) {}
  virtual void unpin(void* /*host*/) {}
  // A shard of pinned host memory as ffn_sparse() can read it (SparseArgs::linked), and whether it can: in place, or in
  // link_bytes() of pinned host memory at `memory`, where link() lays the rows out anew.
  virtual bool can_link(const FfnShard& /*host*/) const { return false; }
  virtual size_t link_bytes(const FfnShard& /*host*/) const { return 0; }
  virtual FfnShard link(const FfnShard& host, std::byte* memory);
  // Slots of `bytes` each, for stage(). Called once.
  virtual void open_staging(int n_slots, size_t bytes);
  // Bytes of a slot that this shard takes.
  virtual size_t staged_bytes(const FfnShard& host) const;
  // Begins to copy a shard of host memory into a slot, once the slot's last user is done; returns where it will be. To
  // be used by ffn_dense() with more than a few tokens, between acquire() and release().
  virtual FfnShard stage(int slot, const FfnShard& host);
  virtual void acquire(int slot);  // operations from here on see what stage() brought
  virtual void release(int slot);  // operations up to here are the slot's last users

  // --- graphs: record the operations between begin and end once, launch them many times ---
  virtual bool supports_graphs() const { return false; }
  virtual void begin_capture() {}
  virtual int end_capture() { return -1; }  // the id of the graph
  virtual void launch(int /*graph*/) {}

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
