// The tensor-core products need these around them: inputs in 16 bits, weights out of their blocks, biases.
#include <cuda_fp16.h>

#include "cuda/format.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {
namespace {

// Finite values beyond f16's range become its largest finite value: infinities would turn whole rows into NaN.
__device__ unsigned short to_f16(float v) {
  return __half_as_ushort(__float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f)));
}
__device__ unsigned short to_bf16(float v) {
  const unsigned bits = __float_as_uint(v);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<unsigned short>(bits >> 16 | 0x40u);
  return static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

template <DType D>
__global__ void convert_kernel(const float* x, int64_t n, unsigned short* out) {
  grid_trigger();
  grid_wait();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 4;
  const auto one = [](float v) {
    if constexpr (D == DType::f16) return isnan(v) ? static_cast<unsigned short>(0x7E00u) : to_f16(v);
    return to_bf16(v);
  };
  if (i + 4 <= n) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(x + i));
    *reinterpret_cast<ushort4*>(out + i) = make_ushort4(one(v.x), one(v.y), one(v.z), one(v.w));
  } else {
    for (int64_t k = i; k < n; ++k) out[k] = one(__ldcg(x + k));
  }
}

// Grid: (chunks of a row, rows from first_row on).
template <DType D>
__global__ void dequantize_kernel(Matrix from, int64_t first_row, uint4* out) {
  constexpr int kWeights = Format<D>::kWeights;
  grid_trigger();
  const RowFields<D> fields(from.cols);
  const int n_chunks = static_cast<int>(from.cols) / kWeights;
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  Chunk w{};
  if (at < n_chunks) w = fields.load(row_of(from, fields, first_row + blockIdx.y), 0, static_cast<unsigned>(at));
  grid_wait();
  if (at >= n_chunks) return;
  const int64_t c = static_cast<int64_t>(blockIdx.y) * n_chunks + at;
  float values[kWeights];
  Format<D>::decode(w, values);
#pragma unroll
  for (int i = 0; i < kWeights; i += 8) {
    unsigned words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const __half2 h = __floats2half2_rn(values[i + 2 * k], values[i + 2 * k + 1]);
      words[k] = *reinterpret_cast<const unsigned*>(&h);
    }
    out[c * (kWeights / 8) + i / 8] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__global__ void add_bias_kernel(const float* bias, int64_t n, float* y, int64_t y_stride) {
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[blockIdx.y * y_stride + i] += bias[i];
}

}  // namespace

void convert_rows(const Gpu& gpu, const float* x, int64_t n, DType to, void* out) {
  HEARTH_CHECK(to == DType::f16 || to == DType::bf16);
  launch(gpu, to == DType::f16 ? convert_kernel<DType::f16> : convert_kernel<DType::bf16>,
         grid_size(ceil_div(n, 4 * 256)), 256, 0, x, n, static_cast<unsigned short*>(out));
}

void dequantize(const Gpu& gpu, const Matrix& w, int64_t first_row, int64_t n_rows, f16_t* out) {
  HEARTH_CHECK(w.layout == Layout::planes);
  with_format(w.type, [&]<DType D>() {
    if constexpr (Format<D>::kQuantized) {
      const int64_t per_row = w.cols / Format<D>::kWeights;
      const int64_t threads = std::min<int64_t>(256, round_up(per_row, 32)), most = 65535;  // of a grid's second side
      for (int64_t done = 0; done < n_rows; done += most) {
        const dim3 grid(grid_size(ceil_div(per_row, threads)), grid_size(std::min(most, n_rows - done)));
        launch(gpu, dequantize_kernel<D>, grid, static_cast<int>(threads), 0, w, first_row + done,
               reinterpret_cast<uint4*>(out + done * w.cols));
      }
    }
  });
}

void add_bias(const Gpu& gpu, Vector bias, int64_t T, float* y, int64_t y_stride) {
  launch(gpu, add_bias_kernel, dim3(grid_size(ceil_div(bias.n, 256)), grid_size(T)), 256, 0, bias.data, bias.n, y,
         y_stride);
}

}  // namespace hearth::cuda
