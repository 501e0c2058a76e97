#pragma once
// Products of many tokens on tensor cores, through cuBLAS.
#include "cuda/kernels.cuh"

namespace hearth::cuda {

// Y[t][r] (+)= sum_c W[r][c] X[t][c] + bias[r]. Inputs are rounded to f16 (bf16 for bf16 weights), sums are f32; f32
// weights stay f32 throughout. Quantised weights are turned into f16 a slab at a time.
class Gemm {
 public:
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what cuBLAS advises for compute capability 9.0
  static constexpr size_t kSlabBytes = size_t{32} << 20;       // fits the second-level cache of large GPUs

  explicit Gemm(const Gpu& gpu);
  // Scratch that the caller owns: workspace and slab of the sizes above (the slab only when weights are quantised), and
  // `input`: 2 bytes for every element of the largest input.
  void set_scratch(void* workspace, void* input, void* slab);

  // Converts x [T][cols] for products with weights of the given types; then call multiply() for each.
  void multiply(std::span<const MatmulPart> parts, const float* x, int64_t T);
  // y[t] += bias + sum_k value[t][k] down_t[k]
  void multiply_transposed(const Matrix& down_t, const float* value, int64_t T, Vector bias, float* y);

 private:
  // The type that cuBLAS gets for weights of a type: itself, or f16 for quantised ones.
  static DType operand_type(DType weights) { return is_quantized(weights) ? DType::f16 : weights; }
  const void* input_as(DType type, const float* x, int64_t n);
  // y [T][ld_y] = beta y + x [T][k] . w, where w is [rows][k], or [k][rows] when transposed.
  void product(DType type, bool transposed, const void* w, int64_t rows, int64_t k, const void* x, int64_t ld_x,
               int64_t T, float beta, float* y, int64_t ld_y);
  void multiply_part(const MatmulPart& part, const void* x, int64_t T);

  Gpu gpu_;
  Cublas cublas_;
  void* input_ = nullptr;
  void* slab_ = nullptr;
};

}  // namespace hearth::cuda
