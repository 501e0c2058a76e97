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
  Matrix matrix() const { return {type, rows, cols, data.data(), nullptr}; }
  DType type = DType::f32;
  int64_t rows = 0, cols = 0;
  std::vector<std::byte> data;
  std::vector<float> values;  // what the data means, [rows][cols]
};
Weights random_weights(uint32_t seed, DType type, int64_t rows, int64_t cols);
// n f16-representable values.
std::vector<float> random_activations(uint32_t seed, size_t n);

struct MatmulOptions {
  bool bias = false, accumulate = false, strided = false;
};
Case matmul_case(uint32_t seed, DType type, int64_t T, std::vector<int64_t> rows, int64_t cols,
                 MatmulOptions options = {});
Case norm_case(uint32_t seed, NormKind kind, int64_t T, int64_t n, bool bias);
Case quantize_case(uint32_t seed, int64_t T,
                   int64_t n);  // norm's 8-bit companion, read back through an identity matrix
Case embed_case(uint32_t seed, DType type, int64_t T, int64_t n, bool positions);

struct RopeShape {
  RopeKind kind = RopeKind::neox;
  int64_t T = 1, n_head = 4, n_head_kv = 2, head_dim = 64, n_rot = 64, n_ctx = 64, first_pos = 5;
  bool norms = false;
};
Case rope_case(uint32_t seed, const RopeShape& shape);

struct AttentionShape {
  int64_t T = 1, first_pos = 0, n_head = 4, n_head_kv = 2, head_dim = 64, n_ctx = 64, window = 0;
};
Case attention_case(uint32_t seed, const AttentionShape& shape);

struct FfnShape {
  DType type = DType::f32;
  int64_t n = 96, n_embd = 64, T = 1;
  Activation act = Activation::relu;
  bool gated = true, up_relu = false, biases = false;
  bool transposed = true;      // down_t, else down
  float act_threshold = 0.0f;  // fat_relu's
  // Sparse only:
  bool sparse = false;
  double density = 0.5;  // share of neurons that are active (by shifting the gate's bias)
  float threshold = 0.0f;
  enum class Predicted { all, superset, subset, none } predicted = Predicted::all;
  // The list comes with act(gate) of its neurons, all active, and the shard has no gate rows. Needs a list.
  bool gate_values = false;
  // Gate rows behind the shard's own, handed over to a partner whose answer is added in; 0: no partner.
  int64_t n_handed = 0;
};
Case ffn_case(uint32_t seed, const FfnShape& shape);
// The same weights and inputs as the sparse case's, computed by ffn_dense.
Case dense_twin(uint32_t seed, const FfnShape& sparse);

struct PredictShape {
  enum class Kind { low_rank, gate_copy, signs } kind = Kind::low_rank;
  DType type = DType::f32;
  int64_t n = 96, n_embd = 64, rank = 32;
  bool relu = false, bias = false;  // between the two products
  double density = 0.3;             // share of the neurons that are predicted
  int64_t n_first = 0;              // neurons of the first list
  bool hand_off = false;            // the others go into a mailbox
};
Case predict_case(uint32_t seed, const PredictShape& shape);

// The same operations at sizes at which only speed is of interest: small repeated weights, no tolerance.
Case matmul_speed(DType type, int64_t T, int64_t rows, int64_t cols);
Case ffn_speed(const FfnShape& shape);

Case argmax_case(const std::vector<float>& logits, const std::string& what);

}  // namespace hearth::test
