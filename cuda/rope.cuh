#pragma once
// Per-head q/k norm and rotary embedding of a head in shared memory, by one warp.
#include "core/device.h"
#include "cuda/reduce.cuh"

namespace hearth::cuda {

// cos and sin of pos * inv_freq, times the attention factor. The product is reduced in double precision: in single, its
// error would grow with the position to a thousandth of a radian at 16k.
__device__ __forceinline__ float2 rotation(const RopeKvArgs& a, int pair, int pos) {
  constexpr double kTwoPi = 6.283185307179586476925;
  const double angle = static_cast<double>(pos) * static_cast<double>(a.inv_freq[pair]);
  const double turns = rint(angle / kTwoPi);
  float s, c;
  sincosf(static_cast<float>(fma(-turns, kTwoPi, angle)), &s, &c);
  return {c * a.attention_factor, s * a.attention_factor};
}

__device__ __forceinline__ void norm_head(float* head, int n, const float* weight, float eps) {
  const int lane = threadIdx.x % kWarp;
  float sum = 0.0f;
  for (int i = lane; i < n; i += kWarp) sum += head[i] * head[i];
  const float scale = 1.0f / sqrtf(group_sum(sum) / static_cast<float>(n) + eps);
  for (int i = lane; i < n; i += kWarp) head[i] *= scale * weight[i];
  __syncwarp();
}

// rotation_of(pair) gives the pair's {cos, sin}.
template <typename Rotation>
__device__ __forceinline__ void rotate_head(float* head, const RopeKvArgs& a, Rotation rotation_of) {
  const int half = static_cast<int>(a.n_rot / 2);
  for (int pair = threadIdx.x % kWarp; pair < half; pair += kWarp) {
    const float2 r = rotation_of(pair);
    float& first = a.rope == RopeKind::neox ? head[pair] : head[2 * pair];
    float& second = a.rope == RopeKind::neox ? head[pair + half] : head[2 * pair + 1];
    const float x = first, y = second;
    first = x * r.x - y * r.y;
    second = x * r.y + y * r.x;
  }
  __syncwarp();
}

}  // namespace hearth::cuda
