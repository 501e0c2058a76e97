#include "predictor/cholesky.h"

#include <Eigen/Dense>
#include <algorithm>
#include <vector>

#include "core/error.h"

namespace hearth::predictor {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Matrix host_matrix(const RowMajor& m) {
  return {DType::f32, m.rows(), m.cols(), m.data()};
}

}  // namespace

Cholesky::Cholesky(int64_t n, Products& products)
    : products_(&products), lower_(products.allocate(n, n)), inverses_(products.allocate(n, std::min(n, kBlock))) {}

bool Cholesky::factor_diagonal(const Block& a, int64_t first, int64_t count) {
  RowMajor block(count, count);
  products_->read(a, block.data());
  const Eigen::LLT<Eigen::MatrixXd> llt(block.cast<double>());
  if (llt.info() != Eigen::Success) return false;
  const Eigen::MatrixXd lower = llt.matrixL();
  const Eigen::MatrixXd inverse = lower.triangularView<Eigen::Lower>().solve(Eigen::MatrixXd::Identity(count, count));
  block = lower.cast<float>();
  products_->write(host_matrix(block), lower_->part(first, first, count, count));
  block = inverse.cast<float>();
  if (!block.allFinite()) return false;
  products_->write(host_matrix(block), this->inverse(first, count));
  return true;
}

// Left-looking: what the columns before take from a block of columns is one product.
std::optional<Cholesky> Cholesky::of(const Block& a, Products& products) {
  const int64_t n = a.rows;
  HEARTH_CHECK(a.cols == n && n > 0);
  Cholesky c(n, products);
  const Block l = c.lower();
  for (int64_t k = 0; k < n; k += kBlock) {
    const int64_t count = std::min(kBlock, n - k), below = n - k - count;
    const Block column = a.part(k, k, n - k, count);
    if (k > 0) {
      products.multiply(l.part(k, 0, n - k, k), transposed(l.part(k, 0, count, k)), column,
                        {.scale = -1.0f, .accumulate = true});
    }
    if (!c.factor_diagonal(column.row_part(0, count), k, count)) return std::nullopt;
    if (below == 0) break;
    products.multiply(column.row_part(count, below), transposed(c.inverse(k, count)),
                      l.part(k + count, k, below, count));
  }
  return c;
}

void Cholesky::solve_lower(const Block& b, const Block& x) const {
  const int64_t m = b.rows, last = (n() - 1) / kBlock * kBlock;
  HEARTH_CHECK(b.cols == n() && x.cols == n() && x.rows == m);
  for (int64_t k = last; k >= 0; k -= kBlock) {
    const int64_t count = std::min(kBlock, n() - k), after = k + count, rest = n() - after;
    const Block part = b.part(0, k, m, count);
    if (rest > 0) {
      products_->multiply(x.part(0, after, m, rest), lower().part(after, k, rest, count), part,
                          {.scale = -1.0f, .accumulate = true});
    }
    products_->multiply(part, inverse(k, count), x.part(0, k, m, count));
  }
}

void Cholesky::solve_upper(const Block& b, const Block& x) const {
  const int64_t m = b.rows;
  HEARTH_CHECK(b.cols == n() && x.cols == n() && x.rows == m);
  for (int64_t k = 0; k < n(); k += kBlock) {
    const int64_t count = std::min(kBlock, n() - k);
    const Block part = b.part(0, k, m, count);
    if (k > 0) {
      products_->multiply(x.part(0, 0, m, k), transposed(lower().part(k, 0, count, k)), part,
                          {.scale = -1.0f, .accumulate = true});
    }
    products_->multiply(part, transposed(inverse(k, count)), x.part(0, k, m, count));
  }
}

void Cholesky::solve(const Block& b, const Block& scratch) const {
  solve_upper(b, scratch);
  solve_lower(scratch, b);
}

std::vector<float> diagonal_of(const Block& a, Products& products) {
  std::vector<float> values;
  for (int64_t k = 0; k < a.rows; k += Cholesky::kBlock) {
    const int64_t count = std::min(Cholesky::kBlock, a.rows - k);
    RowMajor part(count, count);
    products.read(a.part(k, k, count, count), part.data());
    for (int64_t i = 0; i < count; ++i) values.push_back(part(i, i));
  }
  return values;
}

void add_to_diagonal(const Block& a, std::span<const float> values, Products& products) {
  HEARTH_CHECK(static_cast<int64_t>(values.size()) == a.rows);
  for (int64_t k = 0; k < a.rows; k += Cholesky::kBlock) {
    const int64_t count = std::min(Cholesky::kBlock, a.rows - k);
    const Block on_diagonal = a.part(k, k, count, count);
    RowMajor part(count, count);
    products.read(on_diagonal, part.data());
    for (int64_t i = 0; i < count; ++i) part(i, i) += values[static_cast<size_t>(k + i)];
    products.write(host_matrix(part), on_diagonal);
  }
}

}  // namespace hearth::predictor
