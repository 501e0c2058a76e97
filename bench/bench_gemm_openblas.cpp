#include <cblas.h>

#include "bench_gemm.h"

extern "C" void openblas_set_num_threads(int);

namespace hearth::bench {

void gemm_openblas(int threads, int64_t T, int64_t rows, int64_t cols, const float* x, const float* w, float* y) {
  openblas_set_num_threads(threads);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(T), static_cast<int>(rows),
              static_cast<int>(cols), 1.0f, x, static_cast<int>(cols), w, static_cast<int>(cols), 0.0f, y,
              static_cast<int>(rows));
}

}  // namespace hearth::bench
