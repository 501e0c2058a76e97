#include "cuda/gemm.cuh"

namespace hearth::cuda {
namespace {

cudaDataType_t data_type(DType type) {
  switch (type) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::f16:
      return CUDA_R_16F;
    case DType::bf16:
      return CUDA_R_16BF;
    default:
      break;
  }
  HEARTH_CHECK(false, "no cuBLAS type for {}", traits(type).name);
  return CUDA_R_32F;
}

}  // namespace

Gemm::Gemm(const Gpu& gpu) : gpu_(gpu), cublas_(make_cublas(gpu.stream)) {}

void Gemm::set_scratch(void* workspace, void* input, void* slab) {
  // A workspace of our own: accounted, fixed inside graphs, and the same choice of algorithms run after run.
  CUDA_CHECK(cublas().set_workspace(cublas_, workspace, kWorkspaceBytes));
  input_ = input, slab_ = slab;
}

const void* Gemm::input_as(DType type, const float* x, int64_t n) {
  if (type == DType::f32) return x;
  convert_rows(gpu_, x, n, type, input_);
  return input_;
}

void Gemm::product(DType type, bool transposed, const void* w, int64_t rows, int64_t k, const void* x, int64_t ld_x,
                   int64_t T, float beta, float* y, int64_t ld_y) {
  // cuBLAS is column-major: our row-major y is its [rows x T], our w its [k x rows] (or [rows x k] when transposed).
  const float alpha = 1.0f;
  const cudaDataType_t t = data_type(type);
  const auto n = [](int64_t v) { return static_cast<int>(v); };
  CUDA_CHECK(cublas().gemm_ex(cublas_, transposed ? CUBLAS_OP_N : CUBLAS_OP_T, CUBLAS_OP_N, n(rows), n(T), n(k), &alpha,
                              w, t, n(transposed ? rows : k), x, t, n(ld_x), &beta, y, CUDA_R_32F, n(ld_y),
                              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

void Gemm::multiply_part(const MatmulPart& p, const void* x, int64_t T) {
  const DType type = operand_type(p.w.type);
  const int64_t stride = y_stride(p);
  const float beta = p.accumulate ? 1.0f : 0.0f;
  if (!is_quantized(p.w.type)) {
    product(type, false, p.w.data, p.w.rows, p.w.cols, x, p.w.cols, T, beta, p.y, stride);
  } else {
    const int64_t slab = slab_rows(p.w.cols, kSlabBytes);
    for (int64_t first = 0; first < p.w.rows; first += slab) {
      const int64_t rows = std::min(slab, p.w.rows - first);
      dequantize(gpu_, p.w, first, rows, static_cast<f16_t*>(slab_));
      product(type, false, slab_, rows, p.w.cols, x, p.w.cols, T, beta, p.y + first, stride);
    }
  }
  if (p.bias) add_bias(gpu_, p.bias, T, p.y, stride);
}

void Gemm::multiply(std::span<const MatmulPart> parts, const float* x, int64_t T) {
  const void* input = nullptr;
  DType converted = DType::i8;  // none yet
  for (const MatmulPart& p : parts) {
    const DType type = operand_type(p.w.type);
    if (type != converted) input = input_as(type, x, T * p.w.cols);
    converted = type;
    multiply_part(p, input, T);
  }
}

void Gemm::multiply_transposed(const Matrix& w, const float* value, int64_t T, Vector bias, float* y) {
  const DType type = operand_type(w.type);
  const int64_t n_embd = w.cols, n = w.rows;
  const void* x = input_as(type, value, T * n);
  if (!is_quantized(w.type)) {
    product(type, true, w.data, n_embd, n, x, n, T, 1.0f, y, n_embd);
  } else {
    const int64_t slab = slab_rows(n_embd, kSlabBytes);
    for (int64_t first = 0; first < n; first += slab) {
      const int64_t rows = std::min(slab, n - first);
      dequantize(gpu_, w, first, rows, static_cast<f16_t*>(slab_));
      product(type, true, slab_, n_embd, rows, static_cast<const f16_t*>(x) + first, n, T, 1.0f, y, n_embd);
    }
  }
  if (bias) add_bias(gpu_, bias, T, y, n_embd);
}

}  // namespace hearth::cuda
