#include <Eigen/Core>

#include "bench_gemm.h"

namespace hearth::bench {

void gemm_eigen(int64_t T, int64_t rows, int64_t cols, const float* x, const float* w, float* y) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Eigen::Map<RowMajor>(y, T, rows).noalias() =
      Eigen::Map<const RowMajor>(x, T, cols) * Eigen::Map<const RowMajor>(w, rows, cols).transpose();
}

}  // namespace hearth::bench
