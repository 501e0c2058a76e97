// Speed of the CUDA device on synthetic models, without any file: whole-token decode as one graph, each operation by
// itself, long contexts, prompts, and the sparse FFN. Prints bytes, GB/s and the share of the bandwidth measured at the
// start. `few`: steps of 1 to 8 tokens, each the next of one sequence.
//
//   bench_cuda [decode] [few] [long] [prompt] [tiny] [sparse]      (default: all)
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/recording.h"
#include "core/sparse_ffn.h"
#include "cuda/cuda.h"

namespace hearth {
namespace {

struct Shape {
  const char* name;
  int64_t n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, n_vocab;
};
constexpr Shape kLlama7B{"llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000};
constexpr Shape kMistral7B{"mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000};
constexpr Shape kTiny{"tiny", 8, 512, 2048, 8, 4, 64, 8192};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Random weights of one type that every matrix is cut from. Each matrix still gets its own GPU memory.
class RandomWeights {
 public:
  RandomWeights(DType type, int64_t largest) : type_(type) {
    const DTypeTraits& t = traits(type);
    const int64_t n_pattern = 1 << 20;
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::vector<float> values(static_cast<size_t>(n_pattern));
    for (float& v : values) v = normal(rng);
    const size_t pattern_bytes = row_bytes(type, n_pattern);
    data_.resize(static_cast<size_t>(largest / n_pattern + 1) * pattern_bytes);
    t.from_float(values.data(), data_.data(), n_pattern);
    for (size_t at = pattern_bytes; at < data_.size(); at += pattern_bytes)
      std::memcpy(&data_[at], data_.data(), pattern_bytes);
  }
  Matrix matrix(int64_t rows, int64_t cols) const { return {type_, rows, cols, data_.data(), nullptr}; }

 private:
  DType type_;
  std::vector<std::byte> data_;
};

struct Layer {
  Matrix wq, wk, wv, wo;
  FfnShard ffn;
};

// A model of one shape and type on a device of its own, with everything that a forward pass needs.
class SyntheticModel {
 public:
  SyntheticModel(const Shape& shape, DType weights, int64_t context, int64_t max_tokens, bool transposed_down = false)
      : s(shape), type(weights), n_ctx(context), device(cuda::make_device(0)) {
    device->reserve({.max_tokens = max_tokens,
                     .max_context = n_ctx,
                     .max_cols = std::max(s.n_ff, s.n_embd),
                     .max_rows = s.n_ff,
                     .n_vocab = s.n_vocab,
                     .n_ff = s.n_ff,
                     .n_embd = s.n_embd,
                     .n_head = s.n_head,
                     .n_head_kv = s.n_head_kv,
                     .head_dim = s.head_dim,
                     .quantized_weights = is_quantized(type)});
    load(transposed_down);
    const int64_t n_q = s.n_head * s.head_dim, n_kv = s.n_head_kv * s.head_dim, T = max_tokens;
    x = buffer(T * s.n_embd), q = buffer(T * n_q), k = buffer(T * n_kv), v = buffer(T * n_kv);
    normed = act(T, s.n_embd), attn = act(T, n_q);
    logits = buffer(std::min(T, kFewTokens) * s.n_vocab);
    ids = reinterpret_cast<int32_t*>(buffer(T)), pos = reinterpret_cast<int32_t*>(buffer(T));
    best = reinterpret_cast<int32_t*>(buffer(T)), n_active = reinterpret_cast<int32_t*>(buffer(kFewTokens));
    slot = reinterpret_cast<int32_t*>(buffer(T)), pages = reinterpret_cast<int32_t*>(buffer(n_pages()));
    std::vector<int32_t> table(static_cast<size_t>(n_pages()));
    std::iota(table.begin(), table.end(), 0);
    device->upload(pages, table.data(), table.size() * 4);
    const int64_t page_layer = 2 * s.n_head_kv * kPagePositions * s.head_dim;
    buffers_.push_back(
        device->allocate(static_cast<size_t>(n_pages() * s.n_layer * page_layer) * 2, Purpose::kv_cache));
    kv = buffers_.back().as<f16_t>();
    std::vector<f16_t> random(static_cast<size_t>(page_layer));
    std::mt19937 rng(2);
    for (f16_t& h : random) h = f32_to_f16(static_cast<float>(rng() % 2048) / 1024.0f - 1.0f);
    for (int64_t i = 0; i < n_pages() * s.n_layer; ++i)
      device->upload(kv + i * page_layer, random.data(), random.size() * 2);
  }

  void set_tokens(int64_t first_pos, int64_t T) {
    std::vector<int32_t> id(static_cast<size_t>(T)), p(static_cast<size_t>(T));
    for (size_t i = 0; i < p.size(); ++i)
      id[i] = static_cast<int32_t>(i * 7 % 1000), p[i] = static_cast<int32_t>(first_pos) + static_cast<int32_t>(i);
    device->upload(ids, id.data(), id.size() * 4);
    device->upload(pos, p.data(), p.size() * 4);
    first_pos_ = first_pos;
  }

  // --- the steps of a layer ---
  NormArgs norm() const { return {NormKind::rms, norm_weight, {}, 1e-5f, s.n_embd}; }
  Input normed_x() const { return {norm(), x, normed}; }
  void do_norm(int64_t T) { device->norm(norm(), x, T, normed); }
  void do_qkv(const Layer& l, const Input& in, int64_t T) {
    const MatmulPart parts[] = {{l.wq, {}, q}, {l.wk, {}, k}, {l.wv, {}, v}};
    device->matmul(parts, in, T);
  }
  void do_attention(int64_t layer, int64_t T, int64_t max_kv) {
    const int64_t part = s.n_head_kv * kPagePositions * s.head_dim;  // a page's keys of one layer
    AttentionArgs a;
    a.q = q, a.k = k, a.v = v;
    a.n_head = s.n_head, a.n_head_kv = s.n_head_kv, a.head_dim = s.head_dim;
    a.rope = RopeKind::interleaved, a.n_rot = s.head_dim, a.inv_freq = inv_freq.data;
    a.cache = {kv + 2 * layer * part, kv + (2 * layer + 1) * part, 2 * s.n_layer * part};
    run_ = {0, T, first_pos_};
    a.rows = {pos, slot, pages, n_pages(), {&run_, 1}};
    a.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)), a.max_kv = max_kv;
    device->attention(a, T, attn);
  }
  void do_out(const Layer& l, int64_t T, const NextNorm* next = nullptr) {
    const MatmulPart part{.w = l.wo, .y = x, .accumulate = true};
    device->matmul({&part, 1}, attn, T, next);
  }
  void do_ffn(const Layer& l, const Input& in, int64_t T, const NextNorm* next = nullptr) {
    device->ffn_dense(l.ffn, in, T, {}, x, next);
  }
  void do_head(const Input& in, int64_t T) {
    const MatmulPart part{.w = head, .y = logits};
    device->matmul({&part, 1}, in, T);
  }
  void do_sparse(const Layer& l, float threshold, const Input& in, int64_t T, const NextNorm* next = nullptr) {
    device->sparse_ffn()->ffn_sparse(l.ffn, {.threshold = threshold, .n_active = n_active}, in, T, {}, x, next);
  }
  void forward(int64_t T, int64_t max_kv, std::optional<float> sparse_threshold = std::nullopt) {
    const int64_t n_logits = T <= kFewTokens ? T : 1;
    device->embed(embedding, ids, {}, pos, 0, T, x);
    for (int64_t i = 0; i < s.n_layer; ++i) {
      const Layer& l = layers[static_cast<size_t>(i)];
      const bool last = i + 1 == s.n_layer;
      const NextNorm ffn{norm(), l.ffn.gate, false},
          next{norm(), last ? head : layers[static_cast<size_t>(i + 1)].wq, true};
      do_qkv(l, normed_x(), T), do_attention(i, T, max_kv), do_out(l, T, &ffn);
      if (sparse_threshold) {
        do_sparse(l, *sparse_threshold, normed_x(), T, &next);
      } else {
        do_ffn(l, normed_x(), T, &next);
      }
    }
    do_head(normed_x(), n_logits);
    device->argmax(logits, s.n_vocab, n_logits, best);
  }

  size_t layer_bytes() const {
    const Layer& l = layers[0];
    return l.wq.bytes() + l.wk.bytes() + l.wv.bytes() + l.wo.bytes() + ffn_bytes();
  }
  size_t ffn_bytes() const {
    const FfnShard& f = layers[0].ffn;
    return f.gate.bytes() + f.up.bytes() + (f.down ? f.down : f.down_t).bytes();
  }
  size_t kv_bytes(int64_t n_kv) const { return static_cast<size_t>(2 * s.n_head_kv * n_kv * s.head_dim) * 2; }
  size_t token_bytes(int64_t n_kv) const {
    return static_cast<size_t>(s.n_layer) * (layer_bytes() + kv_bytes(n_kv)) + head.bytes();
  }

  Shape s;
  DType type;
  int64_t n_ctx;
  std::unique_ptr<Device> device;
  std::vector<Layer> layers;
  Matrix embedding, head;
  Vector norm_weight, inv_freq;
  float *x, *q, *k, *v, *logits;
  Act normed, attn;
  int32_t *ids, *pos, *best, *n_active;
  int32_t *slot, *pages;
  f16_t* kv;

 private:
  int64_t n_pages() const { return (n_ctx + kPagePositions - 1) / kPagePositions; }
  void load(bool transposed_down) {
    const RandomWeights random(type, std::max(s.n_vocab, s.n_ff) * s.n_embd);
    const auto start = Clock::now();
    size_t bytes = 0;
    const auto adopt = [&](int64_t rows, int64_t cols) {
      const Matrix host = random.matrix(rows, cols);
      bytes += host.bytes();
      return device->adopt(host);
    };
    const int64_t n_q = s.n_head * s.head_dim, n_kv = s.n_head_kv * s.head_dim;
    for (int64_t i = 0; i < s.n_layer; ++i) {
      Layer l{adopt(n_q, s.n_embd), adopt(n_kv, s.n_embd), adopt(n_kv, s.n_embd), adopt(s.n_embd, n_q), {}};
      l.ffn.gate = adopt(s.n_ff, s.n_embd), l.ffn.up = adopt(s.n_ff, s.n_embd);
      (transposed_down ? l.ffn.down_t : l.ffn.down) =
          transposed_down ? adopt(s.n_ff, s.n_embd) : adopt(s.n_embd, s.n_ff);
      l.ffn.act = transposed_down ? Activation::relu : Activation::silu;
      layers.push_back(l);
    }
    embedding = adopt(s.n_vocab, s.n_embd), head = adopt(s.n_vocab, s.n_embd);
    device->synchronize();
    fmt::print("loaded {} {}: {:.2f} GB in {:.2f} s, {:.1f} GB/s\n", s.name, traits(type).name,
               static_cast<double>(bytes) * 1e-9, seconds_since(start),
               static_cast<double>(bytes) * 1e-9 / seconds_since(start));
    const std::vector<float> ones(static_cast<size_t>(s.n_embd), 1.0f);
    norm_weight = device->adopt(Vector{ones.data(), s.n_embd});
    std::vector<float> freq(static_cast<size_t>(s.head_dim / 2));
    for (size_t i = 0; i < freq.size(); ++i)
      freq[i] = std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(s.head_dim));
    inv_freq = device->adopt(Vector{freq.data(), s.head_dim / 2});
  }
  float* buffer(int64_t n) {
    buffers_.push_back(device->allocate(static_cast<size_t>(n) * 4, Purpose::activations));
    return buffers_.back().as<float>();
  }
  Act act(int64_t T, int64_t n) {
    Act a{buffer(T * n), nullptr};
    if (is_quantized(type)) {
      buffers_.push_back(device->allocate(static_cast<size_t>(T) * device->q8_bytes(n), Purpose::activations));
      a.q8 = buffers_.back().as<void>();
    }
    return a;
  }
  std::vector<DeviceBuffer> buffers_;
  int64_t first_pos_ = 0;
  BatchRun run_;
};

// Median seconds of one replay of what `record` enqueues, over `rounds` timings of `replays` each.
double time_graph(Device& d, const std::function<void()>& record, int replays = 20, int rounds = 5) {
  Recording& recording = *d.recording();
  recording.begin();
  record();
  const int id = recording.end();
  std::vector<double> times;
  for (int r = -1; r < rounds; ++r) {
    d.synchronize();
    const auto start = Clock::now();
    for (int i = 0; i < replays; ++i) recording.launch(id);
    d.synchronize();
    if (r >= 0) times.push_back(seconds_since(start) / replays);
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<size_t>(rounds / 2)];
}

double g_bandwidth = 0;

void print_token(const SyntheticModel& m, const char* what, int64_t n_kv, double seconds) {
  const double rate = static_cast<double>(m.token_bytes(n_kv)) / seconds;
  fmt::print("{:<11} {:<5} {:<22} {:>9.1f} tok/s {:>8.3f} ms {:>7.2f} GB {:>7.0f} GB/s {:>5.1f} %\n", m.s.name,
             traits(m.type).name, what, 1 / seconds, seconds * 1e3, static_cast<double>(m.token_bytes(n_kv)) * 1e-9,
             rate * 1e-9, 100 * rate / g_bandwidth);
  std::fflush(stdout);
}

// Every operation by itself, all layers in one graph (so that weights come from memory, not from cache).
void print_operations(SyntheticModel& m, int64_t max_kv, int64_t n_kv) {
  const auto row = [&](const char* name, size_t bytes, const std::function<void(int64_t, const Layer&)>& step) {
    const double t = time_graph(*m.device,
                                [&] {
                                  for (int64_t i = 0; i < m.s.n_layer; ++i) step(i, m.layers[static_cast<size_t>(i)]);
                                }) /
                     static_cast<double>(m.s.n_layer);
    const double rate = static_cast<double>(bytes) / t;
    fmt::print("    {:<12} {:>8.2f} us {:>8.2f} MB {:>7.0f} GB/s {:>5.1f} %\n", name, t * 1e6,
               static_cast<double>(bytes) * 1e-6, rate * 1e-9, 100 * rate / g_bandwidth);
  };
  const Layer& l = m.layers[0];
  row("norm", 0, [&](int64_t, const Layer&) { m.do_norm(1); });
  row("norm+qkv", l.wq.bytes() + l.wk.bytes() + l.wv.bytes(),
      [&](int64_t, const Layer& w) { m.do_qkv(w, m.normed_x(), 1); });
  row("qkv", l.wq.bytes() + l.wk.bytes() + l.wv.bytes(), [&](int64_t, const Layer& w) { m.do_qkv(w, m.normed, 1); });
  row("attention", m.kv_bytes(n_kv), [&](int64_t i, const Layer&) { m.do_attention(i, 1, max_kv); });
  row("out", l.wo.bytes(), [&](int64_t, const Layer& w) { m.do_out(w, 1); });
  row("ffn", m.ffn_bytes(), [&](int64_t, const Layer& w) { m.do_ffn(w, m.normed, 1); });
  row("norm+ffn", m.ffn_bytes(), [&](int64_t, const Layer& w) { m.do_ffn(w, m.normed_x(), 1); });
  const double head = time_graph(*m.device, [&] { m.do_head(m.normed, 1); });
  fmt::print("    {:<12} {:>8.2f} us {:>8.2f} MB {:>7.0f} GB/s\n", "head", head * 1e6,
             static_cast<double>(m.head.bytes()) * 1e-6, static_cast<double>(m.head.bytes()) / head * 1e-9);
  const double best = time_graph(*m.device, [&] { m.device->argmax(m.logits, m.s.n_vocab, 1, m.best); });
  fmt::print("    {:<12} {:>8.2f} us\n", "argmax", best * 1e6);
}

// As a program decodes: the token goes up, the graph runs, the next token comes down.
double time_decode_loop(SyntheticModel& m, int64_t first_pos, int n) {
  Recording& recording = *m.device->recording();
  recording.begin();
  m.forward(1, 256);
  const int id_of_step = recording.end();
  const auto start = Clock::now();
  int32_t id = 1;
  for (int i = 0; i < n; ++i) {
    const auto p = static_cast<int32_t>(first_pos + i);
    m.device->upload(m.ids, &id, 4);
    m.device->upload(m.pos, &p, 4);
    recording.launch(id_of_step);
    m.device->download(&id, m.best, 4);
  }
  return seconds_since(start) / n;
}

void bench_decode(const Shape& shape, DType type, bool transposed_down) {
  SyntheticModel m(shape, type, 512, 1, transposed_down);
  m.set_tokens(64, 1);
  print_token(m, transposed_down ? "graph, transposed down" : "graph, 65 in context", 65,
              time_graph(*m.device, [&] { m.forward(1, 256); }));
  print_token(m, "loop, 1 + 128 tokens", 65, time_decode_loop(m, 1, 128));
  print_operations(m, 256, 65);
}

void bench_few(const Shape& shape, DType type) {
  SyntheticModel m(shape, type, 512, kFewTokens);
  double alone = 0;
  for (const int64_t T : {1, 2, 4, 8}) {
    m.set_tokens(64, T);
    const double t = time_graph(*m.device, [&] { m.forward(T, 256); });
    if (T == 1) alone = t;
    fmt::print("{:<11} {:<5} {} tokens a step {:>9.1f} tok/s {:>8.3f} ms {:>6.2f} x\n", shape.name, traits(type).name,
               T, static_cast<double>(T) / t, t * 1e3, static_cast<double>(T) * alone / t);
  }
  std::fflush(stdout);
}

void bench_long(const Shape& shape, DType type) {
  SyntheticModel m(shape, type, 16384, 1);
  for (const int64_t n_kv : {1024, 4096, 16384}) {
    m.set_tokens(n_kv - 1, 1);
    print_token(m, fmt::format("{} in context", n_kv).c_str(), n_kv,
                time_graph(
                    *m.device, [&] { m.forward(1, n_kv); }, 10, 3));
    const double t = time_graph(*m.device,
                                [&] {
                                  for (int64_t i = 0; i < m.s.n_layer; ++i) m.do_attention(i, 1, n_kv);
                                }) /
                     static_cast<double>(m.s.n_layer);
    fmt::print("    attention    {:>8.2f} us {:>7.0f} GB/s\n", t * 1e6,
               static_cast<double>(m.kv_bytes(n_kv)) / t * 1e-9);
  }
}

void bench_prompt(const Shape& shape, DType type, int64_t T) {
  SyntheticModel m(shape, type, T, T);
  m.set_tokens(0, T);
  const auto time = [&](const std::function<void()>& work) {
    double best = INFINITY;
    for (int i = 0; i < 4; ++i) {
      m.device->synchronize();
      const auto start = Clock::now();
      work();
      m.device->synchronize();
      best = std::min(best, seconds_since(start));
    }
    return best;
  };
  const double t = time([&] { m.forward(T, T); });
  const double flops = 2.0 * static_cast<double>(T) * static_cast<double>(m.layer_bytes()) /
                       static_cast<double>(row_bytes(type, 32)) * 32 * static_cast<double>(m.s.n_layer);
  fmt::print("{:<11} {:<5} prompt {:<6} {:>9.0f} tok/s {:>8.2f} ms {:>6.0f} TFLOP/s\n", m.s.name, traits(type).name, T,
             static_cast<double>(T) / t, t * 1e3, flops / t * 1e-12);
  const auto row = [&](const char* name, const std::function<void(int64_t, const Layer&)>& step) {
    const double each = time([&] {
                          for (int64_t i = 0; i < m.s.n_layer; ++i) step(i, m.layers[static_cast<size_t>(i)]);
                        }) /
                        static_cast<double>(m.s.n_layer);
    fmt::print("    {:<12} {:>8.1f} us\n", name, each * 1e6);
  };
  row("norm", [&](int64_t, const Layer&) { m.do_norm(T); });
  row("qkv", [&](int64_t, const Layer& l) { m.do_qkv(l, m.normed, T); });
  row("attention", [&](int64_t i, const Layer&) { m.do_attention(i, T, T); });
  row("out", [&](int64_t, const Layer& l) { m.do_out(l, T); });
  row("ffn", [&](int64_t, const Layer& l) { m.do_ffn(l, m.normed, T); });
  std::fflush(stdout);
}

// One FFN per layer, gate first; the threshold is searched so that about `density` of the neurons are active.
void bench_sparse(const Shape& shape, DType type) {
  SyntheticModel m(shape, type, 512, 1, true);
  m.set_tokens(64, 1);
  std::vector<float> x(static_cast<size_t>(shape.n_embd));
  std::mt19937 rng(3);
  for (float& v : x) v = std::normal_distribution<float>()(rng);
  const auto reset = [&] { m.device->upload(m.x, x.data(), x.size() * 4), m.do_norm(1); };
  reset();
  const double dense = time_graph(*m.device,
                                  [&] {
                                    for (const Layer& l : m.layers) m.do_ffn(l, m.normed, 1);
                                  }) /
                       static_cast<double>(shape.n_layer);
  fmt::print("{:<11} {:<5} ffn dense, transposed down {:>8.2f} us {:>7.0f} GB/s\n", shape.name, traits(type).name,
             dense * 1e6, static_cast<double>(m.ffn_bytes()) / dense * 1e-9);
  for (const double density : {0.5, 0.1, 0.02}) {
    float low = 0.0f, high = 100.0f;
    int32_t active = 0;
    for (int i = 0; i < 30; ++i) {
      const float mid = (low + high) / 2;
      reset();
      m.do_sparse(m.layers[0], mid, m.normed, 1);
      m.device->download(&active, m.n_active, 4);
      (active > density * static_cast<double>(shape.n_ff) ? low : high) = mid;
    }
    reset();
    const double t = time_graph(*m.device,
                                [&] {
                                  for (const Layer& l : m.layers) m.do_sparse(l, low, m.normed, 1);
                                }) /
                     static_cast<double>(shape.n_layer);
    const double bytes = static_cast<double>(m.ffn_bytes()) / 3 * (1 + 2.0 * active / static_cast<double>(shape.n_ff));
    fmt::print("{:<11} {:<5} ffn sparse, {:>5} of {} active {:>8.2f} us {:>7.0f} GB/s\n", shape.name, traits(type).name,
               active, shape.n_ff, t * 1e6, bytes / t * 1e-9);
  }
  std::fflush(stdout);
}

void run(const std::set<std::string>& sections) {
  std::string why;
  const auto gpus = cuda::list_gpus(&why);
  if (gpus.empty()) fail("no GPU to measure: {}", why);
  const auto start = Clock::now();
  const cuda::Bandwidth b = cuda::measure_bandwidth(0);
  g_bandwidth = b.memory_read;
  fmt::print("{}: read {:.0f} GB/s, host to device {:.1f} GB/s, device to host {:.1f} GB/s ({:.2f} s to measure)\n",
             gpus[0].name, b.memory_read * 1e-9, b.host_to_device * 1e-9, b.device_to_host * 1e-9,
             seconds_since(start));
  const auto wants = [&](const char* name) { return sections.empty() || sections.count(name) > 0; };
  constexpr DType kTypes[] = {DType::f16, DType::q8_0, DType::q4_0};
  if (wants("decode"))
    for (const bool transposed_down : {false, true}) {
      for (const DType t : kTypes) bench_decode(kLlama7B, t, transposed_down);
    }
  if (wants("few"))
    for (const DType t : kTypes) bench_few(kLlama7B, t);
  if (wants("tiny"))
    for (const DType t : kTypes) bench_decode(kTiny, t, true);
  if (wants("prompt"))
    for (const DType t : kTypes) bench_prompt(kLlama7B, t, 512);
  if (wants("sparse"))
    for (const DType t : kTypes) bench_sparse(kLlama7B, t);
  if (wants("long")) {
    bench_long(kLlama7B, DType::f16);
    bench_long(kMistral7B, DType::q4_0);
    bench_prompt(kMistral7B, DType::f16, 8192);
  }
}

}  // namespace
}  // namespace hearth

int main(int argc, char** argv) {
  try {
    hearth::run({argv + 1, argv + argc});
    return 0;
  } catch (const hearth::Error& e) {
    fmt::print(stderr, "bench_cuda: {}\n", e.what());
    return 1;
  }
}
