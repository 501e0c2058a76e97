// The oracle: every operation of Device as core/device.h states it, in obvious loops with double accumulation.
// It is slow on purpose and stays for ever; every other device is tested against it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "cpu/cpu.h"
#include "cpu/host_device.h"

namespace hearth::cpu {
namespace {

// 32 activations: x[i] = d * qs[i]. As BlockQ8_0, but the scale keeps its f32 precision.
struct BlockAct {
  static constexpr int size = 32;
  float d;
  int8_t qs[size];
};

int64_t n_blocks(int64_t n) {
  return (n + BlockAct::size - 1) / BlockAct::size;
}

// d = max |x| / 127, round to nearest. A last block that is not full is padded with zeros. A block that holds an
// infinity or NaN gets d = NaN, so that it shows in every product.
void quantize_row(const float* x, int64_t n, BlockAct* out) {
  for (int64_t b = 0; b < n_blocks(n); ++b) {
    const int64_t begin = b * BlockAct::size, end = std::min(n, begin + BlockAct::size);
    float amax = 0.0f;
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) {
      amax = std::max(amax, std::fabs(x[i]));
      finite = finite && std::isfinite(x[i]);
    }
    if (!finite) {
      out[b] = {std::numeric_limits<float>::quiet_NaN(), {}};
      continue;
    }
    out[b] = {amax / 127.0f, {}};
    const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    for (int64_t i = begin; i < end; ++i) {
      out[b].qs[i - begin] = static_cast<int8_t>(std::clamp(std::nearbyint(x[i] * inverse), -127.0f, 127.0f));
    }
  }
}

std::vector<double> dequantize(const BlockAct* blocks, int64_t n) {
  std::vector<double> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const BlockAct& b = blocks[i / BlockAct::size];
    x[static_cast<size_t>(i)] = static_cast<double>(b.d) * b.qs[i % BlockAct::size];
  }
  return x;
}

std::vector<float> weight_row(const Matrix& w, int64_t r) {
  HEARTH_CHECK(r >= 0 && r < w.rows, "row {} of {}", r, w.rows);
  std::vector<float> row(static_cast<size_t>(w.cols));
  traits(w.type).to_float(w.row(r), row.data(), w.cols);
  return row;
}

// Token t as a product with weights of this type sees it: the f32 activations, or their 8-bit form.
std::vector<double> input_row(Act in, int64_t t, int64_t n, DType weights) {
  if (is_quantized(weights)) {
    HEARTH_CHECK(in.q8 != nullptr, "quantised weights need the 8-bit form of their input");
    return dequantize(static_cast<const BlockAct*>(in.q8) + t * n_blocks(n), n);
  }
  return {in.x + t * n, in.x + (t + 1) * n};
}

double dot(const std::vector<float>& w, const std::vector<double>& x) {
  double sum = 0;
  for (size_t i = 0; i < w.size(); ++i) sum += w[i] * x[i];
  return sum;
}

double activate(Activation act, float threshold, double z) {
  switch (act) {
    case Activation::relu:
      return z > 0 ? z : 0;
    case Activation::fat_relu:
      return z > threshold ? z : 0;
    case Activation::relu2:
      return z > 0 ? z * z : 0;
    case Activation::silu:
      return z / (1 + std::exp(-z));
    case Activation::gelu:
      return 0.5 * z * (1 + std::erf(z / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return 0.5 * z * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (z + 0.044715 * z * z * z)));
    case Activation::clamped_silu: {
      const double x = std::min<double>(z, threshold);
      return x / (1 + std::exp(-kClampedSiluAlpha * x));
    }
  }
  HEARTH_CHECK(false);
  return 0;
}

double capped(double x, double cap) {
  return cap * std::tanh(x / cap);
}

// x /= sqrt(mean(x^2) + eps), times weight.
void rms_norm(float* x, Vector weight, float eps) {
  double sum = 0;
  for (int64_t i = 0; i < weight.n; ++i) sum += static_cast<double>(x[i]) * x[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(weight.n) + eps);
  for (int64_t i = 0; i < weight.n; ++i) x[i] = static_cast<float>(x[i] * scale * weight.data[i]);
}

void rotate(float* head, const AttentionArgs& a, int32_t pos) {
  if (a.rope == RopeKind::none) return;
  const int64_t half = a.n_rot / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(pos) * a.inv_freq[i];
    const double c = std::cos(angle) * a.attention_factor, s = std::sin(angle) * a.attention_factor;
    float& first = a.rope == RopeKind::neox ? head[i] : head[2 * i];
    float& second = a.rope == RopeKind::neox ? head[i + half] : head[2 * i + 1];
    const double x = first, y = second;
    first = static_cast<float>(x * c - y * s);
    second = static_cast<float>(x * s + y * c);
  }
}

class ReferenceDevice final : public HostDevice {
 public:
  std::string name() const override { return "cpu (reference)"; }
  size_t q8_bytes(int64_t n) const override { return static_cast<size_t>(n_blocks(n)) * sizeof(BlockAct); }
  void reserve(const Limits&) override {}

  void embed(const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
             int64_t position_offset, int64_t T, float* x) override {
    for (int64_t t = 0; t < T; ++t) {
      std::vector<float> row = weight_row(table, ids[t]);
      if (positions) {
        const std::vector<float> p = weight_row(positions, pos[t] + position_offset);
        for (size_t i = 0; i < row.size(); ++i) row[i] += p[i];
      }
      std::copy(row.begin(), row.end(), x + t * table.cols);
    }
  }

  void quantize(Act a, int64_t T, int64_t n) override { quantize_rows(a, T, n); }
  void norm(const NormArgs& a, const float* x, int64_t T, Act out) override {
    for (int64_t t = 0; t < T; ++t) {
      const float* in = x + t * a.n;
      const double n = static_cast<double>(a.n);
      const double mean = a.kind == NormKind::layer ? std::accumulate(in, in + a.n, 0.0) / n : 0.0;
      double variance = 0;
      for (int64_t i = 0; i < a.n; ++i) variance += (in[i] - mean) * (in[i] - mean);
      const double scale = 1 / std::sqrt(variance / n + a.eps);
      for (int64_t i = 0; i < a.n; ++i) {
        const double bias = a.bias ? a.bias.data[i] : 0.0;
        out.x[t * a.n + i] = static_cast<float>((in[i] - mean) * scale * a.weight.data[i] + bias);
      }
    }
    quantize_rows(out, T, a.n);
  }

  void add_norm(const NormArgs& a, float* x, int64_t T, float* y) override {
    norm(a, x, T, {x, nullptr});
    for (int64_t i = 0; i < T * a.n; ++i) y[i] += x[i];
  }
  void scale(float factor, int64_t n, float* x) override {
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
  }
  void soft_cap(float cap, int64_t n, float* x) override {
    for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(capped(x[i], cap));
  }

  using Device::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& input, int64_t T, const NextNorm*) override {
    const Act in = rows_of(input, T);
    for (const MatmulPart& p : parts) {
      std::vector<std::vector<double>> x;
      for (int64_t t = 0; t < T; ++t) x.push_back(input_row(in, t, p.w.cols, p.w.type));
      for (int64_t r = 0; r < p.w.rows; ++r) {
        const std::vector<float> w = weight_row(p.w, r);
        for (int64_t t = 0; t < T; ++t) {
          float& y = p.y[t * (p.y_stride != 0 ? p.y_stride : p.w.rows) + r];
          const double sum = dot(w, x[static_cast<size_t>(t)]) + (p.bias ? p.bias.data[r] : 0.0);
          y = static_cast<float>(p.accumulate ? y + sum : sum);
        }
      }
    }
  }

  void attention(const AttentionArgs& a, int64_t T, Act out) override {
    write_cache(a, T);
    const int64_t d = a.head_dim, dv = a.value_dim();
    for (int64_t t = 0; t < T; ++t) {
      const int64_t last = a.rows.pos[t], first = a.window > 0 ? std::max<int64_t>(0, last - a.window + 1) : 0;
      HEARTH_CHECK(last < a.max_kv, "position {}, max_kv {}", last, a.max_kv);
      for (int64_t h = 0; h < a.n_head; ++h) {
        const float* q = a.q + (t * a.n_head + h) * d;
        const int64_t kv_head = h / (a.n_head / a.n_head_kv);
        std::vector<double> p(static_cast<size_t>(last - first + 1));
        for (int64_t j = first; j <= last; ++j) {
          const f16_t* k = a.cache.k + cache_at(a, t, kv_head, j);
          double s = 0;
          for (int64_t i = 0; i < d; ++i) s += static_cast<double>(q[i]) * f16_to_f32(k[i]);
          p[static_cast<size_t>(j - first)] = a.soft_cap > 0 ? capped(s * a.scale, a.soft_cap) : s * a.scale;
        }
        const double sink = a.sinks ? a.sinks.data[h] : -std::numeric_limits<double>::infinity();
        const double max = std::max(sink, *std::max_element(p.begin(), p.end()));
        double total = std::exp(sink - max);
        for (double& s : p) total += s = std::exp(s - max);
        for (int64_t i = 0; i < dv; ++i) {
          double sum = 0;
          for (int64_t j = first; j <= last; ++j) {
            sum += p[static_cast<size_t>(j - first)] * f16_to_f32(a.values()[cache_at(a, t, kv_head, j) + i]);
          }
          out.x[(t * a.n_head + h) * dv + i] = static_cast<float>(sum / total);
        }
      }
    }
    quantize_rows(out, T, a.n_head * dv);
  }

  void ffn_dense(const FfnShard& s, const Input& input, int64_t T, Vector y_bias, float* y, const NextNorm*) override {
    ffn_whole(s, -1.0f, rows_of(input, T), T, y_bias, y);
  }
  void ffn_above(const FfnShard& s, float threshold, Act in, Vector y_bias, float* y) override {
    ffn_whole(s, threshold, in, 1, y_bias, y);
  }
  // Values of neurons whose |act(gate)| is at most `threshold` are zero.
  void ffn_whole(const FfnShard& s, float threshold, Act in, int64_t T, Vector y_bias, float* y) {
    const int64_t n = s.n(), n_embd = s.gate.cols;
    HEARTH_CHECK(static_cast<bool>(s.down) != static_cast<bool>(s.down_t));
    std::vector<float> value(static_cast<size_t>(T * n));
    for (int64_t k = 0; k < n; ++k) {
      for (int64_t t = 0; t < T; ++t) {
        value[static_cast<size_t>(t * n + k)] = neuron(s, k, static_cast<float>(gate(s, k, in, t)), threshold, in, t);
      }
    }
    if (y_bias) add_bias(y_bias, T, y);
    if (s.down) {
      std::vector<std::byte> q8(static_cast<size_t>(T) * q8_bytes(n));
      const Act hidden{value.data(), is_quantized(s.down.type) ? q8.data() : nullptr};
      quantize_rows(hidden, T, n);
      const MatmulPart down{.w = s.down, .y = y, .accumulate = true};
      return matmul({&down, 1}, hidden, T);
    }
    std::vector<double> sum(static_cast<size_t>(T * n_embd));
    for (int64_t k = 0; k < n; ++k) {
      const std::vector<float> row = weight_row(s.down_t, k);
      for (int64_t t = 0; t < T; ++t) {
        const double v = value[static_cast<size_t>(t * n + k)];
        for (int64_t i = 0; i < n_embd; ++i)
          sum[static_cast<size_t>(t * n_embd + i)] += v * row[static_cast<size_t>(i)];
      }
    }
    for (int64_t i = 0; i < T * n_embd; ++i) y[i] = static_cast<float>(y[i] + sum[static_cast<size_t>(i)]);
  }

  void predict(const Predictor& p, const Input& input, int64_t T, const PredictArgs& args) override {
    const Act in = rows_of(input, T);
    for (int64_t t = 0; t < T; ++t) {
      const std::vector<double> score = scores(p, in, t);
      std::vector<int32_t> named;
      for (int64_t k = 0; k < p.n(); ++k) {
        if (score[static_cast<size_t>(k)] > p.threshold.data[k]) named.push_back(static_cast<int32_t>(k));
      }
      hand_out(args, p.n(), t, T, named);
    }
  }

  void ffn_sparse(const FfnShard& s, const SparseArgs& sparse, const Input& input, int64_t T, Vector y_bias, float* y,
                  const NextNorm*) override {
    HEARTH_CHECK(s.down_t && !s.down, "sparse FFN needs down_t");
    const Act in = rows_of(input, T);
    const int64_t n_embd = s.down_t.cols;
    for (int64_t t = 0; t < T; ++t) sparse_token(s, sparse, in, t, y_bias, y + t * n_embd);
    if (sparse.linked != nullptr) add_linked(sparse, in, T, y);
    if (sparse.answer != nullptr) sparse.answer->publish(0, T * n_embd);
    if (sparse.collect != nullptr) add_answer(*sparse.collect, y, T * n_embd);
  }

  void argmax(const float* logits, int64_t n, int64_t T, int32_t* ids) override {
    for (int64_t t = 0; t < T; ++t, logits += n) {
      int32_t& best = ids[t] = 0;
      for (int64_t i = 1; i < n; ++i) {
        if (logits[i] > logits[best] || (std::isnan(logits[best]) && !std::isnan(logits[i])))
          best = static_cast<int32_t>(i);
      }
    }
  }

 private:
  // Elements from the begin of the pages to position j of a token's sequence.
  static int64_t cache_at(const AttentionArgs& a, int64_t t, int64_t kv_head, int64_t j) {
    const int64_t page = a.rows.pages[a.rows.slot[t] * a.rows.pages_stride + j / kPagePositions];
    return page * a.cache.stride + (kv_head * kPagePositions + j % kPagePositions) * a.head_dim;
  }

  static void write_cache(const AttentionArgs& a, int64_t T) {
    const int64_t d = a.head_dim;
    for (int64_t t = 0; t < T; ++t) {
      const int32_t pos = a.rows.pos[t];
      HEARTH_CHECK(pos >= 0 && pos < a.rows.pages_stride * kPagePositions, "position {}", pos);
      for (int64_t h = 0; h < a.n_head; ++h) {
        float* q = a.q + (t * a.n_head + h) * d;
        if (a.q_norm) rms_norm(q, a.q_norm, a.norm_eps);
        rotate(q, a, pos);
      }
      for (int64_t h = 0; h < a.n_head_kv; ++h) {
        float* k = a.k + (t * a.n_head_kv + h) * d;
        if (a.k_norm) rms_norm(k, a.k_norm, a.norm_eps);
        if (a.latent_norm) rms_norm(k + d - a.latent_norm.n, a.latent_norm, a.norm_eps);
        rotate(k, a, pos);
        const int64_t at = cache_at(a, t, h, pos);
        for (int64_t i = 0; i < d; ++i) a.cache.k[at + i] = f32_to_f16(k[i]);
        if (a.latent_norm) continue;
        const float* v = a.v + (t * a.n_head_kv + h) * d;
        for (int64_t i = 0; i < d; ++i) a.cache.v[at + i] = f32_to_f16(v[i]);
      }
    }
  }

  // y += the FFN of token t.
  static void sparse_token(const FfnShard& s, const SparseArgs& sparse, Act in, int64_t t, Vector y_bias, float* y) {
    std::vector<int32_t> candidates(static_cast<size_t>(s.n()));
    if (const auto* lists = std::get_if<NeuronLists>(&sparse.candidates)) {
      candidates.assign(lists->ids + t * lists->stride, lists->ids + t * lists->stride + lists->count[t]);
    } else {
      std::iota(candidates.begin(), candidates.end(), 0);
    }
    std::vector<double> sum(static_cast<size_t>(s.down_t.cols));
    int32_t n_active = 0;
    for (const int32_t k : candidates) {
      const auto g = static_cast<float>(activate(s.act, s.act_threshold, static_cast<float>(gate(s, k, in, t))));
      if (!(std::fabs(g) > sparse.threshold)) continue;
      ++n_active;
      const double v = value_of(s, k, g, in, t);
      const std::vector<float> row = weight_row(s.down_t, k);
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += v * row[c];
    }
    if (sparse.n_active != nullptr) sparse.n_active[t] = n_active;
    if (y_bias) add_bias(y_bias, 1, y);
    for (size_t i = 0; i < sum.size(); ++i) y[i] = static_cast<float>(y[i] + sum[i]);
  }

  void quantize_rows(Act a, int64_t T, int64_t n) const {
    if (a.q8 == nullptr) return;
    for (int64_t t = 0; t < T; ++t) quantize_row(a.x + t * n, n, static_cast<BlockAct*>(a.q8) + t * n_blocks(n));
  }

  static void add_bias(Vector bias, int64_t T, float* y) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < bias.n; ++i) y[t * bias.n + i] += bias.data[i];
    }
  }

  std::vector<double> scores(const Predictor& p, Act in, int64_t t) const {
    std::vector<double> score(static_cast<size_t>(p.n()));
    const int64_t rank = p.fc2.cols;
    std::vector<float> hidden(static_cast<size_t>(rank));
    std::vector<std::byte> q8(q8_bytes(rank));
    Act h = in;
    if (p.fc1) {
      for (int64_t r = 0; r < rank; ++r) {
        const double v = dot(weight_row(p.fc1, r), input_row(in, t, p.fc1.cols, p.fc1.type)) +
                         (p.fc1_bias ? p.fc1_bias.data[r] : 0.0);
        hidden[static_cast<size_t>(r)] = static_cast<float>(p.relu && v < 0 ? 0 : v);
      }
      h = {hidden.data(), is_quantized(p.fc2.type) ? q8.data() : nullptr};
      quantize_rows(h, 1, rank);
      t = 0;
    }
    for (int64_t k = 0; k < p.n(); ++k) {
      score[static_cast<size_t>(k)] = dot(weight_row(p.fc2, k), input_row(h, t, rank, p.fc2.type));
    }
    return score;
  }

  static double gate(const FfnShard& s, int64_t k, Act in, int64_t t) {
    const double bias = s.gate_bias ? s.gate_bias.data[k] : 0.0;
    return dot(weight_row(s.gate, k), input_row(in, t, s.gate.cols, s.gate.type)) + bias;
  }

  // The value of neuron k whose gate's pre-activation is z.
  static float neuron(const FfnShard& s, int64_t k, float z, float threshold, Act in, int64_t t) {
    const double g = activate(s.act, s.act_threshold, z);
    return std::fabs(static_cast<float>(g)) <= threshold ? 0.0f : value_of(s, k, g, in, t);
  }

  // The same from the gate's activation.
  static float value_of(const FfnShard& s, int64_t k, double value, Act in, int64_t t) {
    if (!s.up) return static_cast<float>(value);
    double u = dot(weight_row(s.up, k), input_row(in, t, s.up.cols, s.up.type)) + (s.up_bias ? s.up_bias.data[k] : 0.0);
    if (s.up_relu) u = u > 0 ? u : 0;
    if (s.act == Activation::clamped_silu) u = std::clamp<double>(u, -s.act_threshold, s.act_threshold) + 1;
    return static_cast<float>(value * u);
  }
};

}  // namespace

std::unique_ptr<Device> make_reference_device() {
  return std::make_unique<ReferenceDevice>();
}

}  // namespace hearth::cpu
