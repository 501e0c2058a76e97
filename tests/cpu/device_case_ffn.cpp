// Cases of the feed-forward network, and the large ones whose speed alone is of interest.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <random>
#include <thread>

#include "core/error.h"
#include "cpu/device_case.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {

// --- the feed-forward network ---

namespace {

struct FfnData {
  FfnShape shape;
  Weights gate, up, down;
  std::vector<float> gate_bias, up_bias, y_bias, x, y;
  std::vector<std::vector<int32_t>> predicted;  // by token
  std::vector<float> answer;                    // the partner's [T][n_embd], with FfnShape::answered
};

double activate(const FfnShape& s, double z) {
  switch (s.act) {
    case Activation::relu:
      return std::max(z, 0.0);
    case Activation::fat_relu:
      return z > s.act_threshold ? z : 0.0;
    case Activation::relu2:
      return z > 0 ? z * z : 0.0;
    case Activation::silu:
      return z / (1 + std::exp(-z));
    case Activation::gelu:
      return 0.5 * z * (1 + std::erf(z / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return 0.5 * z * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (z + 0.044715 * z * z * z)));
    case Activation::clamped_silu: {
      const double x = std::min<double>(z, s.act_threshold);
      return x / (1 + std::exp(-kClampedSiluAlpha * x));
    }
  }
  return 0;
}

struct Value {
  double value = 0, error = 0;
  bool active = false, doubtful = false;  // doubtful: rounding may decide whether it is active
};

// The gate of neuron k for token x, and how far an f32 implementation may be off.
Value gate_of(const FfnData& d, int64_t k, const std::vector<double>& x) {
  const FfnShape& s = d.shape;
  const auto at = static_cast<size_t>(k);
  const Sum z_sum = product(d.gate, k, x);
  const double z_bias = d.gate_bias.empty() ? 0.0 : d.gate_bias[at];
  const double z = z_sum.value + z_bias,
               z_error = z_sum.error(d.gate.cols) + 2 * kUlp * (std::fabs(z_bias) + std::fabs(z));
  const double a = activate(s, z);
  // |act'| <= 1.13 for silu and both gelus, 2 |z| for relu2; 1e-6 |z| for the exponentials.
  const double slope = s.act == Activation::relu2 ? 2 * (std::fabs(z) + z_error) : 1.13;
  const double a_error = slope * z_error + 1e-6 * std::fabs(z);
  Value v;
  v.active = std::fabs(static_cast<float>(a)) > s.threshold;
  const bool jump = s.act == Activation::fat_relu && std::fabs(z - s.act_threshold) <= z_error;
  v.doubtful =
      jump || (s.sparse && std::fabs(std::fabs(a) - s.threshold) <= a_error && (s.threshold > 0 || z + z_error > 0));
  v.value = a;
  v.error = a_error;
  return v;
}

// Its activation.
Value neuron(const FfnData& d, int64_t k, const std::vector<double>& x, const std::vector<double>& x_up) {
  Value v = gate_of(d, k, x);
  if (!d.up) return v;
  const double a = v.value, a_error = v.error;
  const auto at = static_cast<size_t>(k);
  const Sum u_sum = product(d.up, k, x_up);
  const double u_bias = d.up_bias.empty() ? 0.0 : d.up_bias[at];
  double u = u_sum.value + u_bias;
  double u_error = u_sum.error(d.up.cols) + 2 * kUlp * (std::fabs(u_bias) + std::fabs(u));
  if (d.shape.up_relu) u = std::max(u, 0.0);
  if (d.shape.act == Activation::clamped_silu) {  // one more rounding, of a number of at most |u| + 1
    u = std::clamp<double>(u, -d.shape.act_threshold, d.shape.act_threshold) + 1;
    u_error += kUlp * (std::fabs(u) + 1);
  }
  v.value = a * u;
  v.error = std::fabs(a) * u_error + std::fabs(u) * a_error + a_error * u_error + 2 * kUlp * std::fabs(v.value);
  return v;
}

// `down` of a quantised type multiplies the 8-bit form of the values: a value's error moves it, and may flip its
// rounding.
void round_values(std::vector<Value>& values) {
  for (size_t b = 0; b < values.size(); b += 32) {
    double amax = 0, amax_error = 0;
    for (size_t i = b; i < b + 32; ++i) {
      amax = std::max(amax, std::fabs(values[i].value));
      amax_error = std::max(amax_error, values[i].error);
    }
    if (amax == 0) continue;
    const double d = amax / 127, d_error = amax_error / 127 + 2 * kUlp * d;
    for (size_t i = b; i < b + 32; ++i) {
      Value& v = values[i];
      const double steps = v.value / d, nearest = std::nearbyint(steps);
      const double steps_error = (v.error + std::fabs(steps) * d_error) / d + 1e-4;
      const bool may_flip = 0.5 - std::fabs(steps - nearest) <= steps_error;
      v.value = nearest * d;
      v.error = std::fabs(nearest) * d_error + (may_flip ? d : 0.0);
    }
  }
}

// Fills `tolerance` of y; true when no neuron's fate hangs on rounding.
bool ffn_tolerance(const FfnData& d, std::vector<double>& tolerance) {
  const FfnShape& s = d.shape;
  const int64_t n_embd = s.n_embd;
  tolerance.assign(d.y.size(), 0.0);
  for (int64_t t = 0; t < s.T; ++t) {
    const std::vector<double> x = seen(d.x, t, n_embd, d.gate.type);
    const std::vector<int32_t>& predicted = d.predicted[static_cast<size_t>(t)];
    std::vector<Value> values(static_cast<size_t>(s.n));
    for (int64_t k = 0; k < s.n; ++k) {
      Value& v = values[static_cast<size_t>(k)] = neuron(d, k, x, x);
      const bool computed =
          s.predicted == FfnShape::Predicted::all || std::binary_search(predicted.begin(), predicted.end(), k);
      if (v.doubtful && computed) return false;
      if (s.sparse && (!computed || !v.active)) v = {};
    }
    if (!s.transposed && is_quantized(s.type)) round_values(values);
    for (int64_t i = 0; i < n_embd; ++i) {
      Sum sum;
      double error = 0;
      for (int64_t k = 0; k < s.n; ++k) {
        const double w = d.down.values[static_cast<size_t>(s.transposed ? k * n_embd + i : i * s.n + k)];
        const Value& v = values[static_cast<size_t>(k)];
        sum.value += w * v.value;
        sum.magnitude += std::fabs(w * v.value);
        error += std::fabs(w) * v.error;
      }
      const auto at = static_cast<size_t>(t * n_embd + i);
      const double other = std::fabs(d.y[at]) + (d.y_bias.empty() ? 0.0 : std::fabs(d.y_bias[static_cast<size_t>(i)])) +
                           (d.answer.empty() ? 0.0 : std::fabs(d.answer[at]));
      // The partial sums, at most 64, are added to what is there one after the other.
      tolerance[at] =
          error + sum.error(s.n) + std::min(64.0, static_cast<double>(s.n) / 16 + 4) * kUlp * (other + sum.magnitude);
    }
  }
  return true;
}

std::shared_ptr<FfnData> ffn_data(uint32_t seed, const FfnShape& s) {
  auto d = std::make_shared<FfnData>();
  std::mt19937 rng(seed);
  d->shape = s;
  d->gate = random_weights(rng(), s.type, s.n, s.n_embd);
  if (s.gated) d->up = random_weights(rng(), s.type, s.n, s.n_embd);
  d->down = random_weights(rng(), s.type, s.transposed ? s.n : s.n_embd, s.transposed ? s.n_embd : s.n);
  d->x = random_activations(rng(), static_cast<size_t>(s.T * s.n_embd));
  d->y = random_normal(rng, static_cast<size_t>(s.T * s.n_embd), 10.0f);
  if (s.biases) {
    d->y_bias = random_normal(rng, static_cast<size_t>(s.n_embd), 10.0f);
    if (s.gated) d->up_bias = random_normal(rng, static_cast<size_t>(s.n));
  }
  const auto draw = [&](double p) { return std::bernoulli_distribution(p)(rng); };
  if (s.sparse) {
    // Gates of length |x| sqrt(n_embd): a bias three times as large decides which neurons are active. Without any, that
    // is each token's own.
    const float large = 4.0f * std::sqrt(static_cast<float>(s.n_embd));
    const bool apart = s.T > 1 && s.density > 0 && s.density < 1;
    for (int64_t k = 0; k < s.n; ++k) {
      const bool own = apart && draw(std::min(s.density, 1 - s.density));
      d->gate_bias.push_back(own ? 0.0f : draw(s.density) ? large : -large);
    }
  } else if (s.biases) {
    d->gate_bias = random_normal(rng, static_cast<size_t>(s.n));
  }
  for (int64_t t = 0; t < s.T; ++t) {
    std::vector<int32_t>& listed = d->predicted.emplace_back();
    const std::vector<double> x = seen(d->x, t, s.n_embd, s.type);
    for (int32_t k = 0; s.sparse && k < s.n; ++k) {
      const bool is_listed = s.predicted == FfnShape::Predicted::superset ? gate_of(*d, k, x).active || draw(0.3)
                             : s.predicted == FfnShape::Predicted::subset ? t != 1 && draw(0.5)
                                                                          : false;
      if (is_listed) listed.push_back(k);
    }
  }
  if (s.answered) d->answer = random_normal(rng, static_cast<size_t>(s.T * s.n_embd), 10.0f);
  return d;
}

// The vector that the partner gets, as an output of the case, and its answer.
struct Partner {
  std::shared_ptr<FfnData> data;
  std::shared_ptr<Mailbox> mailbox;
  float* x;

  Partner(const std::shared_ptr<FfnData>& d, Bound& b)
      : data(d),
        mailbox(b.device.hand_offs()->open_mailbox(std::ssize(d->answer), 1)),
        x(b.output("handed_x", poison(d->answer.size()))) {}

  // Runs `operation`, which posts and collects.
  void during(Device& device, const std::function<void()>& operation) const {
    std::vector<float> got;
    std::thread cpu([&] {
      const float* handed = mailbox->wait_input();
      got.assign(handed, handed + data->answer.size());
      std::copy(data->answer.begin(), data->answer.end(), mailbox->answer_buffer());
      mailbox->publish(0, std::ssize(data->answer));
      mailbox->answer();
    });
    operation();
    device.synchronize();
    cpu.join();
    device.upload(x, got.data(), got.size() * sizeof(float));
  }
};

std::function<void()> bind_ffn(const std::shared_ptr<FfnData>& d, Bound& b, bool dense) {
  const FfnShape& s = d->shape;
  FfnShard shard;
  shard.gate = b.device.adopt(d->gate.matrix());
  if (d->up) shard.up = b.device.adopt(d->up.matrix());
  (s.transposed ? shard.down_t : shard.down) = b.device.adopt(d->down.matrix());
  shard.gate_bias = b.vector(d->gate_bias);
  shard.up_bias = b.vector(d->up_bias);
  shard.act = s.act;
  shard.act_threshold = s.act_threshold;
  shard.up_relu = s.up_relu;
  const Act in = s.n_embd % 32 == 0 ? b.activations(d->x, s.T, s.n_embd) : Act{b.input(d->x), nullptr};
  const Vector y_bias = b.vector(d->y_bias);
  float* y = b.output("y", d->y);
  if (dense) {
    return
        [&device = b.device, d, shard, in, y_bias, y] { device.ffn_dense(shard, in, d->shape.T, y_bias, y, nullptr); };
  }
  SparseArgs sparse;
  sparse.threshold = s.threshold;
  if (s.predicted != FfnShape::Predicted::all) {
    const int64_t stride = s.n + 3;
    std::vector<int32_t> ids(static_cast<size_t>(s.T * stride), -1), counts;
    for (int64_t t = 0; t < s.T; ++t) {
      const std::vector<int32_t>& listed = d->predicted[static_cast<size_t>(t)];
      std::copy(listed.begin(), listed.end(), ids.begin() + t * stride);
      counts.push_back(static_cast<int32_t>(listed.size()));
    }
    sparse.candidates = NeuronLists{b.input(ids), b.input(counts), stride};
  }
  sparse.n_active = b.output_ids("n_active", static_cast<size_t>(s.T));
  SparseFfn* const ffn = b.device.sparse_ffn();
  if (!s.answered)
    return
        [ffn, d, shard, sparse, in, y_bias, y] { ffn->ffn_sparse(shard, sparse, in, d->shape.T, y_bias, y, nullptr); };
  const Partner partner(d, b);
  sparse.collect = partner.mailbox.get();
  return [&device = b.device, ffn, d, partner, shard, sparse, in, y_bias, y] {
    partner.during(device, [&] {
      device.hand_offs()->post(*partner.mailbox, in.x, std::ssize(d->answer));
      ffn->ffn_sparse(shard, sparse, in, d->shape.T, y_bias, y, nullptr);
    });
  };
}

// The data of the first seed from `seed` on with which no neuron's fate hangs on rounding; changes `seed` to that.
std::shared_ptr<FfnData> clear_data(uint32_t& seed, const FfnShape& s, std::vector<double>& tolerance) {
  for (;; ++seed) {
    auto data = ffn_data(seed, s);
    if (ffn_tolerance(*data, tolerance)) return data;
  }
}

}  // namespace

Case ffn_case(uint32_t seed, const FfnShape& s) {
  Case c;
  std::vector<double> tolerance;
  const std::shared_ptr<FfnData> data = clear_data(seed, s, tolerance);
  c.name = fmt::format("ffn {}{} n={} n_embd={} T={} act {}{}{}{}{} density {} threshold {} predicted {}{} seed {}",
                       traits(s.type).name, s.sparse ? " sparse" : "", s.n, s.n_embd, s.T, static_cast<int>(s.act),
                       s.gated ? " gated" : "", s.up_relu ? " up_relu" : "", s.biases ? " biases" : "",
                       s.transposed ? " down_t" : " down", s.density, s.threshold, static_cast<int>(s.predicted),
                       s.answered ? " answered" : "", seed);
  c.limits = limits_for(s.T, std::max(s.n, s.n_embd), std::max(s.n, s.n_embd));
  c.limits.n_embd = s.n_embd;
  c.limits.n_ff = s.n;
  c.limits.quantized_weights = is_quantized(s.type);
  c.limits.n_head = c.limits.n_head_kv = std::max<int64_t>(1, s.n_embd / 32);
  c.tolerance = {tolerance};
  if (s.sparse) {
    c.tolerance.emplace_back(static_cast<size_t>(s.T), 0.0);
    if (s.answered) c.tolerance.emplace_back(data->answer.size(), 0.0);
  }
  // `down` quantised: a flipped rounding of one value is a whole step.
  if (!s.transposed && is_quantized(s.type)) c.vacuous = 0.5;
  const double rest = bytes_of(data->up) + bytes_of(data->down);
  c.bytes = bytes_of(data->gate) + (s.sparse ? s.density * rest : rest);
  c.flops = 2.0 * static_cast<double>(s.T * s.n * s.n_embd) * (s.gated ? 3 : 2);
  c.bind = [data](Bound& b) { return bind_ffn(data, b, !data->shape.sparse); };
  return c;
}

Case dense_twin(uint32_t seed, const FfnShape& sparse) {
  Case c = ffn_case(seed, sparse);
  c.name += " (dense)";
  c.tolerance.resize(1);
  std::vector<double> tolerance;
  c.bind = [data = clear_data(seed, sparse, tolerance)](Bound& b) { return bind_ffn(data, b, true); };
  return c;
}

// --- speed ---

namespace {

// A large matrix whose rows repeat those of a small one.
Weights repeated_weights(DType type, int64_t rows, int64_t cols) {
  constexpr int64_t kDistinct = 64;
  Weights w = random_weights(1, type, kDistinct, cols);
  const std::vector<std::byte> distinct = std::move(w.data);
  const size_t row = row_bytes(type, cols);
  w.values.clear();
  w.rows = rows;
  w.data.resize(static_cast<size_t>(rows) * row);
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(w.data.data() + static_cast<size_t>(r) * row,
                distinct.data() + static_cast<size_t>(r % kDistinct) * row, row);
  }
  return w;
}

}  // namespace

Case matmul_speed(DType type, int64_t T, int64_t rows, int64_t cols) {
  auto w = std::make_shared<Weights>(repeated_weights(type, rows, cols));
  Case c;
  c.name = fmt::format("matmul {} T={} {}x{}", traits(type).name, T, rows, cols);
  c.limits = limits_for(T, rows, cols);
  c.limits.quantized_weights = is_quantized(type);
  c.bytes = bytes_of(*w);
  c.flops = 2.0 * static_cast<double>(T * rows * cols);
  c.bind = [w, T](Bound& b) -> std::function<void()> {
    const Act in = b.activations(random_activations(1, static_cast<size_t>(T * w->cols)), T, w->cols);
    const MatmulPart part{.w = b.device.adopt(w->matrix()),
                          .y = b.output("y", poison(static_cast<size_t>(T * w->rows)))};
    return [&device = b.device, w, part, in, T] { device.matmul({&part, 1}, in, T); };
  };
  return c;
}

Case ffn_speed(const FfnShape& s) {
  auto d = std::make_shared<FfnData>();
  std::mt19937 rng(1);
  d->shape = s;
  d->gate = repeated_weights(s.type, s.n, s.n_embd);
  if (s.gated) d->up = repeated_weights(s.type, s.n, s.n_embd);
  d->down = repeated_weights(s.type, s.transposed ? s.n : s.n_embd, s.transposed ? s.n_embd : s.n);
  d->x = random_activations(1, static_cast<size_t>(s.T * s.n_embd));
  d->y.resize(d->x.size());
  d->predicted.resize(static_cast<size_t>(s.T));
  std::bernoulli_distribution active(std::max(0.0, s.density));
  for (int64_t k = 0; s.sparse && k < s.n; ++k) d->gate_bias.push_back(active(rng) ? 1e4f : -1e4f);
  Case c;
  c.name = fmt::format("ffn {} {}x{} density {}", traits(s.type).name, s.n, s.n_embd, s.density);
  c.limits = limits_for(s.T, std::max(s.n, s.n_embd), std::max(s.n, s.n_embd));
  c.limits.n_embd = s.n_embd;
  c.limits.n_ff = s.n;
  c.limits.quantized_weights = is_quantized(s.type);
  const double share = s.sparse ? s.density : 1.0;
  c.bytes = bytes_of(d->gate) + share * (bytes_of(d->up) + bytes_of(d->down));
  c.flops = 2.0 * static_cast<double>(s.T * s.n * s.n_embd) * (1 + share * (s.gated ? 2 : 1));
  c.bind = [d](Bound& b) { return bind_ffn(d, b, !d->shape.sparse); };
  return c;
}

}  // namespace hearth::test
