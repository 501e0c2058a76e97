// Operations on single elements and rows that no other case covers: scale, soft_cap, add_norm, fill_zero.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {
namespace {

constexpr float kGuard = 12345.0f;

// Runs op(device, rows) on the oracle and on the SIMD device of every instruction set, each with a copy of `rows` and a
// guard behind it, and compares element by element.
template <typename Op>
void expect_near_reference(const std::vector<float>& rows, const std::vector<double>& tolerance, Op op) {
  const auto run = [&](Device& device) {
    std::vector<float> x = rows;
    x.push_back(kGuard);
    device.reserve({.max_tokens = 16, .max_cols = 1024, .n_embd = 1024});
    op(device, x.data());
    EXPECT_EQ(x.back(), kGuard);
    x.pop_back();
    return x;
  };
  const auto reference = cpu::make_reference_device();
  const std::vector<float> expected = run(*reference);
  ThreadTeam team(3);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const auto device = cpu::make_device(team, isa);
    const std::vector<float> got = run(*device);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_LE(std::fabs(got[i] - expected[i]), tolerance[i])
          << device->name() << " [" << i << "]: " << got[i] << ", expected " << expected[i];
    }
  }
}

TEST(RowOps, Scale) {
  std::mt19937 rng(1);
  for (const size_t n : {1u, 7u, 64u, 1000u}) {
    const auto x = random_normal(rng, n);
    std::vector<double> tolerance;
    for (const float v : x) tolerance.push_back(kUlp * std::fabs(1.7f * v));
    expect_near_reference(x, tolerance, [&](Device& d, float* rows) { d.scale(1.7f, std::ssize(x), rows); });
  }
}

// From far below the cap, where the result is nearly its input, to far above, where it is the cap.
TEST(RowOps, SoftCap) {
  constexpr float kCap = 30;
  std::vector<float> x;
  for (float v = 1e-6f; v < 1e4f; v *= 1.01f) x.push_back(v), x.push_back(-v);
  x.insert(x.end(), {0.0f, 1e30f, -1e30f, 0.625f * kCap, INFINITY});
  std::vector<double> tolerance;
  for (const float v : x) tolerance.push_back(1e-6 * std::fabs(kCap * std::tanh(v / kCap)));
  expect_near_reference(x, tolerance, [&](Device& d, float* rows) { d.soft_cap(kCap, std::ssize(x), rows); });
}

TEST(RowOps, FillZero) {
  for (const size_t n : {1u, 1000u, 1u << 14, 16385u, 100'001u}) {
    const std::vector<float> x(n, 3.0f);
    expect_near_reference(x, std::vector<double>(n, 0.0), [&](Device& d, float* rows) {
      d.fill_zero(rows, n * sizeof(float));
      EXPECT_EQ(rows[0], 0.0f);
      EXPECT_EQ(rows[n - 1], 0.0f);
    });
  }
}

TEST(RowOps, AddNorm) {
  std::mt19937 rng(2);
  for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
    for (const int64_t n : {1, 20, 512}) {
      constexpr int64_t T = 5;
      const auto added = random_normal(rng, static_cast<size_t>(T * n), 3.0f, 1.0f);
      const auto y = random_normal(rng, static_cast<size_t>(T * n));
      const auto weight = random_normal(rng, static_cast<size_t>(n)), bias = random_normal(rng, static_cast<size_t>(n));
      const NormArgs args{kind, {weight.data(), n}, {bias.data(), n}, 1e-5f, n};
      // A normed element is at most sqrt(n) times its weight; its sums have n terms.
      std::vector<double> tolerance;
      for (size_t i = 0; i < y.size(); ++i) {
        const double most = std::sqrt(static_cast<double>(n)) * std::fabs(weight[i % weight.size()]);
        tolerance.push_back((gamma(n) + 16 * kUlp) * most * (kind == NormKind::layer ? 8 : 1) +
                            4 * kUlp * (std::fabs(y[i]) + std::fabs(bias[i % bias.size()]) + most));
      }
      expect_near_reference(y, tolerance, [&](Device& d, float* rows) {
        std::vector<float> x = added;
        d.add_norm(args, x.data(), T, rows);
      });
    }
  }
}

}  // namespace
}  // namespace hearth::test
