// RMSNorm and LayerNorm: one block a row, values in registers.
#include "cuda/kernels.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {
namespace {

struct NormKernelArgs {
  const float* x;
  const float* weight;
  const float* bias;
  float* out;
  int n;
  float eps;
};

constexpr int kThreads = 512;  // leaves room on the multiprocessor for the next kernel's blocks

// Thread i has elements i, i + threads, ...
template <NormKind kKind, int kPerThread>
__global__ void __launch_bounds__(kThreads, 2) norm_kernel(const __grid_constant__ NormKernelArgs a) {
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
  }
}

template <NormKind kKind>
auto choose_kernel(int64_t per_thread) {
  if (per_thread <= 8) return norm_kernel<kKind, 8>;
  if (per_thread <= 16) return norm_kernel<kKind, 16>;
  return norm_kernel<kKind, 32>;
}

}  // namespace

void norm(const Gpu& gpu, const NormArgs& a, const float* x, int64_t T, float* out) {
  const int threads = static_cast<int>(std::clamp<int64_t>(round_up(ceil_div(a.n, 8), kWarp), kWarp, kThreads));
  const int64_t per_thread = ceil_div(a.n, threads);
  if (per_thread > 32)
    fail("rows of {} elements cannot be normalised on the GPU; the longest possible is {}", a.n, 32 * kThreads);
  const NormKernelArgs args{x, a.weight.data, a.bias.data, out, static_cast<int>(a.n), a.eps};
  const auto kernel =
      a.kind == NormKind::rms ? choose_kernel<NormKind::rms>(per_thread) : choose_kernel<NormKind::layer>(per_thread);
  launch(gpu, kernel, grid_size(T), threads, 0, args);
}

}  // namespace hearth::cuda
