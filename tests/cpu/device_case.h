#pragma once
// One case of one operation: its inputs, how to run it on any Device, the error it may make, and the work it does.
// The same case is a test (against the reference device) and a benchmark (bench/).
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/hand_off.h"
#include "core/sparse_ffn.h"
#include "support/types.h"

namespace hearth::test {

// A case bound to one device: uploaded inputs, and outputs between guard values.
class Bound {
 public:
  explicit Bound(Device& on) : device(on) {}

  template <typename T>
  T* input(const std::vector<T>& host) {
    return static_cast<T*>(upload(host.data(), host.size() * sizeof(T)));
  }
  Vector vector(const std::vector<float>& host) {
    return host.empty() ? Vector{} : device.adopt(Vector{host.data(), std::ssize(host)});
  }
  // `initial` is written before each run: NaN for outputs that are overwritten, values for those that are added to.
  float* output(const std::string& name, std::vector<float> initial);
  int32_t* output_ids(const std::string& name, size_t n);
  f16_t* output_f16(const std::string& name, std::vector<f16_t> initial);
  // Activations with exactly these values on every device, and their 8-bit form. Values must be representable in f16; n
  // a multiple of 32. (Attention over a single position returns its value row as it is, and quantises it.)
  Act activations(const std::vector<float>& x, int64_t T, int64_t n);
  // The matrix in the device's own layout, where it has one.
  Matrix packed(const Matrix& host) {
    const size_t bytes = device.packed_bytes(host);
    return bytes == 0 ? device.adopt(host) : device.pack(host, static_cast<std::byte*>(scratch(bytes)));
  }
  void* scratch(size_t bytes) { return buffers_.emplace_back(device.allocate(bytes, Purpose::activations)).as<void>(); }

  void reset();  // writes the initial values and the guards
  // Waits, checks the guards (a failure aborts with the output's name), and returns the outputs as doubles, by name.
  std::vector<std::pair<std::string, std::vector<double>>> read();

  Device& device;

 private:
  enum class Kind { f32, i32, f16 };
  struct Output {
    std::string name;
    Kind kind;
    std::vector<std::byte> initial;  // guards included
    DeviceBuffer buffer;
  };
  void* upload(const void* data, size_t bytes);
  void* add_output(const std::string& name, Kind kind, const void* initial, size_t bytes);

  std::vector<DeviceBuffer> buffers_;
  std::vector<Output> outputs_;
};

struct Case {
  std::string name;
  Limits limits;
  // Uploads the inputs; returns what runs the operation once.
  std::function<std::function<void()>(Bound&)> bind;
  // The absolute error that each element of each output may have, in the order of Bound::output. For a device that
  // accumulates in f32 in any order in which no sum has more than n / 4 + 16 terms one after the other.
  std::vector<std::vector<double>> tolerance;
  // A bound proves nothing when it is as large as the result: no tolerance may exceed this share of its output's RMS.
  double vacuous = 0.05;
  double bytes = 0;  // of weights or cache that must be read
  double flops = 0;
};

// Weights in the file's layout, with their values.
struct Weights {
  Weights() = default;
  Weights(DType type, int64_t rows, int64_t cols, const std::vector<float>& values);
  explicit operator bool() const { return rows > 0; }
  Matrix matrix() const { return {type, rows, cols, data.data()}; }
  DType type = DType::f32;
  int64_t rows = 0, cols = 0;
  std::vector<std::byte> data;
  std::vector<float> values;  // what the data means, [rows][cols]
};
// n columns, or as many as whole blocks of this type take.
inline int64_t whole_blocks(DType type, int64_t n) {
  const int64_t block = traits(type).block_size;
  return (n + block - 1) / block * block;
}
Weights random_weights(uint32_t seed, DType type, int64_t rows, int64_t cols);
// n f16-representable values.
std::vector<float> random_activations(uint32_t seed, size_t n);

struct MatmulOptions {
  bool bias = false, accumulate = false, strided = false;
  bool packed = false;  // weights in the device's own layout, where it has one
};
Case matmul_case(uint32_t seed, DType type, int64_t T, std::vector<int64_t> rows, int64_t cols,
                 MatmulOptions options = {});
Case norm_case(uint32_t seed, NormKind kind, int64_t T, int64_t n, bool bias);
Case quantize_case(uint32_t seed, int64_t T,
                   int64_t n);  // norm's 8-bit companion, read back through an identity matrix
Case embed_case(uint32_t seed, DType type, int64_t T, int64_t n, bool positions);

// Attention over a paged cache: each run is T consecutive tokens of a sequence of its own, from a position on. Pages
// lie in no order, and what nothing has written yet holds NaN.
struct AttentionRun {
  int64_t T = 1, first_pos = 0;
};
struct AttentionShape {
  std::vector<AttentionRun> runs = {{}};
  int64_t n_head = 4, n_head_kv = 2, head_dim = 64, window = 0;
  RopeKind rope = RopeKind::none;
  int64_t n_rot = 0;
  bool norms = false;  // of every head of q and k
  float soft_cap = 0;
  bool sinks = false;
  bool forked = false;  // all sequences have the first page in common
  bool latent =
      false;  // multi-head latent attention: n_head_kv 1, and head_dim - n_rot elements of a key are the value
  int64_t value_dim() const { return latent ? head_dim - n_rot : head_dim; }
  int64_t T() const;
};
Case attention_case(uint32_t seed, const AttentionShape& shape);
struct HeadShape {
  int64_t n_head = 3, rows = 48, cols = 32, n_tail = 6;
};
Case head_products_case(uint32_t seed, DType type, int64_t T, const HeadShape& shape);

struct FfnShape {
  DType type = DType::f32;
  int64_t n = 96, n_embd = 64, T = 1;
  Activation act = Activation::relu;
  bool gated = true, up_relu = false, biases = false;
  bool transposed = true;      // down_t, else down
  float act_threshold = 0.0f;  // fat_relu's
  // Sparse only:
  bool sparse = false;
  // Share of neurons that are active (by shifting the gate's bias). Unless it is 0 or 1, each of several tokens has
  // others.
  double density = 0.5;
  float threshold = 0.0f;
  enum class Predicted { all, superset, subset, none } predicted = Predicted::all;
  bool answered = false;  // a partner gets the input, and its answer is added in; T tokens
};
Case ffn_case(uint32_t seed, const FfnShape& shape);
// The same weights and inputs as the sparse case's, computed by ffn_dense.
Case dense_twin(uint32_t seed, const FfnShape& sparse);

struct PredictShape {
  enum class Kind { low_rank, gate_copy } kind = Kind::low_rank;
  DType type = DType::f32;
  int64_t n = 96, n_embd = 64, rank = 32, T = 1;
  bool relu = false, bias = false;  // between the two products
  double density = 0.3;             // share of the neurons that are predicted (of several tokens: unless it is 0 or 1)
  int64_t n_own = 0, n_linked = 0;  // neurons of either list
  bool hand_off = false;            // the others go into a mailbox
};
Case predict_case(uint32_t seed, const PredictShape& shape);

// The same operations at sizes at which only speed is of interest: small repeated weights, no tolerance.
// packed: in the device's own layout, where it has one.
Case matmul_speed(DType type, int64_t T, int64_t rows, int64_t cols, bool packed = false);
Case ffn_speed(const FfnShape& shape);
Case attention_speed(const AttentionShape& shape);

Case argmax_case(const std::vector<float>& logits, const std::string& what, int64_t T = 1);  // logits [T][n]

}  // namespace hearth::test
