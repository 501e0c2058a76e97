// RMSNorm and LayerNorm, one block a row, values in registers; and the 8-bit form of rows.
#include "cuda/format.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {
namespace {

struct NormKernelArgs {
  const float* x;
  const float* weight;
  const float* bias;
  float* out;
  std::byte* q8;
  int64_t q8_stride;  // bytes
  int n;
  float eps;
};

// Thread i has elements i, i + threads, ...: a warp's 32 elements are then a block of the 8-bit form.
template <NormKind kKind, int kPerThread>
__global__ void __launch_bounds__(1024, 1) norm_kernel(const __grid_constant__ NormKernelArgs a) {
  __shared__ float shared[2][kWarp];
  grid_trigger();
  const int64_t row = blockIdx.x;
  constexpr bool kEarly = kPerThread <= 8;  // registers to hold the weights while the input is being made
  float weight[kEarly ? kPerThread : 1], bias[kEarly ? kPerThread : 1], v[kPerThread];
  const auto load_weight = [&](int i) { return i < a.n ? a.weight[i] : 0.0f; };
  const auto load_bias = [&](int i) { return i < a.n && a.bias != nullptr ? a.bias[i] : 0.0f; };
  if constexpr (kEarly) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      weight[k] = load_weight(i), bias[k] = load_bias(i);
    }
  }
  grid_wait();
  float sum = 0.0f, mean = 0.0f;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    v[k] = i < a.n ? __ldcg(a.x + row * a.n + i) : 0.0f;
    sum += kKind == NormKind::layer ? v[k] : v[k] * v[k];
  }
  sum = block_sum(sum, shared[0]);
  if constexpr (kKind == NormKind::layer) {
    mean = sum / static_cast<float>(a.n);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i < a.n) squares += (v[k] - mean) * (v[k] - mean);
    }
    sum = block_sum(squares, shared[1]);
  }
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(a.n) + a.eps);
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    const float y = (v[k] - mean) * scale * (kEarly ? weight[kEarly ? k : 0] : load_weight(i)) +
                    (kEarly ? bias[kEarly ? k : 0] : load_bias(i));
    if (i < a.n) a.out[row * a.n + i] = y;
    if (a.q8 != nullptr && i / 32 * 32 < a.n) store_q8_block(i < a.n ? y : 0.0f, a.q8 + row * a.q8_stride, a.n, i / 32);
  }
}

template <NormKind kKind>
auto choose_kernel(int64_t per_thread) {
  if (per_thread <= 4) return norm_kernel<kKind, 4>;
  if (per_thread <= 8) return norm_kernel<kKind, 8>;
  return norm_kernel<kKind, 16>;
}

__global__ void quantize_kernel(const float* x, int64_t n_blocks, int64_t n, std::byte* q8, int64_t q8_stride) {
  grid_trigger();
  grid_wait();
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (block >= n_blocks) return;
  const int64_t per_row = ceil_div(n, 32), row = block / per_row;
  const int64_t i = block % per_row * 32 + threadIdx.x % kWarp;
  store_q8_block(i < n ? __ldcg(x + row * n + i) : 0.0f, q8 + row * q8_stride, n, block % per_row);
}

}  // namespace

void norm(const Gpu& gpu, const NormArgs& a, const float* x, int64_t T, Act out) {
  const int threads = static_cast<int>(std::clamp<int64_t>(round_up(ceil_div(a.n, 4), kWarp), kWarp, 1024));
  const int64_t per_thread = ceil_div(a.n, threads);
  if (per_thread > 16) fail("rows of {} elements cannot be normalised on the GPU; the longest possible is 16384", a.n);
  const NormKernelArgs args{x,
                            a.weight.data,
                            a.bias.data,
                            out.x,
                            static_cast<std::byte*>(out.q8),
                            q8_row_bytes(a.n),
                            static_cast<int>(a.n),
                            a.eps};
  const auto kernel =
      a.kind == NormKind::rms ? choose_kernel<NormKind::rms>(per_thread) : choose_kernel<NormKind::layer>(per_thread);
  launch(gpu, kernel, grid_size(T), threads, 0, args);
}

void quantize_rows(const Gpu& gpu, const float* x, int64_t T, int64_t n, void* q8) {
  const int64_t blocks = T * ceil_div(n, 32);
  launch(gpu, quantize_kernel, grid_size(ceil_div(blocks, 8)), 8 * kWarp, 0, x, blocks, n, static_cast<std::byte*>(q8),
         q8_row_bytes(n));
}

}  // namespace hearth::cuda
