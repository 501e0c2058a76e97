#pragma once
// Cholesky factors of large matrices, a block of columns at a time: blocks on the diagonal are factored and inverted on
// the host in double precision, all else is products (core/products.h) and so done where those are fast.
#include <optional>
#include <span>
#include <vector>

#include "core/products.h"

namespace hearth::predictor {

class Cholesky {
 public:
  static constexpr int64_t kBlock = 128;

  // L with L L^T = a. a [n][n], symmetric, of which the lower half is used; both halves are overwritten. Nullopt where
  // a pivot is not positive: a is not positive definite as far as f32 can tell.
  static std::optional<Cholesky> of(const Block& a, Products& products);

  int64_t n() const { return lower_->rows; }
  const Block& lower() const { return *lower_; }  // L; zero above the diagonal
  // x with x L = b, and with x L^T = b. b and x [m][n], b is overwritten; they must not overlap.
  void solve_lower(const Block& b, const Block& x) const;
  void solve_upper(const Block& b, const Block& x) const;
  // b := b a^-1, the x with x L L^T = b. `scratch`: like b.
  void solve(const Block& b, const Block& scratch) const;

 private:
  Cholesky(int64_t n, Products& products);
  bool factor_diagonal(const Block& a, int64_t first, int64_t count);
  Block inverse(int64_t first, int64_t count) const { return inverses_->part(first, 0, count, count); }

  Products* products_;
  OwnedBlock lower_;
  OwnedBlock inverses_;  // [n][kBlock] of the blocks on L's diagonal, one below the other
};

// A square block's diagonal, and more of it.
std::vector<float> diagonal_of(const Block& a, Products& products);
void add_to_diagonal(const Block& a, std::span<const float> values, Products& products);

}  // namespace hearth::predictor
