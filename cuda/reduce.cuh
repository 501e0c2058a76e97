#pragma once
// Sums and maxima over a warp or a block, in an order that is fixed by the shape of the launch.
#include <cuda_runtime.h>

namespace hearth::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Over groups of kWidth consecutive lanes; every lane gets the result.
template <int kWidth = kWarp>
__device__ __forceinline__ float group_sum(float v) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, offset));
  return v;
}
__device__ __forceinline__ int warp_sum(int v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, v);
#else
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
#endif
}
// Bits of values that are not negative are ordered as the values are.
__device__ __forceinline__ float warp_max_magnitude(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(fabsf(v))));
#else
  return warp_max(fabsf(v));
#endif
}

// Over the block; every thread gets the result. `shared` holds 32 floats and is free again after the next
// __syncthreads().
__device__ __forceinline__ float block_sum(float v, float* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  v = group_sum(v);
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  return group_sum(lane < warps ? shared[lane] : 0.0f);
}

}  // namespace hearth::cuda
