// Cases of attention over a paged cache.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/error.h"
#include "cpu/device_case.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {

int64_t AttentionShape::T() const {
  return std::accumulate(runs.begin(), runs.end(), int64_t{0},
                         [](int64_t sum, const AttentionRun& r) { return sum + r.T; });
}

namespace {

constexpr f16_t kNan{0x7E00};
constexpr float kFactor = 1.25f, kEps = 1e-6f;  // attention_factor with a rotation, norm_eps

struct AttentionData {
  AttentionShape shape;
  std::vector<float> q, k, v, inv_freq, q_norm, k_norm, latent_norm, sinks;
  std::vector<f16_t> k_cache, v_cache;
  std::vector<int32_t> pos, slot, pages;
  std::vector<BatchRun> runs;
  int64_t pages_stride = 0, stride = 0, max_kv = 0;

  // Elements from the begin of the cache to position j of token t's sequence.
  size_t at(int64_t t, int64_t kv_head, int64_t j) const {
    const int64_t row = slot[static_cast<size_t>(t)] * pages_stride + j / kPagePositions;
    return static_cast<size_t>(pages[static_cast<size_t>(row)] * stride +
                               (kv_head * kPagePositions + j % kPagePositions) * shape.head_dim);
  }
};

// The table of pages: every sequence in a slot of its own, pages in random order, some of them nobody's.
void lay_out(AttentionData& d, std::mt19937& rng) {
  const AttentionShape& s = d.shape;
  const size_t n_slots = s.runs.size() + 2;
  std::vector<int32_t> slots(n_slots), free;
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), rng);
  const auto pages_of = [](const AttentionRun& r) { return (r.first_pos + r.T + kPagePositions - 1) / kPagePositions; };
  for (const AttentionRun& r : s.runs) {
    d.max_kv = std::max(d.max_kv, r.first_pos + r.T);
    d.pages_stride = std::max(d.pages_stride, pages_of(r) + 1);
    free.resize(free.size() + static_cast<size_t>(pages_of(r)));
  }
  free.resize(free.size() + 2);
  std::iota(free.begin(), free.end(), 0);
  std::shuffle(free.begin(), free.end(), rng);
  const auto n_pages = static_cast<int64_t>(free.size());
  const auto take = [&free] {
    const int32_t page = free.back();
    free.pop_back();
    return page;
  };
  // Positions that nobody has reached: a page that holds NaN.
  d.pages.assign(n_slots * static_cast<size_t>(d.pages_stride), take());
  const int32_t common = take();
  int64_t row = 0;
  for (size_t i = 0; i < s.runs.size(); ++i) {
    const AttentionRun& r = s.runs[i];
    HEARTH_CHECK(!s.forked || r.first_pos >= kPagePositions, "a sequence that would write into a page of others");
    for (int64_t page = 0; page < pages_of(r); ++page) {
      d.pages[static_cast<size_t>(slots[i] * d.pages_stride + page)] = s.forked && page == 0 ? common : take();
    }
    for (int64_t t = 0; t < r.T; ++t) {
      d.pos.push_back(static_cast<int32_t>(r.first_pos + t));
      d.slot.push_back(slots[i]);
    }
    d.runs.push_back({row, r.T, r.first_pos});
    row += r.T;
  }
  d.stride = s.n_head_kv * kPagePositions * s.head_dim + 64;
  d.k_cache.assign(static_cast<size_t>(n_pages * d.stride), kNan);
  d.v_cache = d.k_cache;
}

std::shared_ptr<AttentionData> attention_data(uint32_t seed, const AttentionShape& s) {
  auto d = std::make_shared<AttentionData>();
  std::mt19937 rng(seed);
  d->shape = s;
  const int64_t T = s.T(), dim = s.head_dim;
  lay_out(*d, rng);
  d->q = random_normal(rng, static_cast<size_t>(T * s.n_head * dim));
  d->k = random_normal(rng, static_cast<size_t>(T * s.n_head_kv * dim));
  d->v = random_normal(rng, static_cast<size_t>(T * s.n_head_kv * dim));
  for (int64_t i = 0; i < s.n_rot / 2; ++i) {
    d->inv_freq.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(s.n_rot)));
  }
  if (s.norms) {
    d->q_norm = random_normal(rng, static_cast<size_t>(dim));
    d->k_norm = random_normal(rng, static_cast<size_t>(dim));
  }
  if (s.latent) d->latent_norm = random_normal(rng, static_cast<size_t>(s.value_dim()));
  if (s.sinks) d->sinks = random_normal(rng, static_cast<size_t>(s.n_head), 2.0f, 1.0f);
  // Earlier positions of the sequences. Pages in common are written once for each, the last time counts.
  for (const BatchRun& run : d->runs) {
    for (int64_t h = 0; h < s.n_head_kv; ++h) {
      for (int64_t j = 0; j < run.first_position; ++j) {
        const std::vector<float> k = random_normal(rng, static_cast<size_t>(dim)),
                                 v = random_normal(rng, static_cast<size_t>(dim));
        const auto at = static_cast<std::ptrdiff_t>(d->at(run.first_row, h, j));
        std::transform(k.begin(), k.end(), d->k_cache.begin() + at, f32_to_f16);
        std::transform(v.begin(), v.end(), d->v_cache.begin() + at, f32_to_f16);
      }
    }
  }
  return d;
}

// An exact value, and how far an f32 implementation may be off.
struct Value {
  double value = 0, error = 0;
};

// One head of q or k after the norm of its last elements, which may be all, and its rotation.
std::vector<Value> prepared(const AttentionData& d, const float* head, const std::vector<float>& norm, int64_t pos) {
  const AttentionShape& s = d.shape;
  std::vector<Value> x;
  double squares = 0;
  const auto n = static_cast<int64_t>(norm.size()), first = s.head_dim - n;
  for (int64_t i = first; i < s.head_dim; ++i) squares += static_cast<double>(head[i]) * head[i];
  const double deviation = std::sqrt(squares / static_cast<double>(n) + kEps);
  for (int64_t i = 0; i < s.head_dim; ++i) {
    if (i < first) {
      x.push_back({head[i], 0.0});
    } else {
      const double y = head[i] / deviation * norm[static_cast<size_t>(i - first)];
      x.push_back({y, (gamma(n) + 8 * kUlp) * std::fabs(y)});
    }
  }
  const int64_t half = s.rope == RopeKind::none ? 0 : s.n_rot / 2;
  for (int64_t i = 0; i < half; ++i) {
    Value& a = x[static_cast<size_t>(s.rope == RopeKind::neox ? i : 2 * i)];
    Value& b = x[static_cast<size_t>(s.rope == RopeKind::neox ? i + half : 2 * i + 1)];
    const double angle = static_cast<double>(pos) * d.inv_freq[static_cast<size_t>(i)];
    const double cos = kFactor * std::cos(angle), sin = kFactor * std::sin(angle);
    // A rotation keeps lengths; the angle may be computed in f32.
    const double length = kFactor * std::hypot(a.value, b.value);
    const double error =
        kFactor * std::hypot(a.error, b.error) + length * (static_cast<double>(pos + 1) * 2 + 8) * kUlp;
    const double rotated = a.value * cos - b.value * sin, other = a.value * sin + b.value * cos;
    a = {rotated, error}, b = {other, error};
  }
  return x;
}

// The same in the cache: where an error may move it to the other side of a tie it is off by a whole step.
Value in_cache(const Value& x) {
  const auto f16 = [](double v) { return static_cast<double>(f16_to_f32(f32_to_f16(static_cast<float>(v)))); };
  return {f16(x.value), f16(x.value + x.error) - f16(x.value - x.error)};
}

// Writes the batch's keys and values into the cache; returns the errors of the keys, as the cache lies.
std::vector<double> write_cache(AttentionData& d) {
  const AttentionShape& s = d.shape;
  std::vector<double> errors(d.k_cache.size());
  for (int64_t t = 0; t < s.T(); ++t) {
    const int64_t pos = d.pos[static_cast<size_t>(t)];
    for (int64_t h = 0; h < s.n_head_kv; ++h) {
      const int64_t from = (t * s.n_head_kv + h) * s.head_dim;
      const std::vector<Value> k = prepared(d, d.k.data() + from, s.latent ? d.latent_norm : d.k_norm, pos);
      const size_t to = d.at(t, h, pos);
      for (size_t i = 0; i < k.size(); ++i) {
        const Value rounded = in_cache(k[i]);
        d.k_cache[to + i] = f32_to_f16(static_cast<float>(rounded.value));
        errors[to + i] = rounded.error;
        if (!s.latent) d.v_cache[to + i] = f32_to_f16(d.v[static_cast<size_t>(from) + i]);
      }
    }
  }
  return errors;
}

// The tolerance of one head's output, from the scores of the positions that it sees.
void add_tolerance(const AttentionData& d, const std::vector<double>& k_errors, int64_t t, int64_t head,
                   std::vector<double>& tolerance) {
  const AttentionShape& s = d.shape;
  const int64_t dim = s.head_dim, kv = head / (s.n_head / s.n_head_kv), pos = d.pos[static_cast<size_t>(t)];
  const int64_t first = s.window > 0 ? std::max<int64_t>(0, pos - s.window + 1) : 0;
  const double scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const std::vector<Value> q = prepared(d, d.q.data() + (t * s.n_head + head) * dim, d.q_norm, pos);
  std::vector<Value> p;
  double max = -1e300, total = 0;
  for (int64_t j = first; j <= pos; ++j) {
    const size_t at = d.at(t, kv, j);
    Sum sum;
    double error = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      const double k = f16_to_f32(d.k_cache[at + i]), k_error = k_errors[at + i];
      const double product = q[i].value * k * scale;
      sum.value += product;
      sum.magnitude += std::fabs(product);
      error += scale * (q[i].error * (std::fabs(k) + k_error) + std::fabs(q[i].value) * k_error);
    }
    Value score{sum.value, error + sum.error(dim) + 2 * kUlp * std::fabs(sum.value)};
    if (s.soft_cap > 0) {  // its slope is 1 at most; 1e-6 for the hyperbolic tangent
      score.value = s.soft_cap * std::tanh(score.value / s.soft_cap);
      score.error += 1e-6 * std::fabs(score.value);
    }
    p.push_back(score);
    max = std::max(max, score.value);
  }
  double mean_error = 0;  // of a score
  for (Value& x : p) total += x.value = std::exp(x.value - max);
  if (s.sinks) total += std::exp(d.sinks[static_cast<size_t>(head)] - max);
  for (Value& x : p) mean_error += (x.value /= total) * x.error;
  const auto n_values = static_cast<size_t>(s.value_dim());
  std::vector<double> magnitude(n_values), error(n_values);
  for (int64_t j = first; j <= pos; ++j) {
    const Value& weight = p[static_cast<size_t>(j - first)];
    const size_t at = d.at(t, kv, j) + (q.size() - n_values);  // a latent is the end of its key
    for (size_t i = 0; i < n_values; ++i) {
      const double term = weight.value * std::fabs(f16_to_f32((s.latent ? d.k_cache : d.v_cache)[at + i]));
      magnitude[i] += term;
      error[i] += term * weight.error + (s.latent ? weight.value * k_errors[at + i] : 0);
    }
  }
  for (size_t i = 0; i < n_values; ++i) {
    // exp(s + e) = exp(s) (1 + e); numerator and denominator both; 5e-7 for the exponential itself.
    tolerance.push_back(1.01 * (error[i] + magnitude[i] * mean_error) +
                        magnitude[i] * (2 * (5e-7 + gamma(pos - first + 1)) + 8 * kUlp));
  }
}

Case without_tolerance(const std::shared_ptr<AttentionData>& data) {
  const AttentionShape& s = data->shape;
  std::vector<std::string> runs;
  for (const AttentionRun& r : s.runs) runs.push_back(fmt::format("{} from {}", r.T, r.first_pos));
  Case c;
  c.name =
      fmt::format("attention [{}] heads {}/{}x{} window {} rope {} rot {}{}{}{} cap {} sinks {}", fmt::join(runs, ", "),
                  s.n_head, s.n_head_kv, s.head_dim, s.window, static_cast<int>(s.rope), s.n_rot,
                  s.norms ? " norms" : "", s.forked ? " forked" : "", s.latent ? " latent" : "", s.soft_cap, s.sinks);
  c.limits = limits_for(s.T(), 1, s.n_head * s.head_dim);
  c.limits.n_head = s.n_head;
  c.limits.n_head_kv = s.n_head_kv;
  c.limits.head_dim = s.head_dim;
  c.limits.max_context = data->max_kv;
  for (const AttentionRun& r : s.runs) {
    const int64_t last = r.first_pos + r.T, n_read = std::min(last, s.window > 0 ? s.window + r.T - 1 : last);
    c.bytes += static_cast<double>(s.n_head_kv * n_read * s.head_dim * 4);
    c.flops += 4.0 * static_cast<double>(s.n_head * s.head_dim) * static_cast<double>(r.T) *
               (static_cast<double>(r.first_pos) + static_cast<double>(r.T) / 2);
  }
  c.bind = [data](Bound& b) -> std::function<void()> {
    const AttentionData& d = *data;
    const AttentionShape& shape = d.shape;
    AttentionArgs a;
    a.n_head = shape.n_head;
    a.n_head_kv = shape.n_head_kv;
    a.head_dim = shape.head_dim;
    a.rope = shape.rope;
    a.n_rot = shape.n_rot;
    a.inv_freq = b.input(d.inv_freq);
    a.attention_factor = kFactor;
    a.q_norm = b.vector(d.q_norm);
    a.k_norm = b.vector(d.k_norm);
    a.latent_norm = b.vector(d.latent_norm);
    a.norm_eps = kEps;
    a.rows = {b.input(d.pos), b.input(d.slot), b.input(d.pages), d.pages_stride};
    if (shape.T() > kFewTokens) a.rows.runs = d.runs;
    a.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    a.window = shape.window;
    a.soft_cap = shape.soft_cap, a.sinks = b.vector(d.sinks);
    a.max_kv = d.max_kv;
    a.q = static_cast<float*>(b.scratch(d.q.size() * sizeof(float)));
    a.k = static_cast<float*>(b.scratch(d.k.size() * sizeof(float)));
    if (!shape.latent) a.v = b.input(d.v);
    const Act out{b.output("out", poison(static_cast<size_t>(shape.T() * shape.n_head * shape.value_dim()))), nullptr};
    a.cache = {b.output_f16("k_cache", d.k_cache), b.output_f16("v_cache", d.v_cache), d.stride};
    if (shape.latent) a.cache.v = nullptr;
    return [&device = b.device, data, a, out] {
      device.upload(a.q, data->q.data(), data->q.size() * sizeof(float));
      device.upload(a.k, data->k.data(), data->k.size() * sizeof(float));
      device.attention(a, data->shape.T(), out);
    };
  };
  return c;
}

}  // namespace

Case attention_case(uint32_t seed, const AttentionShape& s) {
  const auto data = attention_data(seed, s);
  Case c = without_tolerance(data);
  c.name += fmt::format(" seed {}", seed);
  AttentionData after = *data;
  const std::vector<double> k_errors = write_cache(after);
  std::vector<double> out;
  for (int64_t t = 0; t < s.T(); ++t) {
    for (int64_t h = 0; h < s.n_head; ++h) add_tolerance(after, k_errors, t, h, out);
  }
  c.tolerance = {std::move(out), k_errors, std::vector<double>(k_errors.size())};
  return c;
}

Case attention_speed(const AttentionShape& s) {
  return without_tolerance(attention_data(1, s));
}

}  // namespace hearth::test
