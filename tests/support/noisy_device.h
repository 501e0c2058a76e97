#pragma once
// The oracle with another device's roundings: done as that device does them, or replaced by random errors of the same
// size (Monte Carlo arithmetic: Parker, "Monte Carlo Arithmetic", UCLA 1997). Runs under random errors measure how far
// a model carries a rounding; a device's results are judged by that, and by nothing that the device itself computes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "cpu/cpu.h"
#include "cpu/host_device.h"

namespace hearth::test {

// What a product's input is rounded to. blocks: 8 bits, a step being 1/127 of the largest of 32 values.
enum class Form { f32, f16, bf16, blocks };

// Where a device rounds.
struct Arithmetic {
  // The form of T tokens' activations in a product with weights of a type. `transposed`: neurons' values, with down_t.
  Form (*input)(DType weights, int64_t T, bool transposed);
  // Quantised weights become f16 where their input does.
  bool f16_weights = false;
  // Queries and softmax weights are f16 in batches of more tokens than this.
  int64_t f32_attention_tokens = INT64_MAX;
};

// core/device.h: quantised weights read the 8-bit form; the values of neurons stay f32 for transposed rows.
inline const Arithmetic kCpuArithmetic = {
    [](DType w, int64_t, bool transposed) { return is_quantized(w) && !transposed ? Form::blocks : Form::f32; }};

// core/ops.h: a few tokens, as on the CPU. cuda/device.cu: more go through tensor cores, whose inputs are f16, or bf16
// where the weights are.
inline const Arithmetic kGpuArithmetic = {[](DType w, int64_t T, bool transposed) {
                                            if (w == DType::f32) return Form::f32;
                                            if (T <= kFewTokens) return kCpuArithmetic.input(w, T, transposed);
                                            return w == DType::bf16 ? Form::bf16 : Form::f16;
                                          },
                                          true, kFewTokens};

// A model divided between the two: at every place the coarser of both.
inline const Arithmetic kDividedArithmetic = {[](DType w, int64_t T, bool transposed) {
                                                const Form cpu = kCpuArithmetic.input(w, T, transposed);
                                                return cpu == Form::blocks ? cpu
                                                                           : kGpuArithmetic.input(w, T, transposed);
                                              },
                                              true, kFewTokens};

enum class Rounding {
  none,     // exact arithmetic, as far as double sums of f32 activations are, over an f16 KV cache
  nearest,  // as the device does
  random,   // uniform errors of up to half a unit instead
};

struct Noise {
  Rounding rounding = Rounding::none;
  // Relative error of every input of a product besides: stands for the order of sums.
  double float_noise = 0;
  // Random errors of keys and values before they are rounded to f16, in units of half a unit of f16. At 1/3 the
  // variance of what that changes is that of the rounding itself: an error of at most e < h moves a value to the next
  // number, 2h away, with probability E|e| / 2h, so the variance is e h.
  double kv_noise = 0;
};

class NoisyDevice : public cpu::HostDevice {
 public:
  NoisyDevice(const Arithmetic& arithmetic, const Noise& noise) : arithmetic_(arithmetic), noise_(noise) {}

  // From here on: these roundings, with the random errors of this seed.
  void set_noise(const Noise& noise, uint32_t seed) {
    noise_ = noise;
    rng_.seed(seed);
  }

  std::string name() const override { return "noisy " + oracle_->name(); }
  size_t q8_bytes(int64_t) const override { return 1; }  // the 8-bit form is rounded f32 here
  void reserve(const Limits&) override {}
  using HostDevice::adopt;
  // Weights in f32, exactly.
  Matrix adopt(const Matrix& host) override {
    HostDevice::adopt(host);
    Weights w{host.type, std::vector<float>(static_cast<size_t>(host.rows * host.cols)), {}};
    for (int64_t r = 0; r < host.rows; ++r)
      traits(host.type).to_float(host.row(r), w.f32.data() + r * host.cols, host.cols);
    const Matrix m{DType::f32, host.rows, host.cols, w.f32.data()};
    weights_.emplace(w.f32.data(), std::move(w));
    return m;
  }

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos, int64_t offset,
             int64_t T, float* x) override {
    oracle_->embed(table, ids, positions, pos, offset, T, x);
  }
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override {
    oracle_->norm(args, x, T, {out.x, nullptr});
  }
  void add_norm(const NormArgs& args, float* x, int64_t T, float* y) override { oracle_->add_norm(args, x, T, y); }
  void scale(float factor, int64_t n, float* x) override { oracle_->scale(factor, n, x); }
  void soft_cap(float cap, int64_t n, float* x) override { oracle_->soft_cap(cap, n, x); }
  void quantize(Act, int64_t, int64_t) override {}
  using Device::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& input, int64_t T, const NextNorm*) override {
    const Act in = rows_of(input, T);
    std::unordered_map<Form, std::vector<float>> inputs;  // parts of one form share one rounding
    for (const MatmulPart& p : parts) {
      const Form form = arithmetic_.input(type_of(p.w), T, false);
      auto& x = inputs[form];
      if (x.empty()) x = rounded(in.x, T, p.w.cols, form);
      product(p, form, x, T);
    }
  }
  void attention(const AttentionArgs& args, int64_t T, Act out) override {
    AttentionArgs a = args;
    std::vector<float> v;
    if (noise_.kv_noise > 0) {
      const int64_t n = T * a.n_head_kv * a.head_dim;
      // Keys before their rotation, which keeps sizes, and latents before their norm, which keeps relative errors.
      for (int64_t i = 0; i < n; ++i) a.k[i] = disturbed(a.k[i], noise_.kv_noise * half_unit(a.k[i], 10));
      if (!a.latent_norm) {
        v.assign(a.v, a.v + n);
        for (float& x : v) x = disturbed(x, noise_.kv_noise * half_unit(x, 10));
        a.v = v.data();
      }
    }
    oracle_->attention(a, T, {out.x, nullptr});
    // Every device attends to latents in f32.
    if (T <= arithmetic_.f32_attention_tokens || noise_.rounding == Rounding::none || a.latent_norm) return;
    for (int64_t t = 0; t < T; ++t) {  // the oracle has filled the cache, and leaves rotated queries in q
      for (int64_t h = 0; h < a.n_head; ++h) f16_attention(a, t, h, out.x + (t * a.n_head + h) * a.head_dim);
    }
  }
  void head_products(const HeadProducts& p, int64_t T) override {
    const Form form = arithmetic_.input(type_of(p.w), T, false);
    const float* const w = operand(p.w, form);
    for (int64_t i = 0; i < T * p.n_head; ++i) {
      const float* const from = p.x + i * p.x_stride();
      const std::vector<float> x = rounded(from, 1, p.w.cols, form);
      float* const y = std::copy_n(from + p.w.cols, p.n_tail, p.y + i * p.y_stride());
      const Matrix head{DType::f32, p.rows(), p.w.cols, nullptr};
      multiply(w + i % p.n_head * p.rows() * p.w.cols, {.w = head, .y = y}, x.data(), 1);
    }
  }
  void ffn_dense(const FfnShard& s, const Input& in, int64_t T, Vector y_bias, float* y, const NextNorm*) override {
    ffn(s, in, T, y_bias, y, [](int64_t, float) { return true; });
  }
  void predict(const Predictor&, const Input&, int64_t, const PredictArgs&) override {
    HEARTH_CHECK(false, "predictors are not modelled");
  }
  void ffn_sparse(const FfnShard& s, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm*) override {
    HEARTH_CHECK(std::holds_alternative<ByGates>(sparse.candidates) && sparse.collect == nullptr);
    std::vector<int32_t> n_active(static_cast<size_t>(T));
    ffn(s, in, T, y_bias, y, [&](int64_t t, float gate) {
      const bool active = std::fabs(gate) > sparse.threshold;
      n_active[static_cast<size_t>(t)] += active ? 1 : 0;
      return active;
    });
    if (sparse.n_active != nullptr) std::copy(n_active.begin(), n_active.end(), sparse.n_active);
  }
  void argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) override { oracle_->argmax(logits, n, T, ids); }

 protected:
  // For planted defects: the values [T][n] of an FFN's neurons, before the down projection.
  virtual void edit_values(float* /*values*/, int64_t /*T*/, int64_t /*n*/) {}
  Device& oracle() { return *oracle_; }

 private:
  struct Weights {
    DType type;  // in the file
    std::vector<float> f32;
    std::vector<float> f16;  // the same rounded to f16; when first needed
  };
  Weights& weights_of(const Matrix& m) {
    const auto it = weights_.find(m.data);
    HEARTH_CHECK(it != weights_.end(), "a matrix that was not adopted");
    return it->second;
  }
  DType type_of(const Matrix& m) { return weights_of(m).type; }

  // Half of the distance between numbers with this many bits of mantissa around x.
  static double half_unit(float x, int bits) { return x == 0 ? 0.0 : std::ldexp(0.5, std::ilogb(x) - bits); }
  float disturbed(float x, double size) { return static_cast<float>(x + size * uniform_(rng_)); }
  float rounded_half(float x) {
    if (noise_.rounding == Rounding::random) return disturbed(x, half_unit(x, 10));
    return f16_to_f32(f32_to_f16(x));
  }
  void round_block(float* x, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
    if (largest == 0) return;
    const float step = largest / 127.0f, inverse = 127.0f / largest;
    for (int64_t i = 0; i < n; ++i) {
      x[i] = noise_.rounding == Rounding::random ? disturbed(x[i], 0.5 * step) : step * std::nearbyint(x[i] * inverse);
    }
  }
  // T rows of n inputs, in a form.
  std::vector<float> rounded(const float* from, int64_t T, int64_t n, Form form) {
    std::vector<float> x(from, from + T * n);
    if (noise_.float_noise > 0) {
      for (float& v : x) v = disturbed(v, noise_.float_noise * std::fabs(v));
    }
    if (noise_.rounding == Rounding::none) return x;
    if (form == Form::blocks) {
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t i = 0; i < n; i += 32) round_block(x.data() + t * n + i, std::min<int64_t>(32, n - i));
      }
    }
    for (float& v : x) {
      if (form == Form::f16) v = rounded_half(v);
      if (form == Form::bf16) {
        v = noise_.rounding == Rounding::random ? disturbed(v, half_unit(v, 7)) : bf16_to_f32(f32_to_bf16(v));
      }
    }
    return x;
  }

  // The weights that a product sees whose input has this form. Rounding them is part of the arithmetic in every mode
  // but `none`: it is the same on every run.
  const float* operand(const Matrix& m, Form form) {
    Weights& w = weights_of(m);
    if (noise_.rounding == Rounding::none || !arithmetic_.f16_weights || !is_quantized(w.type) || form != Form::f16) {
      return w.f32.data();
    }
    if (w.f16.empty()) {
      for (const float v : w.f32) w.f16.push_back(f16_to_f32(f32_to_f16(v)));
    }
    return w.f16.data();
  }
  void product(const MatmulPart& p, Form form, const std::vector<float>& x, int64_t T) {
    multiply(operand(p.w, form), p, x.data(), T);
  }
  // The oracle's product, in several sums beside each other, because a spread takes many runs.
  static void multiply(const float* w, const MatmulPart& p, const float* x, int64_t T) {
    constexpr int64_t kSums = 8;
    const int64_t n = p.w.cols, stride = p.y_stride != 0 ? p.y_stride : p.w.rows;
    for (int64_t r = 0; r < p.w.rows; ++r) {
      for (int64_t t = 0; t < T; ++t) {
        const float *a = w + r * n, *b = x + t * n;
        double sums[kSums] = {};
        int64_t c = 0;
        for (; c + kSums <= n; c += kSums) {
          for (int64_t i = 0; i < kSums; ++i) sums[i] += static_cast<double>(a[c + i]) * b[c + i];
        }
        double sum = p.bias ? p.bias.data[r] : 0.0;
        for (; c < n; ++c) sum += static_cast<double>(a[c]) * b[c];
        for (const double s : sums) sum += s;
        float& y = p.y[t * stride + r];
        y = static_cast<float>(p.accumulate ? y + sum : sum);
      }
    }
  }
  // y[t] += bias + sum_k value[t][k] rows[k]
  void down_rows(const Matrix& rows, Form form, const std::vector<float>& value, int64_t T, Vector bias, float* y) {
    const float* w = operand(rows, form);
    std::vector<float>& t = transposed_[w];
    if (t.empty()) {
      t.resize(static_cast<size_t>(rows.rows * rows.cols));
      for (int64_t r = 0; r < rows.rows; ++r) {
        for (int64_t c = 0; c < rows.cols; ++c) t[static_cast<size_t>(c * rows.rows + r)] = w[r * rows.cols + c];
      }
    }
    const MatmulPart part{.w = {DType::f32, rows.cols, rows.rows, t.data()}, .bias = bias, .y = y, .accumulate = true};
    multiply(t.data(), part, value.data(), T);
  }

  static float activate(const FfnShard& s, float z) {
    switch (s.act) {
      case Activation::relu:
        return std::max(z, 0.0f);
      case Activation::fat_relu:
        return z > s.act_threshold ? z : 0.0f;
      case Activation::relu2:
        return z > 0 ? z * z : 0.0f;
      case Activation::silu:
        return z / (1 + std::exp(-z));
      case Activation::gelu:
        return 0.5f * z * (1 + std::erf(z * 0.70710678f));
      case Activation::gelu_tanh:
        return 0.5f * z * (1 + std::tanh(0.79788456f * (z + 0.044715f * z * z * z)));
      case Activation::clamped_silu: {
        const float x = std::min(z, s.act_threshold);
        return x / (1 + std::exp(-kClampedSiluAlpha * x));
      }
    }
    return 0;
  }
  // keep(t, act(gate)): whether a neuron of token t is computed.
  template <typename Keep>
  void ffn(const FfnShard& s, const Input& input, int64_t T, Vector y_bias, float* y, Keep&& keep) {
    const Act in = rows_of(input, T);
    const auto size = static_cast<size_t>(T * s.n());
    std::vector<float> gate(size), up(size);
    const MatmulPart parts[] = {{.w = s.gate, .bias = s.gate_bias, .y = gate.data()},
                                {.w = s.up, .bias = s.up_bias, .y = up.data()}};
    matmul({parts, s.up ? size_t{2} : size_t{1}}, in, T);
    for (size_t i = 0; i < size; ++i) {
      gate[i] = activate(s, gate[i]);
      if (!keep(static_cast<int64_t>(i) / s.n(), gate[i])) gate[i] = 0;
      if (s.act == Activation::clamped_silu) up[i] = std::clamp(up[i], -s.act_threshold, s.act_threshold) + 1;
      if (s.up) gate[i] *= s.up_relu ? std::max(up[i], 0.0f) : up[i];
    }
    edit_values(gate.data(), T, s.n());
    const Matrix& down = s.down ? s.down : s.down_t;
    const Form form = arithmetic_.input(type_of(down), T, !s.down);
    std::vector<float> value = rounded(gate.data(), T, s.n(), form);
    if (!s.down) return down_rows(down, form, value, T, y_bias, y);
    product({.w = down, .bias = y_bias, .y = y, .accumulate = true}, form, value, T);
  }

  // cuda/attention_prefill.cu: scores of f16 queries, scaled for a base-2 softmax; its weights are f16 where they meet
  // the values, and f32 in their sum.
  void f16_attention(const AttentionArgs& a, int64_t t, int64_t h, float* out) {
    const int64_t d = a.head_dim, kv_head = h / (a.n_head / a.n_head_kv);
    const int64_t last = a.rows.pos[t], first = a.window > 0 ? std::max<int64_t>(0, last - a.window + 1) : 0;
    // Elements of the cache before position j.
    const auto at = [&](int64_t j) {
      const int64_t page = a.rows.pages[a.rows.slot[t] * a.rows.pages_stride + j / kPagePositions];
      return page * a.cache.stride + (kv_head * kPagePositions + j % kPagePositions) * d;
    };
    std::vector<float> q;
    for (int64_t i = 0; i < d; ++i)
      q.push_back(rounded_half(a.q[(t * a.n_head + h) * d + i] * (a.scale * 1.44269504f)));
    std::vector<double> score, sum(static_cast<size_t>(d));
    for (int64_t j = first; j <= last; ++j) {
      double s = 0;
      for (int64_t i = 0; i < d; ++i)
        s += static_cast<double>(q[static_cast<size_t>(i)]) * f16_to_f32(a.cache.k[at(j) + i]);
      score.push_back(a.soft_cap > 0 ? a.soft_cap * std::tanh(s / 1.44269504 / a.soft_cap) * 1.44269504 : s);
    }
    const double sink = a.sinks ? a.sinks.data[h] * 1.44269504 : -std::numeric_limits<double>::infinity();
    const double top = std::max(sink, *std::max_element(score.begin(), score.end()));
    double total = std::exp2(sink - top);
    for (int64_t j = first; j <= last; ++j) {
      const auto p = static_cast<float>(std::exp2(score[static_cast<size_t>(j - first)] - top));
      total += p;
      const double weight = rounded_half(p);
      for (int64_t i = 0; i < d; ++i) sum[static_cast<size_t>(i)] += weight * f16_to_f32(a.cache.v[at(j) + i]);
    }
    for (int64_t i = 0; i < d; ++i) out[i] = static_cast<float>(sum[static_cast<size_t>(i)] / total);
  }

  const Arithmetic arithmetic_;
  Noise noise_;
  std::unique_ptr<Device> oracle_ = cpu::make_reference_device();
  std::mt19937 rng_;
  std::uniform_real_distribution<double> uniform_{-1.0, 1.0};
  std::unordered_map<const void*, Weights> weights_;                // by the address of f32
  std::unordered_map<const void*, std::vector<float>> transposed_;  // by the address of what it is made of
};

}  // namespace hearth::test
