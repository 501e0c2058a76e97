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
};

struct Score {
  double value = 0, error = 0;
};

// fc2's input of token t: exact, or fc1's output with the error that it may have.
std::vector<Score> hidden(const PredictData& d, int64_t t) {
  const PredictShape& s = d.shape;
  std::vector<Score> h;
  if (s.kind != Kind::low_rank) {
    for (const double v : seen(d.x, t, s.n_embd, s.type)) h.push_back({v, 0.0});
    return h;
  }
  const std::vector<double> x = seen(d.x, t, s.n_embd, s.type);
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

std::vector<Score> scores(const PredictData& d, int64_t t) {
  const PredictShape& s = d.shape;
  std::vector<Score> result(static_cast<size_t>(s.n));
  const std::vector<Score> h = hidden(d, t);
  for (int64_t k = 0; k < s.n; ++k) {
    Score& score = result[static_cast<size_t>(k)];
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

// A threshold on either side of one token's score, as near as rounding allows, and of no other token's nearer than
// that. Density 0 and 1: above or below all.
float threshold_at(const std::vector<Score>& scores, double density, std::mt19937& rng) {
  const auto gap = [](const Score& s) { return 1.5 * s.error + 4 * kUlp; };
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const bool predicted = std::bernoulli_distribution(density)(rng);
    const Score& near = scores[static_cast<size_t>(random_int(rng, 0, std::ssize(scores) - 1))];
    const auto threshold = static_cast<float>(near.value + (predicted ? -gap(near) : gap(near)));
    const bool fits = std::all_of(scores.begin(), scores.end(), [&](const Score& s) {
      const bool above = s.value > threshold;
      return std::fabs(s.value - threshold) > s.error && (density > 0 || !above) && (density < 1 || above);
    });
    if (fits) return threshold;
  }
  HEARTH_CHECK(false, "no threshold is apart from the scores of all tokens");
  return 0;
}

std::shared_ptr<PredictData> predict_data(uint32_t seed, const PredictShape& s) {
  auto d = std::make_shared<PredictData>();
  std::mt19937 rng(seed);
  d->shape = s;
  d->x = random_activations(rng(), static_cast<size_t>(s.T * s.n_embd));
  if (s.kind == Kind::low_rank) d->fc1 = random_weights(rng(), s.type, s.rank, s.n_embd);
  if (s.kind == Kind::low_rank && s.bias) d->fc1_bias = random_normal(rng, static_cast<size_t>(s.rank), 10.0f);
  d->fc2 = random_weights(rng(), s.type, s.n, s.kind == Kind::low_rank ? s.rank : s.n_embd);
  std::vector<std::vector<Score>> all;
  for (int64_t t = 0; t < s.T; ++t) all.push_back(scores(*d, t));
  for (size_t k = 0; k < static_cast<size_t>(s.n); ++k) {
    std::vector<Score> of_tokens;
    for (const auto& token : all) of_tokens.push_back(token[k]);
    d->threshold.push_back(threshold_at(of_tokens, s.density, rng));
  }
  return d;
}

// Adds the outputs of T lists of at most n neurons and returns them.
NeuronLists list_outputs(Bound& b, const std::string& name, int64_t n, int64_t T) {
  const int64_t stride = n + 3;
  int32_t* ids = b.output_ids(name, static_cast<size_t>(T * stride));
  return {ids, b.output_ids("n_" + name, static_cast<size_t>(T)), stride};
}

std::function<void()> bind_predict(const std::shared_ptr<PredictData>& d, Bound& b) {
  const PredictShape& s = d->shape;
  Predictor p;
  if (d->fc1) p.fc1 = b.device.adopt(d->fc1.matrix());
  p.fc2 = b.device.adopt(d->fc2.matrix());
  p.fc1_bias = b.vector(d->fc1_bias);
  p.relu = s.relu;
  p.threshold = b.vector(d->threshold);
  const bool exact_input = s.n_embd % 32 == 0;
  const Act in = exact_input ? b.activations(d->x, s.T, s.n_embd) : Act{b.input(d->x), nullptr};
  PredictArgs args;
  args.n_own = s.n_own, args.n_linked = s.n_linked;
  if (s.n_own > 0) args.own = list_outputs(b, "own", s.n_own, s.T);
  if (s.n_linked > 0) args.linked = list_outputs(b, "linked", s.n_linked, s.T);
  SparseFfn* const ffn = b.device.sparse_ffn();
  if (!s.hand_off) return [ffn, d, p, in, args] { ffn->predict(p, in, d->shape.T, args); };
  const NeuronLists handed = list_outputs(b, "handed", s.n, s.T);
  const std::shared_ptr<Mailbox> mailbox = b.device.hand_offs()->open_mailbox(s.T * s.n_embd, s.n);
  float* posted = b.output("posted", poison(d->x.size()));
  args.hand_off = {mailbox.get(), in.x, s.n_embd};
  return [&device = b.device, ffn, d, p, in, args, handed, mailbox, posted] {
    const int64_t T = d->shape.T;
    ffn->predict(p, in, T, args);
    device.upload(posted, mailbox->wait_input(), d->x.size() * sizeof(float));
    const NeuronLists lists = mailbox->wait_neurons(T);
    for (int64_t t = 0; t < T; ++t) {
      device.upload(handed.ids + t * handed.stride, lists.ids + t * lists.stride,
                    static_cast<size_t>(lists.count[t]) * sizeof(int32_t));
    }
    device.upload(handed.count, lists.count, static_cast<size_t>(T) * sizeof(int32_t));
    mailbox->answer();
  };
}

}  // namespace

Case predict_case(uint32_t seed, const PredictShape& s) {
  const auto data = predict_data(seed, s);
  Case c;
  c.name = fmt::format("predict {} {} n={} n_embd={} rank={} T={}{}{} density {} own {} linked {}{} seed {}",
                       s.kind == Kind::low_rank ? "low rank" : "gate copy", traits(s.type).name, s.n, s.n_embd, s.rank,
                       s.T, s.relu ? " relu" : "", s.bias ? " bias" : "", s.density, s.n_own, s.n_linked,
                       s.hand_off ? " hand-off" : "", seed);
  c.limits = limits_for(s.T, std::max({s.n, s.rank, s.n_embd}), s.n_embd);
  c.limits.max_cols = std::max(s.n_embd, s.rank);
  c.limits.n_ff = std::max(s.n, s.rank);
  c.limits.quantized_weights = is_quantized(s.type);
  const auto exact = [&](int64_t n) { c.tolerance.emplace_back(static_cast<size_t>(n), 0.0); };
  const auto lists = [&](int64_t n) { exact(s.T * (n + 3)), exact(s.T); };
  if (s.n_own > 0) lists(s.n_own);
  if (s.n_linked > 0) lists(s.n_linked);
  if (s.hand_off) lists(s.n), exact(s.T * s.n_embd);
  c.bytes = bytes_of(data->fc1) + bytes_of(data->fc2);
  c.flops = 2.0 * static_cast<double>(s.T) *
            static_cast<double>(s.rank * s.n_embd + s.n * (s.kind == Kind::low_rank ? s.rank : s.n_embd));
  c.bind = [data](Bound& b) { return bind_predict(data, b); };
  return c;
}

}  // namespace hearth::test
