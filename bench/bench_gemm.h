#pragma once
// What others make of y[t][r] = sum_c w[r][c] x[t][c] in f32, for comparison.
#include <cstdint>

namespace hearth::bench {
void gemm_eigen(int64_t T, int64_t rows, int64_t cols, const float* x, const float* w, float* y);  // one thread
void gemm_openblas(int threads, int64_t T, int64_t rows, int64_t cols, const float* x, const float* w, float* y);
}  // namespace hearth::bench
