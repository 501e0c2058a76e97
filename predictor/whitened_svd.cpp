#include "predictor/whitened_svd.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <random>

#include "core/error.h"
#include "predictor/products.h"

namespace hearth::predictor {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr float kRidge = 1e-4f;        // of the mean variance, added to every one: directions that never occurred
constexpr float kOwnRidge = 1e-5f;     // of a variance, added to it: f32 cannot tell less from nothing
constexpr int64_t kExactSize = 1024;   // beyond it all eigenvectors take too long
constexpr int kIterations = 8;         // of the subspace
constexpr int64_t kOversampling = 32;  // more vectors than are wanted

Matrix as_matrix(const RowMajor& m) {
  return {DType::f32, m.rows(), m.cols(), m.data()};
}
Matrix as_matrix(std::span<const f16_t> x, int64_t n) {
  return {DType::f16, static_cast<int64_t>(x.size()) / n, n, x.data()};
}

// Walks the rows of a host matrix, a tile at a time in the memory of the products.
template <typename F>
void for_tiles(const Matrix& m, Products& products, F&& visit) {
  const int64_t at_once = std::min(m.rows, tile_rows(m.cols));
  const OwnedBlock tile = products.allocate(at_once, m.cols);
  for (int64_t first = 0; first < m.rows; first += at_once) {
    const Block part = tile->row_part(0, std::min(at_once, m.rows - first));
    products.write(m.slice_rows(first, part.rows), part);
    visit(part, first);
  }
}

OwnedBlock ones(int64_t n, Products& products) {
  const std::vector<float> values(static_cast<size_t>(n), 1.0f);
  return products.upload({DType::f32, 1, n, values.data()});
}

OwnedBlock mean_of(const Matrix& x, Products& products) {
  OwnedBlock mean = products.allocate(1, x.cols);
  const OwnedBlock one = ones(std::min(x.rows, tile_rows(x.cols)), products);
  for_tiles(x, products, [&](const Block& tile, int64_t) {
    products.multiply(one->part(0, 0, 1, tile.rows), tile, mean,
                      {.scale = 1.0f / static_cast<float>(x.rows), .accumulate = true});
  });
  return mean;
}

// Mean over tokens of (a - mean of a) (b - mean of b)^T: [n][n].
OwnedBlock covariance_of(const Matrix& a, const Block& mean_a, const Matrix& b, const Block& mean_b,
                         Products& products) {
  OwnedBlock sum = products.allocate(a.cols, b.cols);
  const OwnedBlock one = ones(std::min(a.rows, tile_rows(a.cols)), products);
  const ProductForm less{.scale = -1.0f, .accumulate = true};
  const ProductForm add{.scale = 1.0f / static_cast<float>(a.rows), .accumulate = true};
  const OwnedBlock other = a.data == b.data ? OwnedBlock() : products.allocate(one->cols, b.cols);
  for_tiles(a, products, [&](const Block& tile, int64_t first) {
    const Operand column = transposed(one->part(0, 0, 1, tile.rows));
    products.multiply(column, mean_a, tile, less);
    if (a.data == b.data) return products.multiply(transposed(tile), tile, sum, add);
    const Block part = other->row_part(0, tile.rows);
    products.write(b.slice_rows(first, tile.rows), part);
    products.multiply(column, mean_b, part, less);
    products.multiply(transposed(tile), part, sum, add);
  });
  return sum;
}

// The factor of a + diag(ridge), with a ridge as many times ten as large as it takes.
Cholesky factor_with(const Block& a, std::vector<float> ridge, Products& products) {
  const OwnedBlock work = products.allocate(a.rows, a.cols);
  for (int attempt = 0; attempt < 6; ++attempt) {
    products.copy(a, work);
    add_to_diagonal(work, ridge, products);
    if (auto factor = Cholesky::of(work, products)) return std::move(*factor);
    for (float& r : ridge) r *= 10;
  }
  fail("the activations that a predictor is to be fitted on are not finite or all zero; check the model's output");
}

// Columns of q [n][k] -> an orthonormal basis of what they span, by Cholesky factors of their inner products, with a
// shift where these are far from the unit matrix (Fukaya et al., shifted CholeskyQR3, SIAM J. Sci. Comput. 42(1),
// 2020). `other` [n][k] is overwritten.
void orthonormalize(OwnedBlock& q, OwnedBlock& other, int passes, Products& products) {
  constexpr float kShift = 2e-6f;  // of the norm: some 30 units of rounding
  const int64_t k = q->cols;
  const OwnedBlock inner = products.allocate(k, k);
  RowMajor host(k, k);
  for (int pass = 0; pass < passes; ++pass) {
    products.multiply(transposed(q), q, inner);
    products.read(inner, host.data());
    const float norm = host.norm();
    host.diagonal().array() -= 1.0f;
    const bool nearly_done = host.cwiseAbs().rowwise().sum().maxCoeff() < 0.5f;  // then no eigenvalue is below 0.5
    const std::vector<float> shift(static_cast<size_t>(k), nearly_done ? 0.0f : std::max(kShift * norm, 1e-30f));
    factor_with(inner, shift, products).solve_upper(q, other);
    std::swap(q, other);
  }
}

// The largest `count` eigenvalues of a symmetric host matrix, descending, and their vectors as rows.
struct HostEigen {
  std::vector<float> values;
  RowMajor vectors;
};
HostEigen host_eigenvectors(const RowMajor& m, int64_t count) {
  const Eigen::MatrixXd symmetric = (m + m.transpose()).cast<double>() / 2;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(symmetric);
  HEARTH_CHECK(solver.info() == Eigen::Success);
  HostEigen e;
  e.vectors = solver.eigenvectors().rightCols(count).rowwise().reverse().transpose().cast<float>();
  for (int64_t i = 0; i < count; ++i) e.values.push_back(static_cast<float>(solver.eigenvalues()(m.rows() - 1 - i)));
  return e;
}

// The eigenvectors of the symmetric g [n][n] with the largest eigenvalues, descending: [count][n].
OwnedBlock leading_eigenvectors(const Block& g, int64_t count, Products& products, std::vector<float>& values) {
  const int64_t n = g.rows;
  if (n <= kExactSize) {
    RowMajor matrix(n, n);
    products.read(g, matrix.data());
    HostEigen e = host_eigenvectors(matrix, count);
    values = std::move(e.values);
    return products.upload(as_matrix(e.vectors));
  }
  const int64_t k = std::min(n, count + kOversampling);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  RowMajor random(n, k);
  for (int64_t i = 0; i < random.size(); ++i) random.data()[i] = normal(rng);
  OwnedBlock q = products.upload(as_matrix(random)), y = products.allocate(n, k);
  for (int i = 0; i < kIterations; ++i) {
    products.multiply(transposed(g), q, y);  // g is symmetric
    std::swap(q, y);
    orthonormalize(q, y, i + 1 < kIterations ? 2 : 4, products);
  }
  products.multiply(transposed(g), q, y);
  const OwnedBlock small = products.allocate(k, k);  // what g is within the subspace
  products.multiply(transposed(q), y, small);
  RowMajor host(k, k);
  products.read(small, host.data());
  HostEigen e = host_eigenvectors(host, count);
  values = std::move(e.values);
  const OwnedBlock top = products.upload(as_matrix(e.vectors));
  OwnedBlock vectors = products.allocate(count, n);
  products.multiply(top, transposed(q), vectors);
  return vectors;
}

// (D W L)^T (D W L)
OwnedBlock weighted_square(const Matrix& gate, std::span<const float> weights, const InputMoments& inputs,
                           Products& products) {
  const int64_t n = inputs.n, at_once = std::min(gate.rows, tile_rows(n));
  OwnedBlock square = products.allocate(n, n);
  const OwnedBlock rows = products.allocate(at_once, n), whitened = products.allocate(at_once, n);
  for (int64_t first = 0; first < gate.rows; first += at_once) {
    const int64_t count = std::min(at_once, gate.rows - first);
    std::vector<float> values = dequantized(gate, first, count);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < n; ++c) values[static_cast<size_t>(i * n + c)] *= weights[static_cast<size_t>(first + i)];
    }
    const Block dw = rows->row_part(0, count), dwl = whitened->row_part(0, count);
    products.write({DType::f32, count, n, values.data()}, dw);
    products.multiply(dw, inputs.factor->lower(), dwl);
    products.multiply(transposed(dwl), dwl, square, {.accumulate = true});
  }
  return square;
}

}  // namespace

InputMoments moments_of(std::span<const f16_t> x, int64_t n, Products& products) {
  const Matrix samples = as_matrix(x, n);
  HEARTH_CHECK(samples.rows > 1);
  InputMoments m;
  m.n = n;
  const OwnedBlock mean = mean_of(samples, products);
  m.mean.resize(static_cast<size_t>(n));
  products.read(mean, m.mean.data());
  m.covariance = covariance_of(samples, mean, samples, mean, products);
  m.variance = diagonal_of(m.covariance, products);
  double trace = 0;
  for (const float v : m.variance) trace += static_cast<double>(v);
  const auto average = static_cast<float>(std::max(trace / static_cast<double>(n), 1e-20));
  std::vector<float> ridge;
  for (const float v : m.variance) ridge.push_back(kRidge * average + kOwnRidge * v);
  m.factor = factor_with(m.covariance, std::move(ridge), products);
  return m;
}

std::vector<float> linear_guess(std::span<const f16_t> h, std::span<const f16_t> x, const InputMoments& inputs,
                                Products& products) {
  const int64_t n = inputs.n;
  const Matrix from = as_matrix(x, n), to = as_matrix(h, n);
  const OwnedBlock k = covariance_of(to, mean_of(to, products), from, mean_of(from, products), products);
  inputs.factor->solve(k, products.allocate(n, n));  // K = cross covariance times C^-1
  std::vector<float> guess(static_cast<size_t>(n * n));
  products.read(k, guess.data());
  return guess;
}

std::vector<float> deviations(const Matrix& gate, const InputMoments& inputs, Products& products) {
  const int64_t n = inputs.n;
  const OwnedBlock whitened = products.allocate(std::min(gate.rows, tile_rows(n)), n);
  std::vector<float> host(static_cast<size_t>(whitened->rows * n)), result;
  for_tiles(gate, products, [&](const Block& tile, int64_t) {
    const Block wl = whitened->row_part(0, tile.rows);
    products.multiply(tile, inputs.factor->lower(), wl);
    products.read(wl, host.data());
    for (int64_t i = 0; i < tile.rows; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < n; ++c) sum += std::pow(static_cast<double>(host[static_cast<size_t>(i * n + c)]), 2);
      result.push_back(static_cast<float>(std::sqrt(std::max(sum, 1e-30))));
    }
  });
  return result;
}

std::vector<float> LowRank::fc2_of(int64_t r) const {
  std::vector<float> out(static_cast<size_t>(n_ff * r));
  for (int64_t i = 0; i < n_ff; ++i) std::copy_n(fc2.data() + i * rank, r, out.data() + i * r);
  return out;
}

LowRank whitened_svd(const Matrix& gate, std::span<const float> weights, const InputMoments& inputs, int64_t max_rank,
                     Products& products) {
  const int64_t n = inputs.n, n_ff = gate.rows;
  HEARTH_CHECK(gate.cols == n && static_cast<int64_t>(weights.size()) == n_ff && max_rank <= n);
  LowRank low;
  low.rank = max_rank, low.n_embd = n, low.n_ff = n_ff;
  low.fc1.resize(static_cast<size_t>(max_rank * n)), low.fc2.resize(static_cast<size_t>(n_ff * max_rank));
  OwnedBlock v = leading_eigenvectors(weighted_square(gate, weights, inputs, products), max_rank, products,
                                      low.singular);  // [rank][n]
  for (float& s : low.singular) s = std::sqrt(std::max(s, 0.0f));
  // fc2 = W (L V), a tile of rows at a time
  const OwnedBlock lv = products.allocate(n, max_rank);
  products.multiply(inputs.factor->lower(), transposed(v), lv);
  const OwnedBlock fc2 = products.allocate(std::min(n_ff, tile_rows(n)), max_rank);
  for_tiles(gate, products, [&](const Block& tile, int64_t first) {
    const Block part = fc2->row_part(0, tile.rows);
    products.multiply(tile, lv, part);
    products.read(part, low.fc2.data() + first * max_rank);
  });
  const OwnedBlock fc1 = products.allocate(max_rank, n);  // V^T L^-1
  inputs.factor->solve_lower(v, fc1);
  products.read(fc1, low.fc1.data());
  return low;
}

// W C fc1^T (fc1 C fc1^T)^-1.
std::vector<float> refit_fc2(const Matrix& gate, std::span<const float> fc1, int64_t rank, const InputMoments& inputs,
                             Products& products) {
  const int64_t n = inputs.n, at_once = std::min(gate.rows, tile_rows(n));
  const OwnedBlock rows = products.upload({DType::f32, rank, n, fc1.data()});
  const OwnedBlock fc1_c = products.allocate(rank, n), inner = products.allocate(rank, rank);
  products.multiply(rows, transposed(inputs.covariance), fc1_c);  // C is symmetric
  products.multiply(fc1_c, transposed(rows), inner);
  double trace = 0;
  for (const float v : diagonal_of(inner, products)) trace += static_cast<double>(v);
  const auto ridge = static_cast<float>(1e-6 * std::max(trace / static_cast<double>(rank), 1e-20));
  const Cholesky factor = factor_with(inner, std::vector<float>(static_cast<size_t>(rank), ridge), products);
  const OwnedBlock wc = products.allocate(at_once, rank), scratch = products.allocate(at_once, rank);
  std::vector<float> fc2(static_cast<size_t>(gate.rows * rank));
  for_tiles(gate, products, [&](const Block& tile, int64_t first) {
    const Block part = wc->row_part(0, tile.rows);
    products.multiply(tile, transposed(fc1_c), part);
    factor.solve(part, scratch->row_part(0, tile.rows));
    products.read(part, fc2.data() + first * rank);
  });
  return fc2;
}

}  // namespace hearth::predictor
