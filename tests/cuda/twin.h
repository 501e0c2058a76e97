#pragma once
// The same operation on the GPU and on the reference device, compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "core/cold_rows.h"
#include "core/experts.h"
#include "core/hand_off.h"
#include "core/recording.h"
#include "core/sparse_ffn.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "cuda/packing.h"
#include "support/random.h"
#include "support/types.h"

namespace hearth::test {

constexpr int kRef = 0, kGpu = 1;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Every type that GPUs have kernels for.
inline std::vector<DType> gpu_types() {
  return types_where([](const DTypeTraits& t) { return !t.quantized() || cuda::is_packed(t.type); });
}
// n columns, or so many more that they are whole blocks of a quantised type.
inline int64_t whole_blocks(DType type, int64_t n) {
  const int64_t block = is_quantized(type) ? traits(type).block_size : 1;
  return (n + block - 1) / block * block;
}
constexpr double kEps = 0x1p-24;  // rounding of f32
constexpr double kEpsF16 = 0x1p-11, kEpsBf16 = 0x1p-8;

// HEARTH_TEST_GPU=small: as on a GPU of consumer's size before Hopper, where kernels are divided in other ways.
inline cuda::GpuShape gpu_shape() {
  const char* shape = std::getenv("HEARTH_TEST_GPU");
  if (shape == nullptr || std::strcmp(shape, "small") != 0) return {};
  return {.multiprocessors = 28, .shared_per_block = 99 << 10, .overlap = false};
}

// One device for all tests of a process: making one costs a second, and compute-sanitizer's initcheck loses its way
// where addresses are mapped a second time.
class GpuTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (ref_) return;
    std::string why;
    if (cuda::list_gpus(&why).empty()) {
      why_not_ = why;
      return;
    }
    gpu_ = cuda::make_device(0, gpu_shape());
    gpu_->reserve({.max_tokens = 192,
                   .max_context = 16384,
                   .max_cols = 9216,
                   .max_rows = 9216,
                   .n_vocab = 200000,
                   .n_ff = 9216,
                   .n_embd = 8256,
                   .n_head = 64,
                   .n_head_kv = 1,  // the fewer, the more pieces a context is cut into
                   .head_dim = 576,
                   .n_experts = 161,
                   .n_named = 9,
                   .n_ff_expert = 1024,
                   .quantized_weights = true});
    ref_ = cpu::make_reference_device();
  }
  void SetUp() override {
    if (!gpu_) GTEST_SKIP() << "needs a GPU: " << why_not_;
  }
  static Device& device(int side) { return side == kGpu ? *gpu_ : *ref_; }
  static SparseFfn& sparse_ffn(int side) { return *device(side).sparse_ffn(); }
  static HandOffs& hand_offs(int side) { return *device(side).hand_offs(); }

  static inline std::unique_ptr<Device> gpu_, ref_;
  static inline std::string why_not_;

 private:
  // Before the process ends, since the driver may be gone when static objects are.
  class Cleanup : public ::testing::Environment {
    void TearDown() override { gpu_.reset(), ref_.reset(); }
  };
  static inline ::testing::Environment* const cleanup_ = ::testing::AddGlobalTestEnvironment(new Cleanup);
};

// An array on both devices, with the content that it has before an operation.
template <typename T>
class Twin {
 public:
  Twin(Device& ref, Device& gpu, std::vector<T> initial) : initial_(std::move(initial)), device_{&ref, &gpu} {
    for (int side : {kRef, kGpu})
      buffer_[side] = device_[side]->allocate(std::max<size_t>(bytes(), 16), Purpose::activations);
    reset();
  }
  T* on(int side) const { return buffer_[side].template as<T>(); }
  size_t bytes() const { return initial_.size() * sizeof(T); }
  const std::vector<T>& initial() const { return initial_; }
  void reset() {
    for (int side : {kRef, kGpu}) reset(side);
  }
  void reset(int side) { device_[side]->upload(on(side), initial_.data(), bytes()); }
  std::vector<T> read(int side) const {
    std::vector<T> v(initial_.size());
    device_[side]->download(v.data(), on(side), bytes());
    return v;
  }

 private:
  std::vector<T> initial_;
  Device* device_[2];
  DeviceBuffer buffer_[2];
};

// Activations [T][n] on both devices, with room for their 8-bit form (of whole blocks only).
class TwinAct {
 public:
  TwinAct(Device& ref, Device& gpu, int64_t T, int64_t n, std::vector<float> initial)
      : x(ref, gpu, std::move(initial)),
        q8_{{ref, gpu, std::vector<std::byte>(static_cast<size_t>(T) * ref.q8_bytes(n))},
            {ref, gpu, std::vector<std::byte>(static_cast<size_t>(T) * gpu.q8_bytes(n))}},
        row_bytes_{ref.q8_bytes(n), gpu.q8_bytes(n)},
        n_(n) {}
  // From row t on.
  Act on(int side, int64_t t = 0) const {
    const bool has_q8 = n_ % 32 == 0;
    return {x.on(side) + t * n_, has_q8 ? q8_[side].on(side) + static_cast<size_t>(t) * row_bytes_[side] : nullptr};
  }
  Twin<float> x;

 private:
  Twin<std::byte> q8_[2];
  size_t row_bytes_[2];
  int64_t n_;
};

// Lists of neurons on both devices: room for `room` ids of each of T tokens.
class TwinLists {
 public:
  TwinLists(Device& ref, Device& gpu, int64_t T, int64_t room)
      : room_(room),
        ids_(ref, gpu, std::vector<int32_t>(static_cast<size_t>(T * room + 1), -7)),
        count_(ref, gpu, std::vector<int32_t>(static_cast<size_t>(T), -7)) {}
  // From token t on.
  NeuronLists on(int side, int64_t t = 0) const { return {ids_.on(side) + t * room_, count_.on(side) + t, room_}; }
  // Token t's, on the GPU from its mask (cuda/neuron_mask.cuh): of n neurons, the first at bit `skip`.
  std::vector<int32_t> read(int side, int64_t t, int64_t n, int64_t skip = 0) const {
    const std::vector<int32_t> memory = ids_.read(side);
    const auto own = memory.begin() + static_cast<std::ptrdiff_t>(t * room_);
    if (side == kRef) return {own, own + count_.read(kRef)[static_cast<size_t>(t)]};
    std::vector<int32_t> ids;
    for (int64_t k = 0; k < n; ++k) {
      const auto word = static_cast<uint32_t>(own[static_cast<std::ptrdiff_t>((skip + k) / 32)]);
      if ((word >> ((skip + k) % 32) & 1) != 0) ids.push_back(static_cast<int32_t>(k));
    }
    return ids;
  }
  // The GPU's words beyond those of a mask are as they were.
  bool kept_rest(int64_t n_words) const {
    const std::vector<int32_t> memory = ids_.read(kGpu);
    return std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(n_words), memory.end(),
                       [](int32_t v) { return v == -7; });
  }
  // Token t's become these.
  void write(Device& ref, Device& gpu, int64_t t, const std::vector<int32_t>& ids) {
    const auto count = static_cast<int32_t>(ids.size());
    ref.upload(on(kRef, t).ids, ids.data(), ids.size() * 4), ref.upload(on(kRef, t).count, &count, 4);
    std::vector<uint32_t> mask(static_cast<size_t>((room_ + 31) / 32));
    for (const int32_t id : ids) mask[static_cast<size_t>(id / 32)] |= 1u << id % 32;
    gpu.upload(on(kGpu, t).ids, mask.data(), mask.size() * 4);
  }

 private:
  int64_t room_;
  Twin<int32_t> ids_, count_;
};

// A random matrix on both devices.
class TwinMatrix {
 public:
  TwinMatrix() = default;
  TwinMatrix(Device& ref, Device& gpu, std::mt19937& rng, DType type, int64_t rows, int64_t cols, float std = 1.0f) {
    values_ = random_normal(rng, static_cast<size_t>(rows * cols), std);
    storage_.resize(static_cast<size_t>(rows) * row_bytes(type, cols));
    const DTypeTraits& t = traits(type);
    t.from_float(values_.data(), storage_.data(), rows * cols);
    t.to_float(storage_.data(), values_.data(), rows * cols);
    const Matrix host{type, rows, cols, storage_.data()};
    matrix_[kRef] = ref.adopt(host), matrix_[kGpu] = gpu.adopt(host);
  }
  const Matrix& on(int side) const { return matrix_[side]; }
  const std::vector<float>& values() const { return values_; }  // as stored, in f32

 private:
  std::vector<std::byte> storage_;
  std::vector<float> values_;
  Matrix matrix_[2];
};

// ||a - b|| / ||b||; NaN anywhere gives NaN.
inline double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// Runs `op` on the reference once and on the GPU twice, from the same state of `outputs`. The GPU's results must be the
// same bits both times.
template <typename T>
void run_twins(Device& ref, Device& gpu, std::vector<Twin<T>*> outputs, const std::function<void(int, Device&)>& op) {
  op(kRef, ref);
  std::vector<std::vector<T>> first;
  for (int run = 0; run < 2; ++run) {
    for (Twin<T>* out : outputs) out->reset(kGpu);
    op(kGpu, gpu);
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::vector<T> now = outputs[i]->read(kGpu);
      if (run == 0) {
        first.push_back(now);
      } else {
        ASSERT_EQ(std::memcmp(now.data(), first[i].data(), outputs[i]->bytes()), 0)
            << "output " << i << " changes from run to run";
      }
    }
  }
}

}  // namespace hearth::test
