// Mixtures on the SIMD device: what the operation is defined as (HostDevice: expert by expert, token by token, by the
// dense FFN, which has its own tests), and the same bits whoever else is in the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/thread_team.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "support/random.h"

namespace hearth {
namespace {

constexpr int64_t kEmbd = 256, kFf = 96, kFfShared = 160, kExperts = 6, kUsed = 2;

struct Case {
  DType type;
  bool packed = false, biases = false;
  Activation act = Activation::silu;
  bool transposed = false;  // down projections; neurons are skipped then
  float threshold = 0;      // of |act(gate)|
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << traits(c.type).name << (c.packed ? ", packed" : "") << (c.biases ? ", biases" : "")
       << (c.transposed ? ", transposed" : "");
  if (c.threshold > 0) *out << ", threshold " << c.threshold;
}

// Experts with random weights, a router, and the input of kTokens tokens.
class Mixture {
 public:
  static constexpr int64_t kTokens = 40;
  Mixture(const Case& c, ThreadTeam& team) : case_(c), device(team, cpu::best_isa()) {
    Limits limits{.max_tokens = kTokens, .max_cols = kEmbd, .max_rows = kEmbd, .n_ff = kFfShared, .n_embd = kEmbd};
    limits.n_experts = kExperts + 1, limits.n_named = kUsed + 1, limits.n_ff_expert = kFfShared;
    limits.quantized_weights = is_quantized(c.type);
    device.reserve(limits);
    for (int64_t e = 0; e <= kExperts; ++e) experts.push_back(expert(e < kExperts ? kFf : kFfShared, e == kExperts));
    router.routing = {.n_expert = kExperts, .n_used = kUsed};
    router.shared = true;
    router.w = matrix(DType::f32, kExperts, kEmbd, 2.0f);
    router.shared_gate = matrix(DType::f32, 1, kEmbd, 1.0f);
    x = test::random_normal(rng_, kTokens * kEmbd);
    q8.resize(kTokens * device.q8_bytes(kEmbd));
    device.quantize({x.data(), q8.data()}, kTokens, kEmbd);
    ids.resize(kTokens * (kUsed + 1)), weights.resize(ids.size());
    device.route(router, rows(0), kTokens, choice(0));
  }
  Act rows(int64_t t) { return {x.data() + t * kEmbd, q8.data() + static_cast<size_t>(t) * device.q8_bytes(kEmbd)}; }
  // Skips neurons where the case does, up to a few tokens.
  ExpertSet set(int64_t T) {
    ExpertSet all(experts);
    all.threshold = case_.threshold;
    if (case_.transposed && T <= kFewTokens) all.n_active = n_active.data();
    return all;
  }
  // Of token t and its place i among the choices: the sum of |value * weight|, each element, in double.
  std::vector<double> size_of(int64_t i) const {
    const Expert& e = experts[static_cast<size_t>(ids[static_cast<size_t>(i)])];
    const float* const in = x.data() + i / (kUsed + 1) * kEmbd;
    std::vector<double> size(kEmbd);
    std::vector<float> row(kEmbd);
    const auto product = [&](const Matrix& w, Vector bias, int64_t k) {
      double sum = bias ? bias.data[k] : 0.0f;
      traits(w.type).to_float(w.row(k), row.data(), kEmbd);
      for (size_t c = 0; c < kEmbd; ++c) sum += static_cast<double>(row[c]) * in[c];
      return sum;
    };
    for (int64_t k = 0; k < e.ffn.n(); ++k) {
      const double value = std::max(0.0, product(e.ffn.gate, e.ffn.gate_bias, k)) * product(e.ffn.up, e.ffn.up_bias, k);
      traits(e.ffn.down_t.type).to_float(e.ffn.down_t.row(k), row.data(), kEmbd);
      for (size_t c = 0; c < kEmbd; ++c) size[c] += std::fabs(value * row[c]);
    }
    return size;
  }
  ExpertChoice choice(int64_t t) { return {ids.data() + t * (kUsed + 1), weights.data() + t * (kUsed + 1), kUsed + 1}; }

 private:
  static DType fitting(DType type, int64_t cols) { return cols % traits(type).block_size == 0 ? type : DType::q8_0; }
  Matrix matrix(DType type, int64_t n_rows, int64_t cols, float scale, bool read_whole = true) {
    const auto values =
        test::random_normal(rng_, static_cast<size_t>(n_rows * cols), scale / std::sqrt(static_cast<float>(cols)));
    auto& data = storage_.emplace_back(static_cast<size_t>(n_rows) * row_bytes(type, cols) + 64);
    for (int64_t r = 0; r < n_rows; ++r) {
      traits(type).from_float(values.data() + r * cols, data.data() + static_cast<size_t>(r) * row_bytes(type, cols),
                              cols);
    }
    Matrix m{type, n_rows, cols, data.data()};
    if (!case_.packed || !read_whole || device.packed_bytes(m) == 0) return m;
    auto& packed = storage_.emplace_back(device.packed_bytes(m) + 64);
    return device.pack(m, packed.data());
  }
  Vector vector(int64_t n) {
    vectors_.push_back(test::random_normal(rng_, static_cast<size_t>(n), 0.3f));
    return {vectors_.back().data(), n};
  }
  Expert expert(int64_t n, bool shared) {
    Expert e;
    e.ffn.gate = matrix(case_.type, n, kEmbd, 2.0f), e.ffn.up = matrix(case_.type, n, kEmbd, 1.0f, !case_.transposed);
    if (case_.transposed) {
      e.ffn.down_t = matrix(case_.type, n, kEmbd, 1.0f, false);
    } else {
      e.ffn.down = matrix(fitting(case_.type, n), kEmbd, n, 1.0f);
    }
    e.ffn.act = case_.act, e.ffn.act_threshold = 1.0f;
    if (!case_.biases || shared) return e;
    e.ffn.gate_bias = vector(n), e.ffn.up_bias = vector(n), e.down_bias = vector(kEmbd);
    return e;
  }

  Case case_;
  std::mt19937 rng_{17};
  std::vector<std::vector<std::byte>> storage_;
  std::vector<std::vector<float>> vectors_;

 public:
  cpu::CpuDevice device;
  std::vector<Expert> experts;
  Router router;
  std::vector<float> x, weights;
  std::vector<std::byte> q8;
  std::vector<int32_t> ids, n_active = std::vector<int32_t>(kFewTokens, -1);
};

class Experts : public testing::TestWithParam<Case> {
 protected:
  ThreadTeam team_{3};
  Mixture m_{GetParam(), team_};
};

// Expert by expert the dense FFN of its tokens, which are as many at once as the operation takes: the sums of products
// with more than a few tokens are other ones than those with one.
std::vector<float> sum_of_ffns(Mixture& m, int64_t T, std::vector<float> y) {
  constexpr int64_t kNamed = kUsed + 1;
  for (size_t e = 0; e < m.experts.size(); ++e) {
    std::vector<int64_t> named;  // places in ids
    for (int64_t i = 0; i < T * kNamed; ++i) {
      if (m.ids[static_cast<size_t>(i)] == static_cast<int32_t>(e)) named.push_back(i);
    }
    const auto count = std::ssize(named);
    if (count == 0) continue;
    std::vector<float> in(static_cast<size_t>(count * kEmbd)), out(in.size());
    std::vector<std::byte> q8(static_cast<size_t>(count) * m.device.q8_bytes(kEmbd));
    for (int64_t k = 0; k < count; ++k)
      std::copy_n(m.rows(named[static_cast<size_t>(k)] / kNamed).x, kEmbd, in.begin() + k * kEmbd);
    m.device.quantize({in.data(), q8.data()}, count, kEmbd);
    const Expert& expert = m.experts[e];
    m.device.ffn_dense(expert.ffn, Act{in.data(), q8.data()}, count, expert.down_bias, out.data(), nullptr);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = named[static_cast<size_t>(k)];
      for (int64_t c = 0; c < kEmbd; ++c) {
        y[static_cast<size_t>(i / kNamed * kEmbd + c)] +=
            m.weights[static_cast<size_t>(i)] * out[static_cast<size_t>(k * kEmbd + c)];
      }
    }
  }
  return y;
}

TEST_P(Experts, AreTheSumOfTheirFfns) {
  for (const int64_t T : {int64_t{1}, int64_t{5}, int64_t{8}, Mixture::kTokens}) {
    if (T > kFewTokens && GetParam().transposed) continue;  // sums in another order: EqualDenseOnes
    std::vector<float> y(static_cast<size_t>(T * kEmbd), 0.5f), expected = y, size(y.size());
    m_.device.ffn_experts(m_.set(T), m_.choice(0), m_.rows(0), T, y.data());
    if (T <= kFewTokens) {
      m_.device.HostDevice::ffn_experts(m_.set(T), m_.choice(0), m_.rows(0), T, expected.data());
    } else {
      expected = sum_of_ffns(m_, T, expected);
    }
    // What of an element is rounded besides: the product with its weight and the sum, once for each expert.
    for (int64_t i = 0; i < T * (kUsed + 1); ++i) {
      std::vector<float> one(kEmbd);
      const ExpertChoice single{m_.ids.data() + i, m_.weights.data() + i, 1};
      m_.device.HostDevice::ffn_experts(m_.set(1), single, m_.rows(i / (kUsed + 1)), 1, one.data());
      for (int64_t c = 0; c < kEmbd; ++c)
        size[static_cast<size_t>(i / (kUsed + 1) * kEmbd + c)] += std::fabs(one[static_cast<size_t>(c)]);
    }
    double largest = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_NEAR(y[i], expected[i], 4 * 0x1p-24f * (kUsed + 1) * (size[i] + 0.5f)) << "T " << T << ", element " << i;
      largest = std::max<double>(largest, size[i]);
    }
    EXPECT_GT(largest, 0.1);
  }
}

TEST_P(Experts, ATokensBitsDoNotDependOnTheOthers) {
  std::vector<float> all(kFewTokens * kEmbd), one(kEmbd);
  m_.device.ffn_experts(m_.set(kFewTokens), m_.choice(0), m_.rows(0), kFewTokens, all.data());
  const std::vector<int32_t> n_active = m_.n_active;
  for (int64_t t = 0; t < kFewTokens; ++t) {
    std::fill(one.begin(), one.end(), 0.0f);
    m_.device.ffn_experts(m_.set(1), m_.choice(t), m_.rows(t), 1, one.data());
    EXPECT_EQ(m_.n_active[0], GetParam().transposed ? n_active[static_cast<size_t>(t)] : -1);
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + t * kEmbd)) << "token " << t;
  }
}

TEST_P(Experts, ATeamOfAnyNumberGivesTheSameBits) {
  ThreadTeam alone(1);
  Mixture other(GetParam(), alone);
  for (const int64_t T : {int64_t{1}, int64_t{7}, Mixture::kTokens}) {
    std::vector<float> y(static_cast<size_t>(T * kEmbd)), same(y.size());
    m_.device.ffn_experts(m_.set(T), m_.choice(0), m_.rows(0), T, y.data());
    other.device.ffn_experts(other.set(T), other.choice(0), other.rows(0), T, same.data());
    EXPECT_EQ(y, same) << "T " << T;
  }
}

// With transposed down projections: whether neurons are skipped or not, and in prompts, the result is that of the
// experts whose down projections are as files store them, but for roundings of sums of as many products as there are
// neurons.
TEST(SparseExperts, EqualDenseOnes) {
  ThreadTeam team(3);
  for (const DType type : {DType::f32, DType::f16, DType::q8_0, DType::q4_k}) {
    SCOPED_TRACE(traits(type).name);
    Mixture m({type, false, true, Activation::relu, true}, team);
    // In f32 the same numbers, not transposed.
    std::vector<Expert> standard = m.experts;
    std::vector<std::vector<float>> downs;
    for (Expert& e : standard) {
      const Matrix t = std::exchange(e.ffn.down_t, {});
      auto& down = downs.emplace_back(static_cast<size_t>(t.rows * kEmbd));
      std::vector<float> row(kEmbd);
      for (int64_t k = 0; k < t.rows; ++k) {
        traits(t.type).to_float(t.row(k), row.data(), kEmbd);
        for (int64_t c = 0; c < kEmbd; ++c) down[static_cast<size_t>(c * t.rows + k)] = row[static_cast<size_t>(c)];
      }
      e.ffn.down = {DType::f32, kEmbd, t.rows, down.data()};
    }
    for (const int64_t T : {int64_t{1}, int64_t{3}, kFewTokens, Mixture::kTokens}) {
      std::vector<float> sparse(static_cast<size_t>(T * kEmbd)), dense = sparse, expected = sparse;
      std::vector<double> bound(sparse.size());
      for (int64_t i = 0; i < T * (kUsed + 1); ++i) {
        const std::vector<double> size = m.size_of(i);
        for (size_t c = 0; c < kEmbd; ++c)
          bound[static_cast<size_t>(i / (kUsed + 1) * kEmbd) + c] += 2 * (kFfShared + 8) * 0x1p-24 * (size[c] + 1);
      }
      m.device.ffn_experts(m.set(T), m.choice(0), m.rows(0), T, sparse.data());
      m.device.ffn_experts(m.experts, m.choice(0), m.rows(0), T, dense.data());
      m.device.ffn_experts(standard, m.choice(0), m.rows(0), T, expected.data());
      double largest = 0, most = 0;
      for (size_t i = 0; i < sparse.size(); ++i) {
        ASSERT_NEAR(sparse[i], expected[i], bound[i]) << "T " << T << ", element " << i;
        ASSERT_NEAR(dense[i], expected[i], bound[i]) << "T " << T << ", element " << i;
        largest = std::max<double>(largest, std::fabs(expected[i])), most = std::max(most, bound[i]);
      }
      EXPECT_GT(largest, 100 * most) << "the bound says something";
      if (T > kFewTokens) continue;
      int64_t n_active = 0, neurons = 0;
      for (int64_t t = 0; t < T; ++t)
        n_active += m.n_active[static_cast<size_t>(t)], neurons += kUsed * kFf + kFfShared;
      EXPECT_GT(n_active, neurons / 4);
      EXPECT_LT(n_active, neurons * 3 / 4) << "half of random gates are above zero";
    }
  }
}

// Neither up nor down of a neuron whose gate is zero.
TEST(SparseExperts, ReadNothingOfNeuronsThatAreZero) {
  ThreadTeam team(3);
  Mixture m({DType::f32, false, true, Activation::relu, true}, team);
  for (const bool poisoned : {false, true}) {
    for (Expert& e : m.experts) {
      if (!e.ffn.gate_bias) continue;
      for (int64_t k = 0; k < e.ffn.n(); k += 3) {
        const_cast<float*>(e.ffn.gate_bias.data)[k] = -1e6f;
        for (const Matrix* w : {&e.ffn.up, &e.ffn.down_t}) {
          if (poisoned) std::fill_n(static_cast<float*>(const_cast<void*>(w->data)) + k * kEmbd, kEmbd, NAN);
        }
      }
    }
    for (const int64_t T : {int64_t{1}, int64_t{5}}) {
      static std::map<int64_t, std::vector<float>> clean;
      std::vector<float> y(static_cast<size_t>(T * kEmbd));
      m.device.ffn_experts(m.set(T), m.choice(0), m.rows(0), T, y.data());
      if (!poisoned) clean[T] = y;
      EXPECT_EQ(y, clean[T]);
    }
  }
}

TEST_P(Experts, ThoseThatAreElsewhereAreLeftOut) {
  std::vector<Expert> even = m_.experts, odd = m_.experts;
  for (size_t e = 0; e < even.size(); ++e) (e % 2 == 0 ? odd : even)[e] = {};
  std::vector<float> whole(5 * kEmbd), parts(whole.size());
  m_.device.ffn_experts(m_.experts, m_.choice(0), m_.rows(0), 5, whole.data());
  m_.device.ffn_experts(even, m_.choice(0), m_.rows(0), 5, parts.data());
  m_.device.ffn_experts(odd, m_.choice(0), m_.rows(0), 5, parts.data());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], parts[i], 1e-5f);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DTypeTraits& t : all_traits()) {
    if (t.computable()) all.push_back({t.type});
    if (t.quantized()) all.push_back({t.type, true});
  }
  for (const DType type : {DType::f32, DType::mxfp4}) all.push_back({type, false, true, Activation::clamped_silu});
  for (const DTypeTraits& t : all_traits()) {
    if (t.computable()) all.push_back({t.type, t.quantized(), false, Activation::relu, true});
  }
  all.push_back({DType::q8_0, false, true, Activation::relu2, true});
  for (const Activation act : {Activation::silu, Activation::gelu, Activation::clamped_silu}) {
    for (const DType type : {DType::f32, DType::q8_0, DType::q4_k}) all.push_back({type, true, true, act, true, 0.2f});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Types, Experts, testing::ValuesIn(cases()));

}  // namespace
}  // namespace hearth
