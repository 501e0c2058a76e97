#pragma once
// The best low-rank form of a gate for the inputs that occur (as SVD-LLM does for whole models, arXiv 2403.07378): with
// C = L L^T the covariance of the input and D the neurons' weights, the rank-r B minimising sum over inputs of
// |D (W - B) (x - mean)|^2 is D^-1 U_r S_r V_r^T L^-1 of D W L = U S V^T. No training.
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "predictor/cholesky.h"

namespace hearth::predictor {

// Mean and covariance of inputs of n elements, and the factor L of the covariance with a small ridge. Must not outlive
// the products that it was made by.
struct InputMoments {
  int64_t n = 0;
  std::vector<float> mean, variance;  // [n]
  OwnedBlock covariance;              // [n][n], without the ridge
  std::optional<Cholesky> factor;
};
// x [T][n], T at least 2.
InputMoments moments_of(std::span<const f16_t> x, int64_t n, Products& products);

// K [n][n] of the best linear guess h = K x + c of one input from another: h [T][n], x [T][n] with moments `inputs`.
std::vector<float> linear_guess(std::span<const f16_t> h, std::span<const f16_t> x, const InputMoments& inputs,
                                Products& products);

// Standard deviation of each row's product with the input: [gate.rows].
std::vector<float> deviations(const Matrix& gate, const InputMoments& inputs, Products& products);

// All ranks up to a largest one at once: the first r rows of fc1 and columns of fc2 are the solution of rank r.
struct LowRank {
  int64_t rank = 0, n_embd = 0, n_ff = 0;
  std::vector<float> fc1;       // [rank][n_embd]: rows give uncorrelated values of variance 1 on these inputs
  std::vector<float> fc2;       // [n_ff][rank]
  std::vector<float> singular;  // [rank], of D W L, descending
  std::vector<float> fc2_of(int64_t r) const;  // [n_ff][r]
};
// gate [n_ff][n]; weights [n_ff], positive. Exact eigenvectors for n up to 1024; above, block subspace iteration with a
// fixed seed.
LowRank whitened_svd(const Matrix& gate, std::span<const float> weights, const InputMoments& inputs, int64_t max_rank,
                     Products& products);

// The fc2 [gate.rows][rank] that is best for a given fc1 [rank][n], by least squares over the same inputs: after fc1
// was rounded to a type of few bits, it makes up for part of the error.
std::vector<float> refit_fc2(const Matrix& gate, std::span<const float> fc1, int64_t rank, const InputMoments& inputs,
                             Products& products);

}  // namespace hearth::predictor
