// Speed of predicted and sparse execution on the GPU, 7B shape, without any file: the predictor, the FFN of a list, the
// exact FFN, and the hand-off to a CPU thread that answers at once. All layers are in one graph, so that weights come
// from memory and not from cache. Prints bytes, and the share of the bandwidth measured at the start.
//
//   bench_cuda_sparse [f16] [q8_0] [q4_0]      (default: all)
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/hand_off.h"
#include "core/recording.h"
#include "core/sparse_ffn.h"
#include "cuda/cuda.h"

namespace hearth {
namespace {

constexpr int64_t kLayers = 32, kEmbd = 4096, kFf = 11008, kRank = 1024;
// The hottest 26 % of the neurons are the GPU's, and are 90 % of the 11 % that a token needs.
constexpr int64_t kHot = 2862, kNeededHot = 1090, kNeededCold = 121;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Answers n hand-offs at once, whatever they bring.
class EchoServer {
 public:
  EchoServer(Mailbox& mailbox, int64_t n)
      : thread_([&mailbox, n] {
          std::memset(mailbox.answer_buffer(), 0, kEmbd * sizeof(float));
          for (int64_t i = 0; i < n; ++i) mailbox.wait_input(), mailbox.publish(0, kEmbd), mailbox.answer();
        }) {}
  ~EchoServer() { thread_.join(); }

 private:
  std::thread thread_;
};

// A few neurons of [begin, end), the same every time.
std::vector<bool> choose(int64_t n, int64_t split, int64_t first, int64_t rest) {
  std::vector<bool> chosen(static_cast<size_t>(n));
  std::mt19937 rng(5);
  for (int64_t have = 0; have < first;) {
    const auto k = static_cast<size_t>(rng() % static_cast<uint32_t>(split));
    if (!chosen[k]) chosen[k] = true, ++have;
  }
  for (int64_t have = 0; have < rest;) {
    const auto k = static_cast<size_t>(split + rng() % static_cast<uint32_t>(n - split));
    if (!chosen[k]) chosen[k] = true, ++have;
  }
  return chosen;
}

class Bench {
 public:
  Bench(DType weights, double memory_rate) : type_(weights), rate_(memory_rate), device_(cuda::make_device(0)) {
    device_->reserve({.max_cols = kFf,
                      .max_rows = kFf,
                      .n_ff = kFf,
                      .n_embd = kEmbd,
                      .n_head = 32,
                      .n_head_kv = 32,
                      .head_dim = 128,
                      .quantized_weights = true});
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (float& v : host_x_) v = normal(rng);
    x_ = buffer(kEmbd), y_ = buffer(kEmbd), normed_.x = buffer(kEmbd);
    named_ = {reinterpret_cast<int32_t*>(buffer(kFf)), reinterpret_cast<int32_t*>(buffer(1)), kFf};
    counts_ = reinterpret_cast<int32_t*>(buffer(1));
    buffers_.push_back(device_->allocate(device_->q8_bytes(kEmbd), Purpose::activations));
    normed_.q8 = buffers_.back().as<void>();
    norm_weight_ = vector(std::vector<float>(kEmbd, 1.0f));
    mailbox_ = device_->hand_offs()->open_mailbox(kEmbd, kFf);
    chosen_ = choose(kFf, kHot, kNeededHot, kNeededCold);
    std::vector<float> always(kFf, 10.0f), exact(kFf);  // far beyond any pre-activation
    for (size_t k = 0; k < exact.size(); ++k) exact[k] = chosen_[k] ? 10.0f : -10.0f;
    always_ = vector(always), exact_ = vector(exact);
    for (int64_t i = 0; i < kLayers; ++i) {
      FfnShard f;
      f.act = Activation::relu;
      f.gate = weights_of(type_, kFf, kEmbd), f.up = weights_of(type_, kFf, kEmbd);
      f.down_t = weights_of(type_, kFf, kEmbd);
      layers_.push_back(f);
      outputs_.push_back(weights_of(type_, kEmbd, kEmbd));
    }
    input_.x = buffer(kEmbd);
    buffers_.push_back(device_->allocate(device_->q8_bytes(kEmbd), Purpose::activations));
    input_.q8 = buffers_.back().as<void>();
    device_->upload(input_.x, host_x_.data(), kEmbd * 4);
    device_->quantize(input_, 1, kEmbd);
    output(0), norm();
  }

  void run() {
    fmt::print("{}: us a layer, MB, us that the bytes take, share of the bandwidth\n", traits(type_).name);
    row("norm", 0, [&](size_t) { norm(); });
    row("ffn dense", layer_bytes(), [&](size_t i) { device_->ffn_dense(layers_[i], normed_, 1, {}, y_, nullptr); });
    row("ffn exact, 11 %", exact_bytes(), [&](size_t i) { exact(i); });
    for (const DType t : {DType::f16, DType::q8_0, DType::q4_0}) {
      if (t == DType::f16 || t == type_) predicted(t);
    }
    gate_copy();
    hand_off();
    std::fflush(stdout);
  }

 private:
  float* buffer(int64_t n) {
    buffers_.push_back(device_->allocate(static_cast<size_t>(n) * 4, Purpose::activations));
    return buffers_.back().as<float>();
  }
  Vector vector(const std::vector<float>& v) {
    return device_->adopt(Vector{v.data(), static_cast<int64_t>(v.size())});
  }
  Matrix weights_of(DType type, int64_t rows, int64_t cols) {
    static std::vector<std::byte> data;
    static DType of = DType::i32;
    const int64_t n = kFf * kEmbd, n_pattern = 1 << 20;
    if (of != type) {
      std::mt19937 rng(1);
      std::normal_distribution<float> normal(0.0f, 0.02f);
      std::vector<float> values(static_cast<size_t>(n_pattern));
      for (float& v : values) v = normal(rng);
      const size_t bytes = row_bytes(type, n_pattern);
      data.resize(static_cast<size_t>(n / n_pattern + 1) * bytes);
      traits(type).from_float(values.data(), data.data(), n_pattern);
      for (size_t at = bytes; at < data.size(); at += bytes) std::memcpy(&data[at], data.data(), bytes);
      of = type;
    }
    return device_->adopt(Matrix{type, rows, cols, data.data(), nullptr});
  }
  size_t layer_bytes() const { return 3 * layers_[0].gate.bytes(); }
  size_t list_bytes(int64_t n) const { return 3 * static_cast<size_t>(n) * row_bytes(type_, kEmbd); }
  size_t exact_bytes() const { return layer_bytes() / 3 + list_bytes(kNeededHot + kNeededCold) * 2 / 3; }

  // Median seconds of one replay of what `step` does for every layer; hand-offs are answered when `serve` is set.
  double time(const std::function<void(size_t)>& step, bool serve) {
    constexpr int kReplays = 20, kRounds = 7;
    Recording& recording = *device_->recording();
    recording.begin();
    for (size_t i = 0; i < kLayers; ++i) step(i);
    const int id = recording.end();
    std::vector<double> times;
    const auto measure = [&] {
      for (int r = -1; r < kRounds; ++r) {
        device_->synchronize();
        const auto start = Clock::now();
        for (int i = 0; i < kReplays; ++i) recording.launch(id);
        device_->synchronize();
        if (r >= 0) times.push_back(seconds_since(start) / kReplays);
      }
    };
    if (serve) {
      const EchoServer server(*mailbox_, int64_t{kReplays} * (kRounds + 1) * kLayers);
      measure();
    } else {
      measure();
    }
    std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
    return times[kRounds / 2];
  }
  double row(const std::string& name, size_t bytes, const std::function<void(size_t)>& step, bool serve = false) {
    const double t = time(step, serve) / static_cast<double>(kLayers);
    const double floor = static_cast<double>(bytes) / rate_;
    fmt::print("  {:<44} {:>7.2f} us {:>8.2f} MB {:>7.2f} us {:>5.1f} %\n", name, t * 1e6,
               static_cast<double>(bytes) * 1e-6, floor * 1e6, 100 * floor / t);
    std::fflush(stdout);
    return t;
  }

  NormArgs norm_args() const { return {NormKind::rms, norm_weight_, {}, 1e-5f, kEmbd}; }
  Input normed_x() const { return {norm_args(), x_, normed_}; }
  void output(size_t i, const NextNorm* next = nullptr) {
    const MatmulPart part{.w = outputs_[i], .y = x_};
    device_->matmul({&part, 1}, input_, 1, next);
  }
  void norm() { device_->norm(norm_args(), x_, 1, normed_); }
  SparseFfn& sparse_ffn() { return *device_->sparse_ffn(); }
  void exact(size_t i) {
    FfnShard f = layers_[i];
    f.gate_bias = exact_;
    sparse_ffn().ffn_sparse(f, {.n_active = counts_}, normed_, 1, {}, y_, nullptr);
  }
  FfnShard hot_shard(size_t i) const {
    FfnShard f = layers_[i];
    f.gate.rows = f.up.rows = f.down_t.rows = kHot;
    f.gate_bias = {always_.data, kHot};
    return f;
  }
  void sparse(size_t i, Mailbox* collect) {
    const SparseArgs args{.candidates = named_, .n_active = counts_, .collect = collect};
    sparse_ffn().ffn_sparse(hot_shard(i), args, normed_, 1, {}, y_, nullptr);
  }
  void sparse_all(size_t i) {
    FfnShard f = layers_[i];
    f.gate_bias = always_;
    sparse_ffn().ffn_sparse(f, {.candidates = named_, .n_active = counts_}, normed_, 1, {}, y_, nullptr);
  }
  void predict(const Predictor& p, Mailbox* mailbox, const Input& in) {
    HandOff hand_off;
    if (mailbox != nullptr) hand_off = {mailbox, x_, kEmbd};
    sparse_ffn().predict(p, in, 1, {mailbox != nullptr ? kHot : kFf, named_, 0, {}, hand_off});
  }
  // Thresholds that let exactly the chosen neurons through.
  Vector thresholds(const std::vector<float>& score) {
    std::vector<float> t(score);
    for (size_t k = 0; k < t.size(); ++k) t[k] += (chosen_[k] ? -0.05f : 0.05f) * (1.0f + std::abs(t[k]));
    return vector(t);
  }
  std::vector<float> scores(const Predictor& p) {
    float* const hidden = buffer(kRank);
    buffers_.push_back(device_->allocate(device_->q8_bytes(kRank), Purpose::activations));
    Act h = normed_;
    if (p.fc1) {
      h = {hidden, buffers_.back().as<void>()};
      const MatmulPart first{.w = p.fc1, .y = hidden};
      device_->matmul({&first, 1}, normed_, 1);
      device_->quantize(h, 1, kRank);
    }
    float* const score = buffer(kFf);
    const MatmulPart second{.w = p.fc2, .y = score};
    device_->matmul({&second, 1}, h, 1);
    std::vector<float> s(kFf);
    device_->download(s.data(), score, s.size() * 4);
    return s;
  }
  void expect_chosen(const Predictor& p) {
    predict(p, nullptr, normed_);
    sparse_all(0);
    int32_t n = 0;
    device_->download(&n, counts_, 4);
    if (n != kNeededHot + kNeededCold) fail("{} neurons predicted instead of {}", n, kNeededHot + kNeededCold);
  }

  void predicted(DType type) {
    std::vector<Predictor> p(kLayers);
    for (Predictor& q : p) q.fc1 = weights_of(type, kRank, kEmbd), q.fc2 = weights_of(type, kFf, kRank);
    const Vector threshold = thresholds(scores(p[0]));
    for (Predictor& q : p) q.threshold = threshold;
    expect_chosen(p[0]);
    const size_t bytes = p[0].fc1.bytes() + p[0].fc2.bytes(), list = list_bytes(kNeededHot);
    const std::string name = fmt::format("predict, rank 1024 {}", traits(type).name);
    row(name, bytes, [&](size_t i) { predict(p[i], nullptr, normed_); });
    row("norm + " + name, bytes, [&](size_t i) { predict(p[i], nullptr, normed_x()); });
    row(
        "  with hand-off", bytes, [&](size_t i) { predict(p[i], mailbox_.get(), normed_x()), collect(); }, true);
    row(fmt::format("ffn of {} listed", kNeededHot), list, [&](size_t i) { sparse(i, nullptr); });
    in_a_layer(p);
    row(
        "norm + predict + ffn", bytes + list,
        [&](size_t i) { predict(p[i], mailbox_.get(), normed_x()), sparse(i, mailbox_.get()); }, true);
    row(
        "norm + predict + hint of the next layer + ffn", 2 * bytes + list,
        [&](size_t i) {
          predict(p[i], mailbox_.get(), normed_x());
          device_->hand_offs()->hint(p[(i + 1) % kLayers], normed_, {mailbox_.get(), kHot, 0});
          sparse(i, mailbox_.get());
        },
        true);
  }
  // What a predictor adds to a layer without hand-offs, between attention's output product and the FFN: there its first
  // weights are asked for while the product still runs, and it is not its own neighbour, which fills the GPU.
  void in_a_layer(const std::vector<Predictor>& p) {
    const size_t product = outputs_[0].bytes(), list = list_bytes(kNeededHot + kNeededCold);
    const double without =
        row("output product + norm + ffn", product + list, [&](size_t i) { output(i), norm(), sparse_all(i); });
    const double with = row("output product + norm + predict + ffn",
                            product + list + p[0].fc1.bytes() + p[0].fc2.bytes(), [&](size_t i) {
                              const NextNorm next{norm_args(), p[i].fc1, false};
                              output(i, &next), predict(p[i], nullptr, normed_x()), sparse_all(i);
                            });
    fmt::print("  {:<44} {:>7.2f} us\n", "  so the predictor adds", (with - without) * 1e6);
  }
  void gate_copy() {
    std::vector<Predictor> p(kLayers);
    for (Predictor& q : p) q.fc2 = weights_of(DType::q4_0, kFf, kEmbd);
    const Vector threshold = thresholds(scores(p[0]));
    for (Predictor& q : p) q.threshold = threshold;
    expect_chosen(p[0]);
    row("predict, copy of the gate q4_0", p[0].fc2.bytes(), [&](size_t i) { predict(p[i], nullptr, normed_); });
  }
  void hand_off() {
    row(
        "hand-off alone (post + collect)", 0,
        [&](size_t) { device_->hand_offs()->post(*mailbox_, x_, kEmbd), collect(); }, true);
  }
  void collect() { device_->hand_offs()->collect(*mailbox_, y_, kEmbd); }

  DType type_;
  double rate_;
  std::vector<float> host_x_ = std::vector<float>(kEmbd);
  std::unique_ptr<Device> device_;
  std::vector<DeviceBuffer> buffers_;
  std::unique_ptr<Mailbox> mailbox_;
  std::vector<bool> chosen_;
  std::vector<FfnShard> layers_;
  std::vector<Matrix> outputs_;  // attention's, whose input is input_, and result x_
  Vector norm_weight_, always_, exact_;
  Act normed_, input_;
  float *x_ = nullptr, *y_ = nullptr;
  NeuronLists named_;
  int32_t* counts_ = nullptr;
};

void run(const std::set<std::string>& types) {
  std::string why;
  if (cuda::list_gpus(&why).empty()) fail("no GPU to measure: {}", why);
  const cuda::Bandwidth b = cuda::measure_bandwidth(0);
  fmt::print("memory read {:.0f} GB/s\n", b.memory_read * 1e-9);
  for (const DType t : {DType::f16, DType::q8_0, DType::q4_0}) {
    if (types.empty() || types.count(traits(t).name) > 0) Bench(t, b.memory_read).run();
  }
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  try {
    hearth::run({argv + 1, argv + argc});
    return 0;
  } catch (const hearth::Error& e) {
    fmt::print(stderr, "bench_cuda_sparse: {}\n", e.what());
    return 1;
  }
}
