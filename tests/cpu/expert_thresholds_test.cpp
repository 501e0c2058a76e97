// Experts without the neurons whose |act(gate)| is at most a threshold: every CPU device against the oracle, at random
// shapes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "core/experts.h"
#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "support/random.h"

namespace hearth {
namespace {

constexpr double kEps = 0x1p-24;

struct Case {
  DType type = DType::f32;
  Activation act = Activation::silu;
  bool transposed = true, gated = true, biases = false, shared = false;
  float threshold = 0;
  int64_t T = 1, n_embd = 64, n_ff = 32, n_ff_shared = 32, n_expert = 5, n_used = 2;
  std::string name() const {
    return fmt::format("{} act {} threshold {} T {} n_embd {} n_ff {}, shared {}{}{}{}{}", traits(type).name,
                       static_cast<int>(act), threshold, T, n_embd, n_ff, n_ff_shared, shared ? ", shared" : "",
                       transposed ? "" : ", not transposed", gated ? "" : ", ungated", biases ? ", biases" : "");
  }
};

double activation(Activation act, float clamp, double z) {
  switch (act) {
    case Activation::silu:
      return z / (1 + std::exp(-z));
    case Activation::gelu:
      return 0.5 * z * (1 + std::erf(z * std::sqrt(0.5)));
    case Activation::gelu_tanh:
      return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    case Activation::clamped_silu: {
      const double x = std::min<double>(z, clamp);
      return x / (1 + std::exp(-static_cast<double>(kClampedSiluAlpha) * x));
    }
    default:
      return std::max(z, 0.0);
  }
}

// Experts with random weights, and the input and the choice of T tokens.
class Mixture {
 public:
  Mixture(const Case& c, std::mt19937& rng) : c_(c), rng_(rng) {
    for (int64_t e = 0; e < c.n_expert; ++e) experts.push_back(expert(c.n_ff, c.biases));
    if (c.shared) experts.push_back(expert(c.n_ff_shared, false));
    // Whole multiples of 1/64, of which each block's largest is 127, so that their 8-bit form is exact.
    for (int64_t i = 0; i < c.T * c.n_embd; ++i)
      x.push_back(static_cast<float>(i % 32 == 0 ? 127 : test::random_int(rng, -127, 127)) / 64);
    for (int64_t t = 0; t < c.T; ++t) {
      std::vector<int32_t> all(static_cast<size_t>(c.n_expert));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), rng);
      all.resize(static_cast<size_t>(c.n_used));
      std::sort(all.begin(), all.end());
      if (c.shared) all.push_back(static_cast<int32_t>(c.n_expert));
      ids.insert(ids.end(), all.begin(), all.end());
    }
    for (size_t i = 0; i < ids.size(); ++i) weights.push_back(0.1f + 0.9f * static_cast<float>(rng() % 1000) / 1000);
  }
  int64_t n_named() const { return c_.n_used + (c_.shared ? 1 : 0); }

  // n_active is asked for where neurons can be skipped.
  std::vector<float> run(Device& device, float threshold, std::vector<int32_t>* n_active) {
    Limits limits{.max_tokens = c_.T, .max_cols = 512, .max_rows = 512, .n_ff = 256, .n_embd = c_.n_embd};
    limits.n_experts = std::ssize(experts), limits.n_named = n_named();
    limits.n_ff_expert = std::max(c_.n_ff, c_.n_ff_shared), limits.quantized_weights = is_quantized(c_.type);
    device.reserve(limits);
    std::vector<float> in = x, y(static_cast<size_t>(c_.T * c_.n_embd), 0.25f);
    std::vector<std::byte> q8(static_cast<size_t>(c_.T) * device.q8_bytes(c_.n_embd) + 64);
    const Act act{in.data(), is_quantized(c_.type) ? q8.data() : nullptr};
    device.quantize(act, c_.T, c_.n_embd);
    ExpertSet set(experts, c_.shared);
    set.threshold = threshold;
    if (n_active != nullptr) n_active->assign(static_cast<size_t>(c_.T), -1), set.n_active = n_active->data();
    device.expert_ffn()->ffn_experts(set, {ids.data(), weights.data(), n_named()}, act, c_.T, y.data());
    return y;
  }

  // How far a correct y may be from another one, and n_active from another one: sums are rounded, and a neuron whose
  // activation is as near to the threshold as its sum's rounding may fall either way.
  struct Bounds {
    std::vector<double> y;
    std::vector<int32_t> n_active;
    int64_t left_out = 0, neurons = 0;
  };
  Bounds bounds(float threshold) {
    Bounds b{std::vector<double>(static_cast<size_t>(c_.T * c_.n_embd)),
             std::vector<int32_t>(static_cast<size_t>(c_.T)), 0, 0};
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto t = static_cast<int64_t>(i) / n_named();
      add_bounds(experts[static_cast<size_t>(ids[i])], std::fabs(static_cast<double>(weights[i])), threshold, t, b);
    }
    return b;
  }

  std::vector<Expert> experts;
  std::vector<float> x, weights;
  std::vector<int32_t> ids;

 private:
  struct Product {
    double value, error;  // error: of a sum in floats
  };
  Product product(const Matrix& w, Vector bias, int64_t k, int64_t t) const {
    std::vector<float> row(static_cast<size_t>(w.cols));
    traits(w.type).to_float(w.row(k), row.data(), w.cols);
    double sum = bias ? bias.data[k] : 0.0f, size = std::fabs(sum);
    for (int64_t c = 0; c < w.cols; ++c) {
      const double p = static_cast<double>(row[static_cast<size_t>(c)]) * x[static_cast<size_t>(t * c_.n_embd + c)];
      sum += p, size += std::fabs(p);
    }
    // Blocks of 4-bit weights are a difference of two products.
    return {sum, (static_cast<double>(w.cols) + 8) * kEps * (is_quantized(w.type) ? 4 : 1) * size};
  }
  void add_bounds(const Expert& e, double weight, float threshold, int64_t t, Bounds& b) const {
    const FfnShard& s = e.ffn;
    std::vector<float> row(static_cast<size_t>(c_.n_embd));
    for (int64_t k = 0; k < s.n(); ++k) {
      const Product z = product(s.gate, s.gate_bias, k, t);
      Product u = s.up ? product(s.up, s.up_bias, k, t) : Product{1, 0};
      if (s.act == Activation::clamped_silu && s.up)
        u.value = std::clamp<double>(u.value, -s.act_threshold, s.act_threshold) + 1;
      const double g = activation(s.act, s.act_threshold, z.value);
      const double g_error = 1.2 * z.error + 16 * kEps * (std::fabs(g) + std::fabs(z.value));  // |act'| is below 1.13
      const bool near = std::fabs(std::fabs(g) - static_cast<double>(threshold)) <= g_error;
      const bool out = std::fabs(g) <= static_cast<double>(threshold);
      const double size = std::fabs(g * u.value);
      double error = g_error * std::fabs(u.value) + std::fabs(g) * u.error + 4 * kEps * size;
      error += (static_cast<double>(s.n()) + 16) * kEps * size;  // of the sum over neurons
      if (near) error += size;
      if (out && !near) error = 0;
      ++b.neurons, b.left_out += out ? 1 : 0, b.n_active[static_cast<size_t>(t)] += near ? 1 : 0;
      for (int64_t c = 0; c < c_.n_embd; ++c) {
        double down = 0;
        if (s.down_t) {
          if (c == 0) traits(s.down_t.type).to_float(s.down_t.row(k), row.data(), c_.n_embd);
          down = row[static_cast<size_t>(c)];
        } else {
          std::vector<float> all(static_cast<size_t>(s.n()));
          traits(s.down.type).to_float(s.down.row(c), all.data(), s.n());
          down = all[static_cast<size_t>(k)];
        }
        b.y[static_cast<size_t>(t * c_.n_embd + c)] += weight * std::fabs(down) * error;
      }
    }
    for (int64_t c = 0; c < c_.n_embd; ++c)  // the bias, the weight, and the sum that is added to
      b.y[static_cast<size_t>(t * c_.n_embd + c)] += 32 * kEps * (e.down_bias ? std::fabs(e.down_bias.data[c]) + 1 : 1);
  }
  Matrix matrix(int64_t rows, int64_t cols, float scale) {
    const auto values =
        test::random_normal(rng_, static_cast<size_t>(rows * cols), scale / std::sqrt(static_cast<float>(cols)));
    auto& data = storage_.emplace_back(static_cast<size_t>(rows) * row_bytes(c_.type, cols) + 64);
    for (int64_t r = 0; r < rows; ++r) {
      std::byte* const to = data.data() + static_cast<size_t>(r) * row_bytes(c_.type, cols);
      traits(c_.type).from_float(values.data() + r * cols, to, cols);
    }
    return {c_.type, rows, cols, data.data()};
  }
  Vector vector(int64_t n) {
    vectors_.push_back(std::make_unique<std::vector<float>>(test::random_normal(rng_, static_cast<size_t>(n), 0.3f)));
    return {vectors_.back()->data(), n};
  }
  Expert expert(int64_t n, bool biases) {
    Expert e;
    e.ffn.gate = matrix(n, c_.n_embd, 1.0f);
    if (c_.gated) e.ffn.up = matrix(n, c_.n_embd, 1.0f);
    if (c_.transposed) {
      e.ffn.down_t = matrix(n, c_.n_embd, 1.0f);
    } else {
      e.ffn.down = matrix(c_.n_embd, n, 1.0f);
    }
    e.ffn.act = c_.act, e.ffn.act_threshold = 1.5f;
    if (!biases) return e;
    e.ffn.gate_bias = vector(n), e.down_bias = vector(c_.n_embd);
    if (c_.gated) e.ffn.up_bias = vector(n);
    return e;
  }

  Case c_;
  std::mt19937& rng_;
  std::vector<std::vector<std::byte>> storage_;
  std::vector<std::unique_ptr<std::vector<float>>> vectors_;
};

class ExpertThresholds : public testing::TestWithParam<uint32_t> {
 protected:
  std::mt19937 rng_{GetParam()};
  ThreadTeam team_{3};
  Case random_case(DType type) {
    Case c{.type = type};
    constexpr std::array acts = {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::clamped_silu};
    c.act = acts[static_cast<size_t>(test::random_int(rng_, 0, 3))];
    c.gated = c.act == Activation::clamped_silu || rng_() % 4 != 0;
    c.biases = rng_() % 2 == 0, c.shared = rng_() % 2 == 0;
    const int64_t unit = std::max<int64_t>(32, traits(type).block_size);
    c.n_embd = unit * test::random_int(rng_, 1, unit > 32 ? 1 : 8);
    c.n_ff = test::random_int(rng_, 1, 130), c.n_ff_shared = test::random_int(rng_, 1, 130);
    c.n_expert = test::random_int(rng_, 1, 9), c.n_used = test::random_int(rng_, 1, c.n_expert);
    c.threshold = static_cast<float>(test::random_int(rng_, 1, 40)) / 100;
    return c;
  }
  void expect_oracle(const Case& c, bool skips) {
    SCOPED_TRACE(c.name());
    Mixture m(c, rng_);
    const auto oracle = cpu::make_reference_device();
    std::vector<int32_t> expected_active, active;
    const std::vector<float> expected = m.run(*oracle, c.threshold, skips ? &expected_active : nullptr);
    const Mixture::Bounds bounds = m.bounds(c.threshold);
    for (const cpu::Isa isa : cpu::available_isas()) {
      const auto device = cpu::make_device(team_, isa);
      const std::vector<float> y = m.run(*device, c.threshold, skips ? &active : nullptr);
      for (size_t i = 0; i < y.size(); ++i)
        ASSERT_NEAR(y[i], expected[i], 2 * bounds.y[i]) << cpu::to_string(isa) << ", element " << i;
      for (size_t t = 0; t < active.size(); ++t)
        ASSERT_LE(std::abs(active[t] - expected_active[t]), bounds.n_active[t]) << cpu::to_string(isa);
    }
    left_out_ += bounds.left_out, neurons_ += bounds.neurons;
    for (const int32_t near : bounds.n_active) near_ += near;
  }
  int64_t left_out_ = 0, neurons_ = 0, near_ = 0;
};

TEST_P(ExpertThresholds, AreTheOracles) {
  for (const DType type : {DType::f32, DType::f16, DType::q8_0, DType::q4_k}) {
    for (const int64_t T : {1, 3, 8}) {
      Case c = random_case(type);
      c.T = T;
      expect_oracle(c, true);
    }
  }
  // Whole experts: of any number of tokens, with down projections of either form.
  for (const DType type : {DType::f32, DType::f16}) {
    for (const int64_t T : {1, 8, 9, 33}) {
      for (const bool transposed : {true, false}) {
        Case c = random_case(type);
        c.T = T, c.transposed = transposed;
        if (!transposed && type == DType::f16) c.n_ff = 64, c.n_ff_shared = 32;
        expect_oracle(c, false);
      }
    }
  }
  EXPECT_GT(left_out_, neurons_ / 20);
  EXPECT_LT(left_out_, neurons_ * 19 / 20);
  EXPECT_LT(near_, neurons_ / 200) << "the bounds say nothing";
}

TEST_P(ExpertThresholds, ZeroLeavesNothingOutAndAHugeOneAllButBiases) {
  for (const DType type : {DType::f32, DType::q8_0}) {
    Case c = random_case(type);
    c.T = 5, c.biases = true;
    SCOPED_TRACE(c.name());
    Mixture m(c, rng_);
    const auto device = cpu::make_device(team_);
    std::vector<int32_t> active;
    const std::vector<float> all = m.run(*device, 0, &active), whole = m.run(*device, 0, nullptr);
    const Mixture::Bounds bounds = m.bounds(0);
    const int64_t neurons = c.n_used * c.n_ff + (c.shared ? c.n_ff_shared : 0);
    for (const int32_t n : active) EXPECT_EQ(n, neurons) << "no gate of these is exactly zero";
    // Whole experts have 8-bit values of neurons where down projections are quantised and not transposed: these are.
    for (size_t i = 0; i < all.size(); ++i) ASSERT_NEAR(all[i], whole[i], 2 * bounds.y[i]) << i;

    std::vector<float> expected(all.size(), 0.25f);
    for (size_t i = 0; i < m.ids.size(); ++i) {
      const Vector bias = m.experts[static_cast<size_t>(m.ids[i])].down_bias;
      for (int64_t k = 0; bias && k < c.n_embd; ++k)
        expected[i / static_cast<size_t>(m.n_named()) * static_cast<size_t>(c.n_embd) + static_cast<size_t>(k)] +=
            m.weights[i] * bias.data[k];
    }
    const std::vector<float> none = m.run(*device, 1e9f, &active), none_of_whole = m.run(*device, 1e9f, nullptr);
    EXPECT_EQ(active, std::vector<int32_t>(5, 0));
    for (size_t i = 0; i < none.size(); ++i) {
      ASSERT_NEAR(none[i], expected[i], 64 * kEps * 8) << i;
      ASSERT_NEAR(none_of_whole[i], expected[i], 64 * kEps * 8) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, ExpertThresholds, testing::Range(1u, 9u));

}  // namespace
}  // namespace hearth
