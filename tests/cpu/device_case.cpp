#include "cpu/device_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "core/error.h"
#include "core/latent_attention.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {
// --- Bound ---

namespace {
constexpr size_t kGuard = 256;  // bytes on either side of an output
constexpr std::byte kGuardValue{0xA5};
}  // namespace

void* Bound::upload(const void* data, size_t bytes) {
  DeviceBuffer& b = buffers_.emplace_back(device.allocate(std::max<size_t>(bytes, 4), Purpose::activations));
  device.upload(b.as<void>(), data, bytes);
  return b.as<void>();
}

void* Bound::add_output(const std::string& name, Kind kind, const void* initial, size_t bytes) {
  Output& o = outputs_.emplace_back();
  o.name = name;
  o.kind = kind;
  o.initial.assign(bytes + 2 * kGuard, kGuardValue);
  std::memcpy(o.initial.data() + kGuard, initial, bytes);
  o.buffer = device.allocate(o.initial.size(), Purpose::activations);
  return o.buffer.as<std::byte>() + kGuard;
}
float* Bound::output(const std::string& name, std::vector<float> initial) {
  return static_cast<float*>(add_output(name, Kind::f32, initial.data(), initial.size() * sizeof(float)));
}
int32_t* Bound::output_ids(const std::string& name, size_t n) {
  const std::vector<int32_t> initial(n, -1);
  return static_cast<int32_t*>(add_output(name, Kind::i32, initial.data(), n * sizeof(int32_t)));
}
f16_t* Bound::output_f16(const std::string& name, std::vector<f16_t> initial) {
  return static_cast<f16_t*>(add_output(name, Kind::f16, initial.data(), initial.size() * sizeof(f16_t)));
}

void Bound::reset() {
  for (Output& o : outputs_) device.upload(o.buffer.as<void>(), o.initial.data(), o.initial.size());
}

std::vector<std::pair<std::string, std::vector<double>>> Bound::read() {
  device.synchronize();
  std::vector<std::pair<std::string, std::vector<double>>> result;
  for (Output& o : outputs_) {
    std::vector<std::byte> bytes(o.initial.size());
    device.download(bytes.data(), o.buffer.as<void>(), bytes.size());
    const auto guard = [&](size_t i) { return bytes[i] == kGuardValue && bytes[bytes.size() - 1 - i] == kGuardValue; };
    for (size_t i = 0; i < kGuard; ++i) HEARTH_CHECK(guard(i), "{} wrote outside of '{}'", device.name(), o.name);
    const std::byte* data = bytes.data() + kGuard;
    const size_t size = bytes.size() - 2 * kGuard, width = o.kind == Kind::f16 ? 2 : 4;
    std::vector<double> values(size / width);
    for (size_t i = 0; i < values.size(); ++i) {
      if (o.kind == Kind::f32) {
        float x;
        std::memcpy(&x, data + 4 * i, 4);
        values[i] = static_cast<double>(x);
      } else if (o.kind == Kind::i32) {
        int32_t x;
        std::memcpy(&x, data + 4 * i, 4);
        values[i] = x;
      } else {
        f16_t x;
        std::memcpy(&x, data + 2 * i, 2);
        values[i] = static_cast<double>(f16_to_f32(x));
      }
    }
    result.emplace_back(o.name, std::move(values));
  }
  return result;
}

Act Bound::activations(const std::vector<float>& x, int64_t T, int64_t n) {
  HEARTH_CHECK(n % 32 == 0 && std::ssize(x) == T * n);
  constexpr int64_t kHeadDim = 32;
  for (const float v : x) HEARTH_CHECK(f16_to_f32(f32_to_f16(v)) == v, "{} is not an f16 value", v);
  // One position of one sequence; its page is written anew for each token.
  const size_t page_bytes = static_cast<size_t>(n * kPagePositions) * sizeof(f16_t);
  AttentionArgs a;
  a.v = input(x);
  a.n_head = a.n_head_kv = n / kHeadDim;
  a.head_dim = kHeadDim;
  a.cache = {static_cast<f16_t*>(scratch(page_bytes)), static_cast<f16_t*>(scratch(page_bytes)), n * kPagePositions};
  const int32_t* zero = input(std::vector<int32_t>{0});
  a.rows = {zero, zero, zero, 1};
  a.max_kv = 1;
  float* const q = input(std::vector<float>(x.size()));
  float* const k = input(std::vector<float>(x.size()));
  const float* const v = a.v;
  const size_t q8_bytes = device.q8_bytes(n);
  const Act act{static_cast<float*>(scratch(x.size() * sizeof(float))), scratch(static_cast<size_t>(T) * q8_bytes)};
  for (int64_t t = 0; t < T; ++t) {
    a.q = q + t * n, a.k = k + t * n, a.v = v + t * n;
    device.attention(a, 1, {act.x + t * n, static_cast<std::byte*>(act.q8) + static_cast<size_t>(t) * q8_bytes});
  }
  return act;
}

// --- random data ---

Weights::Weights(DType dtype, int64_t n_rows, int64_t n_cols, const std::vector<float>& wanted)
    : type(dtype), rows(n_rows), cols(n_cols), values(wanted.size()) {
  const size_t row_size = row_bytes(type, cols);
  data.resize(static_cast<size_t>(rows) * row_size);
  for (int64_t r = 0; r < rows; ++r) {
    std::byte* row = data.data() + static_cast<size_t>(r) * row_size;
    traits(type).from_float(wanted.data() + r * cols, row, cols);
    traits(type).to_float(row, values.data() + r * cols, cols);
  }
}

Weights random_weights(uint32_t seed, DType type, int64_t rows, int64_t cols) {
  std::mt19937 rng(seed);
  return {type, rows, cols, random_normal(rng, static_cast<size_t>(rows * cols))};
}

std::vector<float> random_activations(uint32_t seed, size_t n) {
  std::mt19937 rng(seed);
  std::vector<float> x = random_normal(rng, n);
  for (float& v : x) v = f16_to_f32(f32_to_f16(v));
  return x;
}

// --- cases ---

Case matmul_case(uint32_t seed, DType type, int64_t T, std::vector<int64_t> rows, int64_t cols, MatmulOptions options) {
  struct Data {
    std::vector<Weights> w;
    std::vector<std::vector<float>> bias, y;
    std::vector<float> x;
  };
  auto data = std::make_shared<Data>();
  Case c;
  c.name = fmt::format("matmul {} T={} [{}]x{}{}{}{}{} seed {}", traits(type).name, T, fmt::join(rows, "+"), cols,
                       options.bias ? " bias" : "", options.accumulate ? " accumulate" : "",
                       options.strided ? " strided" : "", options.packed ? " packed" : "", seed);
  c.limits = limits_for(T, *std::max_element(rows.begin(), rows.end()), cols);
  c.limits.quantized_weights = is_quantized(type);
  data->x = random_activations(seed, static_cast<size_t>(T * cols));
  std::mt19937 rng(seed + 1);
  for (const int64_t n : rows) {
    const Weights& w = data->w.emplace_back(random_weights(rng(), type, n, cols));
    const auto& bias = data->bias.emplace_back(options.bias ? random_normal(rng, static_cast<size_t>(n), 10.0f)
                                                            : std::vector<float>{});
    const int64_t stride = n + (options.strided ? 5 : 0);
    auto& y = data->y.emplace_back(poison(static_cast<size_t>(T * stride)));
    std::vector<double> tolerance(y.size());
    for (int64_t t = 0; t < T; ++t) {
      const std::vector<double> x = seen(data->x, t, cols, type);
      for (int64_t r = 0; r < n; ++r) {
        const auto at = static_cast<size_t>(t * stride + r);
        if (options.accumulate) y[at] = random_normal(rng, 1, 10.0f)[0];
        const Sum s = product(w, r, x);
        const double other = (options.accumulate ? std::fabs(y[at]) : 0.0) +
                             (options.bias ? std::fabs(bias[static_cast<size_t>(r)]) : 0.0);
        // Adding to what is there happens once per 256 columns.
        tolerance[at] = s.error(cols) + (static_cast<double>(cols) / 256 + 3) * kUlp * (other + s.magnitude);
      }
    }
    c.tolerance.push_back(std::move(tolerance));
    c.bytes += bytes_of(w);
    c.flops += 2.0 * static_cast<double>(T * n * cols);
  }
  c.bind = [data, T, cols, rows, options](Bound& b) -> std::function<void()> {
    Act in = cols % 32 == 0 ? b.activations(data->x, T, cols) : Act{b.input(data->x), nullptr};
    std::vector<MatmulPart> parts;
    for (size_t i = 0; i < rows.size(); ++i) {
      MatmulPart& p = parts.emplace_back();
      p.w = options.packed ? b.packed(data->w[i].matrix()) : b.device.adopt(data->w[i].matrix());
      p.bias = b.vector(data->bias[i]);
      p.y = b.output(fmt::format("y{}", i), data->y[i]);
      p.y_stride = options.strided ? rows[i] + 5 : 0;
      p.accumulate = options.accumulate;
    }
    return [&device = b.device, data, parts, in, T] { device.matmul(parts, in, T); };
  };
  return c;
}

Case head_products_case(uint32_t seed, DType type, int64_t T, const HeadShape& s) {
  struct Data {
    Weights w;
    std::vector<float> x, heads;  // [T][n_head][cols + n_tail]; the same without the tails
  };
  std::mt19937 rng(seed);
  auto data = std::make_shared<Data>();
  data->w = random_weights(rng(), type, s.n_head * s.rows, s.cols);
  data->heads = random_activations(rng(), static_cast<size_t>(T * s.n_head * s.cols));
  Case c;
  c.name = fmt::format("products by head {} T={} {} x {}x{} tail {} seed {}", traits(type).name, T, s.n_head, s.rows,
                       s.cols, s.n_tail, seed);
  c.limits = limits_for(T, s.rows, s.cols);
  c.limits.quantized_weights = is_quantized(type);
  std::vector<double> tolerance;
  for (int64_t i = 0; i < T * s.n_head; ++i) {
    const auto head = data->heads.begin() + i * s.cols;
    data->x.insert(data->x.end(), head, head + s.cols);
    const std::vector<float> tail = random_normal(rng, static_cast<size_t>(s.n_tail));
    data->x.insert(data->x.end(), tail.begin(), tail.end());
    tolerance.resize(tolerance.size() + static_cast<size_t>(s.n_tail));
    const std::vector<double> x = seen(data->heads, i, s.cols, type);
    for (int64_t r = 0; r < s.rows; ++r) {
      const Sum sum = product(data->w, i % s.n_head * s.rows + r, x);
      tolerance.push_back(sum.error(s.cols) + 3 * kUlp * sum.magnitude);
    }
  }
  c.tolerance = {std::move(tolerance)};
  c.bytes = bytes_of(data->w);
  c.bind = [data, T, s](Bound& b) -> std::function<void()> {
    const HeadProducts p{b.device.adopt(data->w.matrix()), s.n_head, s.n_tail, b.input(data->x),
                         b.output("y", poison(static_cast<size_t>(T * s.n_head * (s.rows + s.n_tail))))};
    return [&device = b.device, data, p, T] { device.latent_attention()->head_products(p, T); };
  };
  return c;
}

Case norm_case(uint32_t seed, NormKind kind, int64_t T, int64_t n, bool bias) {
  struct Data {
    std::vector<float> x, weight, bias;
  };
  std::mt19937 rng(seed);
  auto data = std::make_shared<Data>();
  data->x = random_normal(rng, static_cast<size_t>(T * n), 3.0f, 1.0f);
  data->weight = random_normal(rng, static_cast<size_t>(n));
  if (bias) data->bias = random_normal(rng, static_cast<size_t>(n));
  Case c;
  c.name = fmt::format("{} norm T={} n={}{} seed {}", kind == NormKind::rms ? "rms" : "layer", T, n,
                       bias ? " bias" : "", seed);
  c.limits = limits_for(T, 1, n);
  std::vector<double> tolerance;
  for (int64_t t = 0; t < T; ++t) {
    const auto x = as_double({data->x.begin() + t * n, data->x.begin() + (t + 1) * n});
    const double magnitude =
        std::accumulate(x.begin(), x.end(), 0.0, [](double s, double v) { return s + std::fabs(v); });
    const double mean =
        kind == NormKind::layer ? std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(n) : 0.0;
    double squares = 0;
    for (const double v : x) squares += (v - mean) * (v - mean);
    const double deviation = std::sqrt(squares / static_cast<double>(n) + 1e-5);
    // The mean is off by gamma * mean |x|, which moves every element, and the variance by its square and by gamma.
    const double mean_error =
        kind == NormKind::layer ? gamma(n) * magnitude / static_cast<double>(n) + kUlp * std::fabs(mean) : 0.0;
    for (int64_t i = 0; i < n; ++i) {
      const double w = std::fabs(data->weight[static_cast<size_t>(i)]),
                   b = bias ? std::fabs(data->bias[static_cast<size_t>(i)]) : 0.0;
      const double y = std::fabs(x[static_cast<size_t>(i)] - mean) / deviation * w;
      tolerance.push_back((gamma(n) + 8 * kUlp) * y +
                          (mean_error + kUlp * std::fabs(x[static_cast<size_t>(i)])) / deviation * w +
                          2 * kUlp * (y + b));
    }
  }
  c.tolerance = {tolerance};
  c.bytes = static_cast<double>(T * n * 8);
  c.bind = [data, kind, T, n](Bound& b) -> std::function<void()> {
    NormArgs a;
    a.kind = kind;
    a.weight = b.vector(data->weight);
    a.bias = b.vector(data->bias);
    a.n = n;
    const float* x = b.input(data->x);
    const Act out{b.output("y", poison(data->x.size())), nullptr};
    return [&device = b.device, data, a, x, T, out] { device.norm(a, x, T, out); };
  };
  return c;
}

Case quantize_case(uint32_t seed, int64_t T, int64_t n) {
  struct Data {
    std::vector<float> x, ones;
    Weights identity;
  };
  std::mt19937 rng(seed);
  auto data = std::make_shared<Data>();
  data->x = random_normal(rng, static_cast<size_t>(T * n));
  for (int64_t i = 32; i < std::min<int64_t>(64, n); ++i) data->x[static_cast<size_t>(i)] = 0.0f;  // a block of zeros
  data->ones.assign(static_cast<size_t>(n), 1.0f);
  std::vector<float> identity(static_cast<size_t>(n * n));
  for (int64_t i = 0; i < n; ++i) identity[static_cast<size_t>(i * n + i)] = 127.0f;  // d = 1: exact
  data->identity = {DType::q8_0, n, n, identity};
  Case c;
  c.name = fmt::format("quantised activations T={} n={} seed {}", T, n, seed);
  c.limits = limits_for(T, n, n);
  c.limits.quantized_weights = true;
  c.vacuous = 127.0 * 4;  // in units of the identity's 127, see below
  std::vector<double> tolerance;
  for (int64_t t = 0; t < T; ++t) {
    double squares = 1e-5;
    const float* x = data->x.data() + t * n;
    for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i] / static_cast<double>(n);
    for (int64_t b = 0; b < n; b += 32) {
      double amax = 0;
      for (int64_t i = b; i < b + 32; ++i) amax = std::max(amax, std::fabs(static_cast<double>(x[i])));
      // Where the two norms differ in the last bit one may round up and the other down: one step of amax / 127, times
      // 127.
      for (int64_t i = b; i < b + 32; ++i) tolerance.push_back(amax / std::sqrt(squares) * 1.001);
    }
  }
  c.tolerance = {tolerance};
  c.bind = [data, T, n](Bound& b) -> std::function<void()> {
    NormArgs a;
    a.weight = b.vector(data->ones);
    a.n = n;
    const float* x = b.input(data->x);
    const Act act{static_cast<float*>(b.scratch(data->x.size() * sizeof(float))),
                  b.scratch(static_cast<size_t>(T) * b.device.q8_bytes(n))};
    const MatmulPart part{.w = b.device.adopt(data->identity.matrix()), .y = b.output("y", poison(data->x.size()))};
    return [&device = b.device, data, a, x, act, part, T] {
      device.norm(a, x, T, act);
      device.matmul({&part, 1}, act, T);
    };
  };
  return c;
}

Case embed_case(uint32_t seed, DType type, int64_t T, int64_t n, bool positions) {
  struct Data {
    Weights table, positions;
    std::vector<int32_t> ids, pos;
  };
  std::mt19937 rng(seed);
  auto data = std::make_shared<Data>();
  data->table = random_weights(seed, type, 50, n);
  if (positions) data->positions = random_weights(seed + 1, type, T + 10, n);
  Case c;
  c.name = fmt::format("embed {} T={} n={}{} seed {}", traits(type).name, T, n, positions ? " positions" : "", seed);
  c.limits = limits_for(T, 50, n);
  c.tolerance.emplace_back();
  for (int64_t t = 0; t < T; ++t) {
    data->ids.push_back(static_cast<int32_t>(random_int(rng, 0, 49)));
    data->pos.push_back(static_cast<int32_t>(t + 3));
    for (int64_t i = 0; i < n; ++i) {
      const double x = std::fabs(data->table.values[static_cast<size_t>(data->ids.back() * n + i)]);
      const double p = positions ? std::fabs(data->positions.values[static_cast<size_t>((t + 5) * n + i)]) : 0.0;
      c.tolerance[0].push_back(2 * kUlp * (x + p));
    }
  }
  c.bind = [data, T](Bound& b) -> std::function<void()> {
    const Matrix table = b.device.adopt(data->table.matrix());
    const Matrix p = data->positions ? b.device.adopt(data->positions.matrix()) : Matrix{};
    const int32_t* ids = b.input(data->ids);
    const int32_t* pos = b.input(data->pos);
    float* x = b.output("x", poison(static_cast<size_t>(T * data->table.cols)));
    return [&device = b.device, data, table, p, ids, pos, T, x] { device.embed(table, ids, p, pos, 2, T, x); };
  };
  return c;
}

Case argmax_case(const std::vector<float>& logits, const std::string& what, int64_t T) {
  auto data = std::make_shared<std::vector<float>>(logits);
  const int64_t n = std::ssize(logits) / T;
  Case c;
  c.name = fmt::format("argmax {} T={}", what, T);
  c.limits = limits_for(T, n, 32);
  c.tolerance.emplace_back(static_cast<size_t>(T), 0.0);
  c.bind = [data, n, T](Bound& b) -> std::function<void()> {
    const float* x = b.input(*data);
    int32_t* ids = b.output_ids("ids", static_cast<size_t>(T));
    return [&device = b.device, data, n, T, x, ids] { device.argmax(x, n, T, ids); };
  };
  return c;
}

}  // namespace hearth::test
