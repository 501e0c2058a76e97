// Cases of the predictors.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/error.h"
#include "cpu/device_case.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {
namespace {

using Kind = PredictShape::Kind;

struct PredictData {
  PredictShape shape;
  Weights fc1, fc2;
  std::vector<float> fc1_bias, threshold, x;
  std::vector<uint32_t> signs;
};

struct Score {
  double value = 0, error = 0;
};

// fc2's input: exact, or fc1's output with the error that it may have.
std::vector<Score> hidden(const PredictData& d) {
  const PredictShape& s = d.shape;
  std::vector<Score> h;
  if (s.kind != Kind::low_rank) {
    for (const double v : seen(d.x, 0, s.n_embd, s.type)) h.push_back({v, 0.0});
    return h;
  }
  const std::vector<double> x = seen(d.x, 0, s.n_embd, s.type);
  for (int64_t r = 0; r < s.rank; ++r) {
    const Sum sum = product(d.fc1, r, x);
    const double bias = s.bias ? d.fc1_bias[static_cast<size_t>(r)] : 0.0, v = sum.value + bias;
    h.push_back({s.relu ? std::max(v, 0.0) : v, sum.error(s.n_embd) + 2 * kUlp * (std::fabs(bias) + std::fabs(v))});
  }
  if (!is_quantized(s.type)) return h;
  // The 8-bit form: an error may move a value by a whole step.
  std::vector<float> exact;
  for (const Score& v : h) exact.push_back(static_cast<float>(v.value));
  const std::vector<double> rounded = rounded_to_q8(exact.data(), s.rank);
  for (size_t b = 0; b < h.size(); b += 32) {
    double largest = 0;
    for (size_t i = b; i < std::min(h.size(), b + 32); ++i) largest = std::max(largest, std::fabs(h[i].value));
    for (size_t i = b; i < std::min(h.size(), b + 32); ++i) h[i] = {rounded[i], h[i].error + 1.01 * largest / 127};
  }
  return h;
}

std::vector<Score> scores(const PredictData& d) {
  const PredictShape& s = d.shape;
  std::vector<Score> result(static_cast<size_t>(s.n));
  const std::vector<Score> h = s.kind == Kind::signs ? std::vector<Score>{} : hidden(d);
  for (int64_t k = 0; k < s.n; ++k) {
    Score& score = result[static_cast<size_t>(k)];
    if (s.kind == Kind::signs) {
      const uint32_t* row = d.signs.data() + k * ((s.n_embd + 31) / 32);
      for (int64_t c = 0; c < s.n_embd; ++c)
        score.value += ((row[c / 32] >> (c % 32) & 1) != 0) == (d.x[static_cast<size_t>(c)] < 0) ? 1 : -1;
      continue;
    }
    double magnitude = 0;
    for (int64_t c = 0; c < d.fc2.cols; ++c) {
      const double w = d.fc2.values[static_cast<size_t>(k * d.fc2.cols + c)];
      const Score& v = h[static_cast<size_t>(c)];
      score.value += w * v.value;
      score.error += std::fabs(w) * v.error;
      magnitude += std::fabs(w) * (std::fabs(v.value) + v.error);
    }
    score.error += gamma(d.fc2.cols) * magnitude + 2 * kUlp * std::fabs(score.value);
  }
  return result;
}

std::shared_ptr<PredictData> predict_data(uint32_t seed, const PredictShape& s) {
  auto d = std::make_shared<PredictData>();
  std::mt19937 rng(seed);
  d->shape = s;
  d->x = random_activations(rng(), static_cast<size_t>(s.n_embd));
  if (s.kind == Kind::low_rank) d->fc1 = random_weights(rng(), s.type, s.rank, s.n_embd);
  if (s.kind == Kind::low_rank && s.bias) d->fc1_bias = random_normal(rng, static_cast<size_t>(s.rank), 10.0f);
  if (s.kind == Kind::signs) {
    d->x[0] = -0.0f;  // not negative
    const int64_t words = (s.n_embd + 31) / 32, used = s.n_embd % 32;
    for (int64_t i = 0; i < s.n * words; ++i) {
      const uint32_t mask = i % words == words - 1 && used != 0 ? (1u << used) - 1 : ~0u;
      d->signs.push_back(static_cast<uint32_t>(rng()) & mask);
    }
  } else {
    d->fc2 = random_weights(rng(), s.type, s.n, s.kind == Kind::low_rank ? s.rank : s.n_embd);
  }
  // Thresholds on either side of each score, as near as rounding allows; signs count exactly, also at the threshold.
  for (const Score& score : scores(*d)) {
    const bool predicted = std::bernoulli_distribution(s.density)(rng);
    const double gap = s.kind == Kind::signs ? (predicted ? 1.0 : 0.0) : 1.5 * score.error + 4 * kUlp;
    d->threshold.push_back(static_cast<float>(score.value + (predicted ? -gap : gap)));
  }
  return d;
}

// Adds the outputs of a list and returns it.
NeuronList list_output(Bound& b, const std::string& name, int64_t n) {
  int32_t* ids = b.output_ids(name, static_cast<size_t>(n));
  return {ids, b.output_ids("n_" + name, 1)};
}

std::function<void()> bind_predict(const std::shared_ptr<PredictData>& d, Bound& b) {
  const PredictShape& s = d->shape;
  Predictor p;
  if (d->fc1) p.fc1 = b.device.adopt(d->fc1.matrix());
  if (d->fc2) p.fc2 = b.device.adopt(d->fc2.matrix());
  p.fc1_bias = b.vector(d->fc1_bias);
  p.relu = s.relu;
  if (s.kind == Kind::signs) p.signs = b.input(d->signs), p.n_signs = s.n_embd;
  p.threshold = b.vector(d->threshold);
  const bool exact_input = s.n_embd % 32 == 0 && s.kind != Kind::signs;  // activations() loses the sign of zero
  const Act in = exact_input ? b.activations(d->x, 1, s.n_embd) : Act{b.input(d->x), nullptr};
  PredictArgs args;
  args.n_first = s.n_first;
  if (s.n_first > 0) args.first = list_output(b, "first", s.n_first);
  const NeuronList rest = s.n_first < s.n || s.hand_off ? list_output(b, "rest", s.n - s.n_first) : NeuronList{};
  if (!s.hand_off) {
    args.rest = rest;
    return [&device = b.device, d, p, in, args] { device.predict(p, in, args); };
  }
  const std::shared_ptr<Mailbox> mailbox = b.device.open_mailbox(s.n_embd, s.n);
  float* posted = b.output("posted", poison(static_cast<size_t>(s.n_embd)));
  args.hand_off = {mailbox.get(), in.x, s.n_embd};
  return [&device = b.device, d, p, in, args, rest, mailbox, posted] {
    device.predict(p, in, args);
    const MailboxRequest r = mailbox->wait_request();
    device.upload(posted, r.x, static_cast<size_t>(d->shape.n_embd) * sizeof(float));
    device.upload(rest.ids, r.ids, static_cast<size_t>(*r.n_ids) * sizeof(int32_t));
    device.upload(rest.count, r.n_ids, sizeof(int32_t));
    mailbox->answer();
  };
}

}  // namespace

Case predict_case(uint32_t seed, const PredictShape& s) {
  const auto data = predict_data(seed, s);
  Case c;
  c.name = fmt::format("predict {} {} n={} n_embd={} rank={}{}{} density {} first {}{} seed {}",
                       s.kind == Kind::low_rank    ? "low rank"
                       : s.kind == Kind::gate_copy ? "gate copy"
                                                   : "signs",
                       traits(s.type).name, s.n, s.n_embd, s.rank, s.relu ? " relu" : "", s.bias ? " bias" : "",
                       s.density, s.n_first, s.hand_off ? " hand-off" : "", seed);
  c.limits = limits_for(1, std::max({s.n, s.rank, s.n_embd}), s.n_embd);
  c.limits.max_cols = std::max(s.n_embd, s.rank);
  c.limits.n_ff = std::max(s.n, s.rank);
  c.limits.quantized_weights = is_quantized(s.type);
  const auto exact = [&](int64_t n) { c.tolerance.emplace_back(static_cast<size_t>(n), 0.0); };
  if (s.n_first > 0) exact(s.n_first), exact(1);
  if (s.n_first < s.n || s.hand_off) exact(s.n - s.n_first), exact(1);
  if (s.hand_off) exact(s.n_embd);
  c.bytes = bytes_of(data->fc1) + bytes_of(data->fc2) + 4.0 * static_cast<double>(data->signs.size());
  c.flops = 2.0 * static_cast<double>(s.rank * s.n_embd + s.n * (s.kind == Kind::low_rank ? s.rank : s.n_embd));
  c.bind = [data](Bound& b) { return bind_predict(data, b); };
  return c;
}

}  // namespace hearth::test
