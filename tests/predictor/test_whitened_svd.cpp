// The low-rank form of a gate: exact where the gate or the inputs are of low rank, best on the inputs that occur, and
// the same whatever the number of threads.
#include <gtest/gtest.h>

#include <cmath>

#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "predictor/products.h"
#include "predictor/whitened_svd.h"
#include "support/random.h"

namespace hearth::predictor {
namespace {

constexpr int64_t kN = 48, kNff = 160, kT = 700;

struct Case {
  std::vector<float> gate;  // [kNff][kN]
  std::vector<f16_t> x;     // [kT][kN]
  Matrix matrix() const { return {DType::f32, kNff, kN, gate.data()}; }
};

// Inputs of unequal variances around a mean; a gate of the given rank.
Case make_case(int64_t rank) {
  std::mt19937 rng(11);
  Case c;
  const auto a = test::random_normal(rng, static_cast<size_t>(kNff * rank)),
             b = test::random_normal(rng, static_cast<size_t>(rank * kN));
  c.gate.assign(static_cast<size_t>(kNff * kN), 0);
  for (int64_t i = 0; i < kNff; ++i) {
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t k = 0; k < kN; ++k) {
        c.gate[static_cast<size_t>(i * kN + k)] +=
            a[static_cast<size_t>(i * rank + r)] * b[static_cast<size_t>(r * kN + k)];
      }
    }
  }
  std::vector<float> x = test::random_normal(rng, static_cast<size_t>(kT * kN));
  for (size_t i = 0; i < x.size(); ++i) {
    const auto column = static_cast<float>(i % kN);
    x[i] = x[i] * 2.0f / (1.0f + 0.2f * column) + 0.5f;
  }
  c.x.resize(x.size());
  traits(DType::f16).from_float(x.data(), c.x.data(), static_cast<int64_t>(x.size()));
  return c;
}

// Sum over tokens and neurons of (w (x - mean) - fc2 fc1 (x - mean))^2, weighted, over that of w (x - mean) alone.
double error_of(const Case& c, const std::vector<float>& fc1, const std::vector<float>& fc2, int64_t rank,
                const std::vector<float>& mean, const std::vector<float>& weights) {
  double error = 0, all = 0;
  std::vector<float> x(static_cast<size_t>(kN));
  for (int64_t t = 0; t < kT; ++t) {
    traits(DType::f16).to_float(c.x.data() + t * kN, x.data(), kN);
    std::vector<double> h(static_cast<size_t>(rank));
    for (size_t k = 0; k < x.size(); ++k) x[k] -= mean[k];
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t k = 0; k < kN; ++k) {
        h[static_cast<size_t>(r)] +=
            static_cast<double>(fc1[static_cast<size_t>(r * kN + k)]) * x[static_cast<size_t>(k)];
      }
    }
    for (int64_t i = 0; i < kNff; ++i) {
      double z = 0, guess = 0;
      for (int64_t k = 0; k < kN; ++k)
        z += static_cast<double>(c.gate[static_cast<size_t>(i * kN + k)]) * x[static_cast<size_t>(k)];
      for (int64_t r = 0; r < rank; ++r)
        guess += static_cast<double>(fc2[static_cast<size_t>(i * rank + r)]) * h[static_cast<size_t>(r)];
      const double w = weights[static_cast<size_t>(i)];
      error += w * w * (z - guess) * (z - guess);
      all += w * w * z * z;
    }
  }
  return error / all;
}

class WhitenedSvd : public testing::Test {
 protected:
  ThreadTeam team_{2};
  std::unique_ptr<Device> device_ = cpu::make_device(team_);
  HostProducts host_{*device_, team_};
  Products& products_ = host_;
  std::vector<float> even_ = std::vector<float>(kNff, 1.0f);
};

TEST_F(WhitenedSvd, FindsALowRankGate) {
  const Case c = make_case(12);
  const InputMoments m = moments_of(c.x, kN, products_);
  const LowRank low = whitened_svd(c.matrix(), even_, m, 16, products_);
  EXPECT_LT(error_of(c, low.fc1, low.fc2, 16, m.mean, even_), 1e-6);
  EXPECT_LT(low.singular[12], 1e-3f * low.singular[0]);
  std::vector<float> fc1(low.fc1.begin(), low.fc1.begin() + 12 * kN);
  EXPECT_LT(error_of(c, fc1, low.fc2_of(12), 12, m.mean, even_), 1e-6);
  fc1.resize(8 * kN);
  EXPECT_GT(error_of(c, fc1, low.fc2_of(8), 8, m.mean, even_), 1e-3);
}

// By Eckart and Young: the error is what the singular values left out say, and no other pair does better. Weights are
// obeyed: heavy neurons are served first.
TEST_F(WhitenedSvd, IsTheBestOfItsRank) {
  const Case c = make_case(kN);
  const InputMoments m = moments_of(c.x, kN, products_);
  std::vector<float> weights = even_;
  for (size_t i = 0; i < 40; ++i) weights[i] = 10;
  for (const auto& w : {even_, weights}) {
    const LowRank low = whitened_svd(c.matrix(), w, m, kN, products_);
    double all = 0, left = 0;
    for (size_t r = 0; r < static_cast<size_t>(kN); ++r) {
      const double square = std::pow(static_cast<double>(low.singular[r]), 2);
      all += square;
      if (r >= 10) left += square;
    }
    const std::vector<float> fc1(low.fc1.begin(), low.fc1.begin() + 10 * kN);
    const double error = error_of(c, fc1, low.fc2_of(10), 10, m.mean, w);
    EXPECT_NEAR(error, left / all, 2e-3 * error);  // the ridge is 1e-4 of the variance
    std::vector<float> other = fc1;                // a neighbour of the solution, with the fc2 that is best for it
    std::mt19937 rng(3);
    const auto noise = test::random_normal(rng, other.size(), 0.02f);
    for (size_t i = 0; i < other.size(); ++i) other[i] += noise[i];
    const auto fc2 = refit_fc2(c.matrix(), other, 10, m, products_);
    if (w == even_) {
      EXPECT_GT(error_of(c, other, fc2, 10, m.mean, w), error);
    }
  }
}

TEST_F(WhitenedSvd, RefitMakesUpForARoundedFirstMatrix) {
  const Case c = make_case(kN);
  const InputMoments m = moments_of(c.x, kN, products_);
  const LowRank low = whitened_svd(c.matrix(), even_, m, 32, products_);
  std::vector<float> rounded = low.fc1;
  for (float& v : rounded) v = std::round(v * 8) / 8;
  const auto fc2 = refit_fc2(c.matrix(), rounded, 32, m, products_);
  const double before = error_of(c, rounded, low.fc2, 32, m.mean, even_);
  EXPECT_LT(error_of(c, rounded, fc2, 32, m.mean, even_), 0.9 * before);
}

// What depends linearly on x is guessed from x exactly.
TEST_F(WhitenedSvd, GuessesALinearFunction) {
  const Case c = make_case(4);
  const InputMoments m = moments_of(c.x, kN, products_);
  std::mt19937 rng(9);
  const std::vector<float> map = test::random_normal(rng, static_cast<size_t>(kN * kN), 0.1f);
  std::vector<float> x(c.x.size()), h(c.x.size());
  traits(DType::f16).to_float(c.x.data(), x.data(), static_cast<int64_t>(x.size()));
  TokenProducts({DType::f32, kN, kN, map.data()}, products_)
      .multiply({DType::f32, kT, kN, x.data()}, h.data());
  std::vector<f16_t> h16(h.size());
  traits(DType::f16).from_float(h.data(), h16.data(), static_cast<int64_t>(h.size()));
  const std::vector<float> k = linear_guess(h16, c.x, m, products_);
  double difference = 0, length = 0;
  for (size_t i = 0; i < k.size(); ++i) {
    difference += std::pow(static_cast<double>(k[i] - map[i]), 2);
    length += std::pow(static_cast<double>(map[i]), 2);
  }
  EXPECT_LT(std::sqrt(difference / length), 0.02);
}

TEST_F(WhitenedSvd, SameBitsForAnyNumberOfThreads) {
  const Case c = make_case(kN);
  const auto run = [&](int threads) {
    ThreadTeam team(threads);
    const auto device = cpu::make_device(team);
    HostProducts products(*device, team);
    return whitened_svd(c.matrix(), even_, moments_of(c.x, kN, products), 20, products);
  };
  const LowRank one = run(1), three = run(3);
  EXPECT_EQ(one.fc1, three.fc1);
  EXPECT_EQ(one.fc2, three.fc2);
}

// Widths beyond the exact solver's go through subspace iteration, which finds the same subspace.
TEST_F(WhitenedSvd, WideInputs) {
  constexpr int64_t n = 1056, n_ff = 96, T = 1200, rank = 8;
  std::mt19937 rng(2);
  const auto a = test::random_normal(rng, static_cast<size_t>(n_ff * rank)),
             b = test::random_normal(rng, static_cast<size_t>(rank * n), 0.03f);
  std::vector<float> gate(static_cast<size_t>(n_ff * n));
  for (int64_t i = 0; i < n_ff; ++i) {
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t k = 0; k < n; ++k)
        gate[static_cast<size_t>(i * n + k)] +=
            a[static_cast<size_t>(i * rank + r)] * b[static_cast<size_t>(r * n + k)];
    }
  }
  std::vector<f16_t> x(static_cast<size_t>(T * n));
  traits(DType::f16).from_float(test::random_normal(rng, x.size()).data(), x.data(), T * n);
  const InputMoments m = moments_of(x, n, products_);
  const Matrix w{DType::f32, n_ff, n, gate.data()};
  const LowRank low = whitened_svd(w, std::vector<float>(n_ff, 1.0f), m, 16, products_);
  EXPECT_LT(low.singular[rank], 2e-3f * low.singular[0]);
  // fc2 fc1 = the gate itself
  std::vector<float> product(gate.size());
  const OwnedBlock fc1 = products_.upload({DType::f32, 16, n, low.fc1.data()});
  const OwnedBlock fc2 = products_.upload({DType::f32, n_ff, 16, low.fc2.data()});
  const OwnedBlock both = products_.allocate(n_ff, n);
  products_.multiply(fc2, fc1, both);
  products_.read(both, product.data());
  double difference = 0, length = 0;
  for (size_t i = 0; i < gate.size(); ++i) {
    difference += std::pow(static_cast<double>(product[i] - gate[i]), 2);
    length += std::pow(static_cast<double>(gate[i]), 2);
  }
  EXPECT_LT(std::sqrt(difference / length), 1e-2);
}

}  // namespace
}  // namespace hearth::predictor
