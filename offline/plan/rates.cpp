#include "offline/plan/rates.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include "core/buffer.h"
#include "core/hand_off.h"
#include "core/mailbox.h"
#include "core/recording.h"
#include "core/sparse_ffn.h"
#include "core/thread_team.h"

namespace hearth::offline {
namespace {

constexpr int64_t kEmbd = 4096, kFf = 11008;
constexpr int kRuns = 5;

double seconds_of(Device& device, FunctionRef<void()> work) {
  device.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  work();
  device.synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The fastest of several runs of `work`, recorded where that is possible, after one to warm up.
double best_seconds(Device& device, FunctionRef<void()> work) {
  Recording* const recording = device.recording();
  int recorded = -1;
  if (recording != nullptr) {
    work();  // once before: what it needs is there then
    recording->begin();
    work();
    recorded = recording->end();
  }
  double best = std::numeric_limits<double>::infinity();
  for (int run = -1; run < kRuns; ++run) {
    const double seconds = seconds_of(device, [&] { recording != nullptr ? recording->launch(recorded) : work(); });
    if (run >= 0) best = std::min(best, seconds);
  }
  return best;
}

// One layer's neurons, of any defined values; all of them active.
class Layer {
 public:
  Layer(Device& device, DType type) : device_(device), data_(3 * shape(type).bytes()), bias_(kFf, 1e6f) {
    std::memset(data_.data(), 1, data_.bytes());
    Limits limits;
    limits.max_cols = limits.max_rows = limits.n_ff = kFf, limits.n_embd = kEmbd;
    limits.quantized_weights = is_quantized(type);
    device.reserve(limits);
    Matrix m = shape(type);
    for (Matrix* to : {&shard.gate, &shard.up, &shard.down_t}) {
      m.data = data_.data() + static_cast<size_t>(to == &shard.gate ? 0 : to == &shard.up ? 1 : 2) * m.bytes();
      *to = device.adopt(m);
    }
    shard.gate_bias = device.adopt(Vector{bias_.data(), kFf});
    shard.act = Activation::relu;
    const size_t q8 = device.q8_bytes(kEmbd);
    memory_ = device.allocate(q8 + (2 * kEmbd + 2 * kFf + 1) * sizeof(float), Purpose::activations);
    x = reinterpret_cast<float*>(memory_.as<std::byte>() + q8), y = x + kEmbd, z = y + kEmbd;
    ids = reinterpret_cast<int32_t*>(z + kFf), count = ids + kFf;
    const std::vector<float> ones(kEmbd, 1.0f);
    device.upload(x, ones.data(), ones.size() * sizeof(float));
    in = {x, is_quantized(type) ? memory_.as<void>() : nullptr};
    device.quantize(in, 1, kEmbd);
  }
  // Bytes of a neuron's rows.
  double neuron_bytes() const { return 3 * static_cast<double>(shape(shard.gate.type).row_size()); }

  // Every step-th neuron from `first` on; returns them.
  std::vector<int32_t> list(int32_t first, int32_t step) const {
    std::vector<int32_t> listed;
    for (int32_t id = first; id < kFf; id += step) listed.push_back(id);
    const auto n = static_cast<int32_t>(listed.size());
    device_.upload(ids, listed.data(), listed.size() * sizeof(int32_t));
    device_.upload(count, &n, sizeof n);
    return listed;
  }
  void run_list() const {
    SparseArgs sparse;
    sparse.candidates = NeuronLists{ids, count, kFf};
    device_.sparse_ffn()->ffn_sparse(shard, sparse, in, 1, {}, y, nullptr);
  }

  FfnShard shard;
  Act in;
  float *x = nullptr, *y = nullptr, *z = nullptr;
  int32_t *ids = nullptr, *count = nullptr;

 private:
  static Matrix shape(DType type) { return {type, kFf, kEmbd, nullptr}; }
  Device& device_;
  HostBuffer data_;
  std::vector<float> bias_;
  DeviceBuffer memory_;
};

// Seconds of a list of every step-th neuron, the fastest of several: each begins elsewhere, so that no cache has it.
double list_seconds(Device& device, const Layer& layer, int32_t step, bool fetched) {
  const HostMailbox nothing_comes(1, 1);
  double best = std::numeric_limits<double>::infinity();
  for (int32_t first = 0; first < std::min(step, 3 * kRuns); ++first) {
    const std::vector<int32_t> ids = layer.list(first, step);
    if (fetched) device.row_prefetch()->fetch(layer.shard, ids, nothing_comes);
    best = std::min(best, seconds_of(device, [&] { layer.run_list(); }));
  }
  return best;
}

}  // namespace

DeviceRates measure_rates(Device& device, DType type) {
  const Layer layer(device, type);
  DeviceRates rates;
  const double matrix = kFf * layer.neuron_bytes() / 3;
  const std::array parts = {MatmulPart{.w = layer.shard.gate, .bias = {}, .y = layer.z},
                            MatmulPart{.w = layer.shard.up, .bias = {}, .y = layer.z},
                            MatmulPart{.w = layer.shard.down_t, .bias = {}, .y = layer.z}};
  rates.dense = 3 * matrix / best_seconds(device, [&] {
                  for (const MatmulPart& part : parts) device.matmul({&part, 1}, layer.in, 1, nullptr);
                });
  // The difference of two lists: what a list takes however long it is counts elsewhere.
  constexpr int32_t kLong = 4, kShort = 16;
  const double seconds = list_seconds(device, layer, kLong, false) - list_seconds(device, layer, kShort, false);
  const double bytes = (1.0 / kLong - 1.0 / kShort) * kFf * layer.neuron_bytes();
  rates.sparse = std::min(rates.dense, bytes / std::max(seconds, 1e-9));
  if (device.is_host()) {
    constexpr int32_t kFew = 80;  // about as many as a layer of a divided model leaves to the CPU
    const double plain = list_seconds(device, layer, kFew, false), fetched = list_seconds(device, layer, kFew, true);
    rates.fetched_speedup = std::max(1.0, plain / fetched);
  }
  return rates;
}

double measure_hand_off(Device& main) {
  constexpr int kHandOffs = 64;
  main.reserve({.max_cols = kEmbd, .max_rows = kEmbd, .n_ff = kEmbd, .n_embd = kEmbd});
  const DeviceBuffer x = main.allocate(kEmbd * sizeof(float), Purpose::activations);
  const auto mailbox = main.hand_offs()->open_mailbox(kEmbd, 1);
  const int rounds = 1 + kRuns + (main.recording() != nullptr ? 1 : 0);
  std::thread cpu([&] {
    try {
      std::fill_n(mailbox->answer_buffer(), kEmbd, 0.0f);
      for (int i = 0; i < rounds * kHandOffs; ++i) mailbox->wait_input(), mailbox->answer();
    } catch (const Error&) {  // the other side has told why
    }
  });
  double seconds = 0;
  try {
    seconds = best_seconds(main, [&] {
      for (int i = 0; i < kHandOffs; ++i) {
        main.hand_offs()->post(*mailbox, x.as<float>(), kEmbd);
        main.hand_offs()->collect(*mailbox, x.as<float>(), kEmbd);
      }
    });
  } catch (...) {
    mailbox->abandon();
    cpu.join();
    throw;
  }
  cpu.join();
  return seconds / kHandOffs;
}

}  // namespace hearth::offline
