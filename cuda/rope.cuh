#pragma once
// Per-head q/k norm and rotary embedding of a head in shared memory, by one warp.
//
// Several kernels inline these functions and must agree in every bit, so no product that meets a sum is left for the
// compiler to contract or not.
#include "core/ops.h"
#include "cuda/reduce.cuh"

namespace hearth::cuda {

// cos and sin of pos * inv_freq, times the attention factor. The product is reduced in double precision: in single, its
// error would grow with the position to a thousandth of a radian at 16k.
__device__ __forceinline__ float2 rotation(const AttentionArgs& a, int pair, int pos) {
  constexpr double kTwoPi = 6.283185307179586476925;
  const double angle = __dmul_rn(static_cast<double>(pos), static_cast<double>(a.inv_freq[pair]));
  const double turns = rint(angle / kTwoPi);
  float s, c;
  sincosf(static_cast<float>(fma(-turns, kTwoPi, angle)), &s, &c);
  return {__fmul_rn(c, a.attention_factor), __fmul_rn(s, a.attention_factor)};
}

__device__ __forceinline__ void norm_head(float* head, int n, const float* weight, float eps) {
  const int lane = threadIdx.x % kWarp;
  float sum = 0.0f;
  for (int i = lane; i < n; i += kWarp) sum = fmaf(head[i], head[i], sum);
  const float scale = 1.0f / sqrtf(__fadd_rn(group_sum(sum) / static_cast<float>(n), eps));
  for (int i = lane; i < n; i += kWarp) head[i] = __fmul_rn(head[i], __fmul_rn(scale, weight[i]));
  __syncwarp();
}

// rotation_of(pair) gives the pair's {cos, sin}.
template <typename Rotation>
__device__ __forceinline__ void rotate_head(float* head, const AttentionArgs& a, Rotation rotation_of) {
  const int half = static_cast<int>(a.n_rot / 2);
  for (int pair = threadIdx.x % kWarp; pair < half; pair += kWarp) {
    const float2 r = rotation_of(pair);
    float& first = a.rope == RopeKind::neox ? head[pair] : head[2 * pair];
    float& second = a.rope == RopeKind::neox ? head[pair + half] : head[2 * pair + 1];
    const float x = first, y = second;
    first = fmaf(x, r.x, -__fmul_rn(y, r.y));
    second = fmaf(x, r.y, __fmul_rn(y, r.x));
  }
  __syncwarp();
}

}  // namespace hearth::cuda
