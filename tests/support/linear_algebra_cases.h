#pragma once
// What is built on Products, on any kind of them.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "predictor/cholesky.h"
#include "predictor/products.h"
#include "predictor/whitened_svd.h"
#include "support/products_cases.h"

namespace hearth::test {

// ||a b - c|| / ||c||, c [rows][cols] on the host.
inline double residual(Products& products, const Operand& a, const Operand& b, const std::vector<float>& c) {
  const OwnedBlock product = products.allocate(a.rows(), b.cols());
  products.multiply(a, b, product);
  const std::vector<float> got = read(products, product);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < c.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(c[i]), 2);
    norm += std::pow(static_cast<double>(c[i]), 2);
  }
  return std::sqrt(difference / norm);
}

// Sizes within a block, of whole blocks, and neither.
inline void check_cholesky(Products& products) {
  for (const int64_t n : {1, 5, 128, 300}) {
    SCOPED_TRACE(n);
    std::mt19937 rng(4);
    const HostMatrix x(rng, DType::f32, 2 * n + 3, n), b(rng, DType::f32, 70, n);
    const OwnedBlock rows = products.upload(x.matrix), a = products.allocate(n, n), work = products.allocate(n, n);
    products.multiply(transposed(rows), rows, a);
    products.copy(a, work);
    const auto factor = predictor::Cholesky::of(work, products);
    ASSERT_TRUE(factor);
    const std::vector<float> lower = read(products, factor->lower()), values = read(products, a);
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = r + 1; c < n; ++c) ASSERT_EQ(lower[static_cast<size_t>(r * n + c)], 0.0f);
    }
    EXPECT_LT(residual(products, factor->lower(), transposed(factor->lower()), values), 1e-6);
    const OwnedBlock right = products.upload(b.matrix), solution = products.allocate(70, n);
    factor->solve_lower(right, solution);
    EXPECT_LT(residual(products, solution, factor->lower(), b.values), 1e-5);
    products.write(b.matrix, right);
    factor->solve_upper(right, solution);
    EXPECT_LT(residual(products, solution, transposed(factor->lower()), b.values), 1e-5);
    products.write(b.matrix, right);
    factor->solve(right, solution);
    EXPECT_LT(residual(products, right, a, b.values), 1e-4);
  }
}

inline void check_cholesky_refusal(Products& products) {
  constexpr int64_t n = 200;
  std::vector<float> values(n * n);
  for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i * n + i)] = i == 170 ? -1.0f : 2.0f;
  const Matrix m{DType::f32, n, n, values.data()};
  EXPECT_FALSE(predictor::Cholesky::of(products.upload(m), products));
  values[170 * n + 170] = std::nanf("");
  EXPECT_FALSE(predictor::Cholesky::of(products.upload(m), products));
  const OwnedBlock a = products.upload(m);
  predictor::add_to_diagonal(a, std::vector<float>(n, 1.0f), products);
  const std::vector<float> diagonal = predictor::diagonal_of(a, products);
  EXPECT_EQ(diagonal[3], 3.0f);
  EXPECT_EQ(diagonal[199], 3.0f);
}

// Tokens that stay and tokens that visit give the same.
inline void check_token_products(Products& products) {
  std::mt19937 rng(6);
  const HostMatrix x(rng, DType::f16, 700, 96), w(rng, DType::q8_0, 45, 96);
  const size_t before = products.bytes();
  std::vector<float> all(45 * 700), some(45 * 700);
  predictor::TokenProducts resident(x.matrix, products, predictor::TokenProducts::kResidentBytes, 300);
  EXPECT_GT(products.bytes(), before);
  resident.multiply(w.matrix, all.data());
  const size_t with_one = products.bytes();
  predictor::TokenProducts visiting(x.matrix, products, 0, 128);
  EXPECT_EQ(products.bytes(), with_one);
  visiting.multiply(w.matrix, some.data());
  for (size_t r = 0; r < 45; ++r) {
    for (size_t t = 0; t < 700; ++t) {
      double sum = 0;
      for (size_t c = 0; c < 96; ++c) sum += static_cast<double>(w.values[r * 96 + c]) * x.values[t * 96 + c];
      ASSERT_NEAR(static_cast<double>(all[r * 700 + t]), sum, 1e-4);
      ASSERT_NEAR(static_cast<double>(some[r * 700 + t]), sum, 1e-4);
    }
  }
}

// A gate of rank 24 and 1,100 columns, more than are decomposed exactly, on inputs some of whose directions are a
// hundred times as strong as others; fewer tokens than directions. The product of the fitted pair is the gate, on such
// inputs: error relative to the gate's own values.
inline void check_wide_svd(Products& products) {
  constexpr int64_t n = 1100, n_ff = 160, T = 900, true_rank = 24, rank = 40;
  std::mt19937 rng(12);
  const HostMatrix a(rng, DType::f32, n_ff, true_rank), b(rng, DType::f32, true_rank, n);
  const OwnedBlock gate_block = products.allocate(n_ff, n);
  products.multiply(products.upload(a.matrix), products.upload(b.matrix), gate_block);
  const std::vector<float> gate = read(products, gate_block);
  const auto inputs = [&] {
    std::vector<float> x = random_normal(rng, static_cast<size_t>(T * n));
    for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * (i % 37 == 0 ? 10.0f : 0.1f) + 0.3f;
    std::vector<f16_t> half(x.size());
    traits(DType::f16).from_float(x.data(), half.data(), T * n);
    return half;
  };
  const std::vector<f16_t> x = inputs(), fresh = inputs();
  const Matrix w{DType::f32, n_ff, n, gate.data()};
  const predictor::InputMoments m = predictor::moments_of(x, n, products);
  std::vector<float> weights(n_ff, 1.0f);
  for (size_t i = 0; i < 30; ++i) weights[i] = 4.0f;
  const predictor::LowRank low = predictor::whitened_svd(w, weights, m, rank, products);
  EXPECT_LT(low.singular[true_rank], 2e-3f * low.singular[0]);
  const OwnedBlock fc1 = products.upload({DType::f32, rank, n, low.fc1.data()});
  const OwnedBlock fc2 = products.upload({DType::f32, n_ff, rank, low.fc2.data()});
  // gate - fc2 fc1, applied to inputs that were not fitted on
  products.multiply(fc2, fc1, gate_block, {.scale = -1.0f, .accumulate = true});
  const std::vector<float> error = read(products, gate_block);
  std::vector<float> wrong(n_ff * T), right(n_ff * T);
  const predictor::TokenProducts tokens({DType::f16, T, n, fresh.data()}, products);
  tokens.multiply({DType::f32, n_ff, n, error.data()}, wrong.data());
  tokens.multiply(w, right.data());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < wrong.size(); ++i) {
    difference += std::pow(static_cast<double>(wrong[i]), 2), norm += std::pow(static_cast<double>(right[i]), 2);
  }
  EXPECT_LT(std::sqrt(difference / norm), 1e-2);
}

}  // namespace hearth::test
