// Mixtures on the SIMD device: what the operation is defined as (HostDevice: expert by expert, token by token, by the
// dense FFN, which has its own tests), and the same bits whoever else is in the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
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
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << traits(c.type).name << (c.packed ? ", packed" : "") << (c.biases ? ", clamped, biases" : "");
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
  ExpertChoice choice(int64_t t) { return {ids.data() + t * (kUsed + 1), weights.data() + t * (kUsed + 1), kUsed + 1}; }

 private:
  static DType fitting(DType type, int64_t cols) { return cols % traits(type).block_size == 0 ? type : DType::q8_0; }
  Matrix matrix(DType type, int64_t n_rows, int64_t cols, float scale) {
    const auto values =
        test::random_normal(rng_, static_cast<size_t>(n_rows * cols), scale / std::sqrt(static_cast<float>(cols)));
    auto& data = storage_.emplace_back(static_cast<size_t>(n_rows) * row_bytes(type, cols) + 64);
    for (int64_t r = 0; r < n_rows; ++r) {
      traits(type).from_float(values.data() + r * cols, data.data() + static_cast<size_t>(r) * row_bytes(type, cols),
                              cols);
    }
    Matrix m{type, n_rows, cols, data.data()};
    if (!case_.packed || device.packed_bytes(m) == 0) return m;
    auto& packed = storage_.emplace_back(device.packed_bytes(m) + 64);
    return device.pack(m, packed.data());
  }
  Vector vector(int64_t n) {
    vectors_.push_back(test::random_normal(rng_, static_cast<size_t>(n), 0.3f));
    return {vectors_.back().data(), n};
  }
  Expert expert(int64_t n, bool shared) {
    Expert e;
    e.ffn.gate = matrix(case_.type, n, kEmbd, 2.0f), e.ffn.up = matrix(case_.type, n, kEmbd, 1.0f);
    e.ffn.down = matrix(fitting(case_.type, n), kEmbd, n, 1.0f);
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
  std::vector<int32_t> ids;
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
    std::vector<float> y(static_cast<size_t>(T * kEmbd), 0.5f), expected = y, size(y.size());
    m_.device.ffn_experts(m_.experts, m_.choice(0), m_.rows(0), T, y.data());
    if (T <= kFewTokens) {
      m_.device.HostDevice::ffn_experts(m_.experts, m_.choice(0), m_.rows(0), T, expected.data());
    } else {
      expected = sum_of_ffns(m_, T, expected);
    }
    // What of an element is rounded besides: the product with its weight and the sum, once for each expert.
    for (int64_t i = 0; i < T * (kUsed + 1); ++i) {
      std::vector<float> one(kEmbd);
      const ExpertChoice single{m_.ids.data() + i, m_.weights.data() + i, 1};
      m_.device.HostDevice::ffn_experts(m_.experts, single, m_.rows(i / (kUsed + 1)), 1, one.data());
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
  m_.device.ffn_experts(m_.experts, m_.choice(0), m_.rows(0), kFewTokens, all.data());
  for (int64_t t = 0; t < kFewTokens; ++t) {
    std::fill(one.begin(), one.end(), 0.0f);
    m_.device.ffn_experts(m_.experts, m_.choice(t), m_.rows(t), 1, one.data());
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + t * kEmbd)) << "token " << t;
  }
}

TEST_P(Experts, ATeamOfAnyNumberGivesTheSameBits) {
  std::vector<float> y(Mixture::kTokens * kEmbd);
  m_.device.ffn_experts(m_.experts, m_.choice(0), m_.rows(0), Mixture::kTokens, y.data());
  ThreadTeam alone(1);
  Mixture other(GetParam(), alone);
  std::vector<float> same(y.size());
  other.device.ffn_experts(other.experts, other.choice(0), other.rows(0), Mixture::kTokens, same.data());
  EXPECT_EQ(y, same);
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
  return all;
}
INSTANTIATE_TEST_SUITE_P(Types, Experts, testing::ValuesIn(cases()));

}  // namespace
}  // namespace hearth
