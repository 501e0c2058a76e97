#include "predictor/whitened_svd.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <random>

#include "core/error.h"

namespace hearth::predictor {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowMajorDouble = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr double kRidge = 1e-4;        // of the mean variance, added to every one: directions that never occurred
constexpr int64_t kExactSize = 1024;   // beyond it all eigenvectors take minutes
constexpr int kIterations = 8;         // of the subspace
constexpr int64_t kOversampling = 32;  // more vectors than are wanted

std::vector<float> mean_of(std::span<const f16_t> x, int64_t n) {
  const auto T = static_cast<int64_t>(x.size()) / n;
  std::vector<double> sum(static_cast<size_t>(n));
  std::vector<float> row(static_cast<size_t>(n)), mean;
  for (int64_t t = 0; t < T; ++t) {
    traits(DType::f16).to_float(x.data() + t * n, row.data(), n);
    for (size_t c = 0; c < row.size(); ++c) sum[c] += static_cast<double>(row[c]);
  }
  for (const double s : sum) mean.push_back(static_cast<float>(s / static_cast<double>(T)));
  return mean;
}

// Tokens [first, first + count) of x, less their mean, as columns: [n][count].
std::vector<float> centred_columns(std::span<const f16_t> x, int64_t n, int64_t first, int64_t count,
                                   const std::vector<float>& mean) {
  std::vector<float> rows(static_cast<size_t>(count * n)), columns(rows.size());
  traits(DType::f16).to_float(x.data() + first * n, rows.data(), count * n);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t c = 0; c < n; ++c) rows[static_cast<size_t>(t * n + c)] -= mean[static_cast<size_t>(c)];
  }
  transpose(rows.data(), count, n, columns.data());
  return columns;
}

// Sum over tokens of (a - mean of a) (b - mean of b)^T: [n][n].
RowMajorDouble covariance_sum(std::span<const f16_t> a, std::span<const f16_t> b, int64_t n,
                              const std::vector<float>& mean_a, const std::vector<float>& mean_b, Products& products) {
  const auto T = static_cast<int64_t>(a.size()) / n;
  RowMajorDouble sum = RowMajorDouble::Zero(n, n);
  std::vector<float> product(static_cast<size_t>(n * n));
  for (int64_t first = 0; first < T; first += kTokensAtOnce) {
    const int64_t count = std::min(kTokensAtOnce, T - first);
    const std::vector<float> columns = centred_columns(b, n, first, count, mean_b);
    const std::vector<float> rows =
        a.data() == b.data() ? std::vector<float>() : centred_columns(a, n, first, count, mean_a);
    products.multiply(columns.data(), n, rows.empty() ? columns.data() : rows.data(), n, count, product.data());
    sum += Eigen::Map<const RowMajor>(product.data(), n, n).cast<double>();
  }
  return sum;
}

// The eigenvectors of the symmetric g [n][n] with the largest eigenvalues, one a row, descending.
RowMajor leading_eigenvectors(const std::vector<float>& g, int64_t n, int64_t count, Products& products,
                              std::vector<float>& values) {
  const Eigen::Map<const RowMajor> matrix(g.data(), n, n);
  RowMajor vectors(count, n);
  values.resize(static_cast<size_t>(count));
  if (n <= kExactSize) {
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(matrix.cast<double>());
    HEARTH_CHECK(solver.info() == Eigen::Success);
    for (int64_t i = 0; i < count; ++i) {
      vectors.row(i) = solver.eigenvectors().col(n - 1 - i).transpose().cast<float>();
      values[static_cast<size_t>(i)] = static_cast<float>(solver.eigenvalues()(n - 1 - i));
    }
    return vectors;
  }
  const int64_t block = std::min(n, count + kOversampling);
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  RowMajor q(block, n), y(block, n);
  for (int64_t i = 0; i < q.size(); ++i) q.data()[i] = normal(rng);
  for (int i = 0; i < kIterations; ++i) {
    products.multiply(g.data(), n, q.data(), block, n, y.data());
    const Eigen::HouseholderQR<Eigen::MatrixXf> qr(y.transpose());
    q = (qr.householderQ() * Eigen::MatrixXf::Identity(n, block)).transpose();
  }
  products.multiply(g.data(), n, q.data(), block, n, y.data());
  const Eigen::MatrixXd small = (q * y.transpose()).cast<double>();
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(small);
  HEARTH_CHECK(solver.info() == Eigen::Success);
  const Eigen::MatrixXf top = solver.eigenvectors().rightCols(count).rowwise().reverse().cast<float>();
  vectors.noalias() = top.transpose() * q;
  for (int64_t i = 0; i < count; ++i)
    values[static_cast<size_t>(i)] = static_cast<float>(solver.eigenvalues()(block - 1 - i));
  return vectors;
}

}  // namespace

InputMoments moments_of(std::span<const f16_t> x, int64_t n, Products& products) {
  const auto T = static_cast<int64_t>(x.size()) / n;
  HEARTH_CHECK(T > 1);
  InputMoments m;
  m.n = n;
  m.mean = mean_of(x, n);
  RowMajorDouble covariance = covariance_sum(x, x, n, m.mean, m.mean, products) / static_cast<double>(T);
  m.covariance.resize(static_cast<size_t>(n * n));
  Eigen::Map<RowMajor>(m.covariance.data(), n, n) = covariance.cast<float>();
  const double ridge = kRidge * std::max(covariance.trace() / static_cast<double>(n), 1e-20);
  covariance.diagonal().array() += ridge;
  const Eigen::LLT<RowMajorDouble> llt(covariance);
  HEARTH_CHECK(llt.info() == Eigen::Success, "a covariance is not positive definite");
  const RowMajorDouble factor = llt.matrixL();
  m.factor.resize(static_cast<size_t>(n * n));
  Eigen::Map<RowMajor>(m.factor.data(), n, n) = factor.cast<float>();
  return m;
}

std::vector<float> linear_guess(std::span<const f16_t> h, std::span<const f16_t> x, const InputMoments& inputs,
                                Products& products) {
  const int64_t n = inputs.n;
  const auto T = static_cast<double>(h.size()) / static_cast<double>(n);
  const Eigen::MatrixXd cross = covariance_sum(h, x, n, mean_of(h, n), inputs.mean, products) / T;
  const Eigen::MatrixXd factor = Eigen::Map<const RowMajor>(inputs.factor.data(), n, n).cast<double>();
  Eigen::MatrixXd guess_t = cross.transpose();  // K^T = C^-1 cross^T
  factor.triangularView<Eigen::Lower>().solveInPlace(guess_t);
  factor.transpose().triangularView<Eigen::Upper>().solveInPlace(guess_t);
  std::vector<float> k(static_cast<size_t>(n * n));
  Eigen::Map<RowMajor>(k.data(), n, n) = guess_t.transpose().cast<float>();
  return k;
}

std::vector<float> deviations(const Matrix& gate, const InputMoments& inputs, Products& products) {
  const int64_t n = inputs.n;
  const std::vector<float> w = dequantized(gate, 0, gate.rows);
  std::vector<float> lt(static_cast<size_t>(n * n)), wl(w.size()), result;
  transpose(inputs.factor.data(), n, n, lt.data());
  products.multiply(lt.data(), n, w.data(), gate.rows, n, wl.data());
  for (int64_t i = 0; i < gate.rows; ++i) {
    double sum = 0;
    for (int64_t c = 0; c < n; ++c) sum += std::pow(static_cast<double>(wl[static_cast<size_t>(i * n + c)]), 2);
    result.push_back(static_cast<float>(std::sqrt(std::max(sum, 1e-30))));
  }
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
  const std::vector<float> w = dequantized(gate, 0, n_ff);
  std::vector<float> lt(static_cast<size_t>(n * n));  // L^T, so that rows are columns of L
  transpose(inputs.factor.data(), n, n, lt.data());
  std::vector<float> wl(static_cast<size_t>(n_ff * n));  // W L [n_ff][n]
  products.multiply(lt.data(), n, w.data(), n_ff, n, wl.data());
  std::vector<float> g(static_cast<size_t>(n * n));  // (D W L)^T (D W L)
  {
    std::vector<float> weighted = wl, by_column(wl.size());
    for (int64_t i = 0; i < n_ff; ++i) {
      for (int64_t c = 0; c < n; ++c) weighted[static_cast<size_t>(i * n + c)] *= weights[static_cast<size_t>(i)];
    }
    transpose(weighted.data(), n_ff, n, by_column.data());
    products.multiply(by_column.data(), n, by_column.data(), n, n_ff, g.data());
  }
  LowRank low;
  low.rank = max_rank, low.n_embd = n, low.n_ff = n_ff;
  const RowMajor v = leading_eigenvectors(g, n, max_rank, products, low.singular);  // [rank][n]
  for (float& s : low.singular) s = std::sqrt(std::max(s, 0.0f));
  // fc2 = W L V, fc1 = V^T L^-1: solve fc1 L = V^T.
  low.fc2.resize(static_cast<size_t>(n_ff * max_rank));
  products.multiply(v.data(), max_rank, wl.data(), n_ff, n, low.fc2.data());
  const Eigen::Map<const RowMajor> factor(inputs.factor.data(), n, n);
  const RowMajor fc1 = factor.triangularView<Eigen::Lower>().solve<Eigen::OnTheRight>(v);
  low.fc1.assign(fc1.data(), fc1.data() + fc1.size());
  return low;
}

// W C fc1^T (fc1 C fc1^T)^-1.
std::vector<float> refit_fc2(const Matrix& gate, std::span<const float> fc1, int64_t rank, const InputMoments& inputs,
                             Products& products) {
  const int64_t n = inputs.n, n_ff = gate.rows;
  std::vector<float> fc1_c(static_cast<size_t>(rank * n)), inner(static_cast<size_t>(rank * rank));
  products.multiply(inputs.covariance.data(), n, fc1.data(), rank, n, fc1_c.data());  // symmetric
  products.multiply(fc1.data(), rank, fc1_c.data(), rank, n, inner.data());
  Eigen::MatrixXd a = Eigen::Map<const RowMajor>(inner.data(), rank, rank).cast<double>();
  a = (a + a.transpose().eval()) / 2;
  a.diagonal().array() += 1e-6 * std::max(a.trace() / static_cast<double>(rank), 1e-20);
  const std::vector<float> w = dequantized(gate, 0, n_ff);
  std::vector<float> wc(static_cast<size_t>(n_ff * rank));  // W C fc1^T [n_ff][rank]
  products.multiply(fc1_c.data(), rank, w.data(), n_ff, n, wc.data());
  const Eigen::MatrixXf inverse = a.ldlt().solve(Eigen::MatrixXd::Identity(rank, rank)).cast<float>();
  std::vector<float> fc2(wc.size());
  products.multiply(inverse.data(), rank, wc.data(), n_ff, rank, fc2.data());  // symmetric
  return fc2;
}

}  // namespace hearth::predictor
