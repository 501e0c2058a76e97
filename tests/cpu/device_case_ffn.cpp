// Cases of the feed-forward network, and the large ones whose speed alone is of interest.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
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
  std::vector<int32_t> predicted;
  std::vector<float> gates;   // act(gate) of the predicted, with FfnShape::gate_values
  std::vector<float> answer;  // the partner's, with FfnShape::n_handed
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
  // |act'| <= 1.13 for silu and gelu, 2 |z| for relu2; 1e-6 |z| for the exponentials.
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
  const double u_error = u_sum.error(d.up.cols) + 2 * kUlp * (std::fabs(u_bias) + std::fabs(u));
  if (d.shape.up_relu) u = std::max(u, 0.0);
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
    std::vector<Value> values(static_cast<size_t>(s.n));
    for (int64_t k = 0; k < s.n; ++k) {
      Value& v = values[static_cast<size_t>(k)] = neuron(d, k, x, x);
      const bool computed =
          s.predicted == FfnShape::Predicted::all || std::binary_search(d.predicted.begin(), d.predicted.end(), k);
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
                           (d.answer.empty() ? 0.0 : std::fabs(d.answer[static_cast<size_t>(i)]));
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
  d->gate = random_weights(rng(), s.type, s.n + s.n_handed, s.n_embd);
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
    // Gates of length |x| sqrt(n_embd): a bias three times as large decides which neurons are active.
    const float large = 4.0f * std::sqrt(static_cast<float>(s.n_embd));
    for (int64_t k = 0; k < s.n + s.n_handed; ++k) d->gate_bias.push_back(draw(s.density) ? large : -large);
    for (int32_t k = 0; k < s.n; ++k) {
      const bool active = d->gate_bias[static_cast<size_t>(k)] > 0;
      const bool listed = s.gate_values                                  ? active
                          : s.predicted == FfnShape::Predicted::superset ? active || draw(0.3)
                          : s.predicted == FfnShape::Predicted::subset   ? draw(0.5)
                                                                         : false;
      if (listed) d->predicted.push_back(k);
    }
  } else if (s.biases) {
    d->gate_bias = random_normal(rng, static_cast<size_t>(s.n));
  }
  if (s.gate_values) {
    const std::vector<double> x = seen(d->x, 0, s.n_embd, s.type);
    for (const int32_t k : d->predicted) d->gates.push_back(static_cast<float>(gate_of(*d, k, x).value));
  }
  if (s.n_handed > 0) d->answer = random_normal(rng, static_cast<size_t>(s.n_embd), 10.0f);
  return d;
}

// What the partner gets, as outputs of the case, and what it answers.
struct Partner {
  std::shared_ptr<FfnData> data;
  std::shared_ptr<Mailbox> mailbox;
  float *x, *values;
  int32_t *ids, *n;

  Partner(const std::shared_ptr<FfnData>& d, Bound& b)
      : data(d),
        mailbox(b.device.open_mailbox(d->shape.n_embd, d->shape.n_handed)),
        x(b.output("handed_x", poison(d->answer.size()))),
        values(b.output("handed_values", poison(static_cast<size_t>(d->shape.n_handed)))),
        ids(b.output_ids("handed_ids", static_cast<size_t>(d->shape.n_handed))),
        n(b.output_ids("n_handed", 1)) {}

  void serve(std::vector<float>& got_x, std::vector<int32_t>& got_ids, std::vector<float>& got_values) const {
    const MailboxRequest r = mailbox->wait_request();
    got_x.assign(r.x, r.x + data->answer.size());
    got_ids.assign(r.ids, r.ids + *r.n_ids);
    got_values.assign(r.values, r.values + *r.n_ids);
    std::copy(data->answer.begin(), data->answer.end(), mailbox->answer_buffer());
    mailbox->publish(0, std::ssize(data->answer));
    mailbox->answer();
  }

  // Runs `operation`, which posts and collects.
  void during(Device& device, const std::function<void()>& operation) const {
    std::vector<float> got_x, got_values;
    std::vector<int32_t> got_ids;
    std::thread cpu([&] { serve(got_x, got_ids, got_values); });
    operation();
    device.synchronize();
    cpu.join();
    const auto count = static_cast<int32_t>(got_ids.size());
    device.upload(x, got_x.data(), got_x.size() * sizeof(float));
    device.upload(ids, got_ids.data(), got_ids.size() * sizeof(int32_t));
    device.upload(values, got_values.data(), got_values.size() * sizeof(float));
    device.upload(n, &count, sizeof count);
  }
};

// The errors that the outputs of Partner may have; false when rounding decides what is handed over.
bool add_partner_tolerance(const FfnData& d, std::vector<std::vector<double>>& tolerance) {
  const FfnShape& s = d.shape;
  const std::vector<double> x = seen(d.x, 0, s.n_embd, s.type);
  std::vector<double> errors;
  for (int64_t k = s.n; k < s.n + s.n_handed; ++k) {
    const Value gate = gate_of(d, k, x);
    if (gate.doubtful) return false;
    if (gate.active) errors.push_back(gate.error);
  }
  errors.resize(static_cast<size_t>(s.n_handed));
  const std::vector<double> exact(static_cast<size_t>(s.n_handed));
  tolerance.insert(tolerance.end(), {std::vector<double>(d.answer.size()), errors, exact, {0.0}});
  return true;
}

std::function<void()> bind_ffn(const std::shared_ptr<FfnData>& d, Bound& b, bool dense) {
  const FfnShape& s = d->shape;
  FfnShard shard;
  if (dense || !s.gate_values) shard.gate = b.device.adopt(d->gate.matrix());
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
  if (dense)
    return [&device = b.device, d, shard, in, y_bias, y] { device.ffn_dense(shard, in, d->shape.T, y_bias, y); };
  SparseArgs sparse;
  sparse.threshold = s.threshold;
  if (s.predicted != FfnShape::Predicted::all) {
    std::vector<int32_t> ids = d->predicted;
    ids.resize(static_cast<size_t>(s.n));
    sparse.predicted = b.input(ids);
    sparse.n_predicted = b.input(std::vector<int32_t>{static_cast<int32_t>(d->predicted.size())});
  }
  if (s.gate_values) sparse.gate_values = b.input(d->gates);
  sparse.active_ids = b.output_ids("active_ids", static_cast<size_t>(s.n));
  sparse.n_active = b.output_ids("n_active", 1);
  if (s.n_handed == 0)
    return [&device = b.device, d, shard, sparse, in, y_bias, y] { device.ffn_sparse(shard, sparse, in, y_bias, y); };
  const Partner partner(d, b);
  sparse.hand_off = {partner.mailbox.get(), in.x, s.n_embd};
  sparse.collect = partner.mailbox.get();
  return [&device = b.device, partner, shard, sparse, in, y_bias, y] {
    partner.during(device, [&] { device.ffn_sparse(shard, sparse, in, y_bias, y); });
  };
}

}  // namespace

Case ffn_case(uint32_t seed, const FfnShape& s) {
  Case c;
  std::shared_ptr<FfnData> data;
  std::vector<double> tolerance;
  std::vector<std::vector<double>> handed;
  do {
    data = ffn_data(seed++, s);
    handed.clear();
  } while (!ffn_tolerance(*data, tolerance) || (s.n_handed > 0 && !add_partner_tolerance(*data, handed)));
  c.name = fmt::format(
      "ffn {}{} n={} n_embd={} T={} act {}{}{}{}{} density {} threshold {} predicted {}{} handed {} seed {}",
      traits(s.type).name, s.sparse ? " sparse" : "", s.n, s.n_embd, s.T, static_cast<int>(s.act),
      s.gated ? " gated" : "", s.up_relu ? " up_relu" : "", s.biases ? " biases" : "",
      s.transposed ? " down_t" : " down", s.density, s.threshold, static_cast<int>(s.predicted),
      s.gate_values ? " values" : "", s.n_handed, seed - 1);
  c.limits = limits_for(s.T, std::max(s.n, s.n_embd), std::max(s.n, s.n_embd));
  c.limits.n_embd = s.n_embd;
  c.limits.n_ff = std::max(s.n, s.n_handed);
  c.limits.quantized_weights = is_quantized(s.type);
  c.limits.n_head = c.limits.n_head_kv = std::max<int64_t>(1, s.n_embd / 32);
  c.tolerance = {tolerance};
  if (s.sparse) {
    c.tolerance.emplace_back(static_cast<size_t>(s.n), 0.0);
    c.tolerance.push_back({0.0});
    c.tolerance.insert(c.tolerance.end(), handed.begin(), handed.end());
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
  c.bind = [data = ffn_data(seed, sparse)](Bound& b) { return bind_ffn(data, b, true); };
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
