#pragma once
// An online softmax (Milakov and Gimelshein 2018) in base 2 over the keys of one group of lanes.
#include <cuda_fp16.h>

#include "cuda/format.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {

constexpr int kDims = 8;         // a lane's, one 16-byte load
constexpr int kBatch = 4;        // keys in flight per group
constexpr float kNone = -1e30f;  // below every score; finite, so that differences stay numbers

__device__ __forceinline__ void unpack(const uint4& v, float* out) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = half2_bits_to_float2(words[i]);
    out[2 * i] = f.x, out[2 * i + 1] = f.y;
  }
}

// One group's running softmax over the keys it has seen, for kHeads query heads.
template <int kLanes, int kHeads>
struct Running {
  float m[kHeads], sum[kHeads], acc[kHeads][kDims];

  __device__ __forceinline__ Running() {
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      m[g] = kNone, sum[g] = 0.0f;
#pragma unroll
      for (int i = 0; i < kDims; ++i) acc[g][i] = 0.0f;
    }
  }
  // Keys with their values, those that have their bit in `mask`; the others' values must be finite.
  // cap(score) is what the softmax is taken of.
  template <typename Cap>
  __device__ __forceinline__ void add(const float (&q)[kHeads][kDims], const uint4 (&k)[kBatch],
                                      const uint4 (&v)[kBatch], unsigned mask, Cap cap) {
    float s[kBatch][kHeads];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float key[kDims];
      unpack(k[b], key);
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kDims; ++i) dot = fmaf(q[g][i], key[i], dot);
        s[b][g] = cap(group_sum<kLanes>(dot));
      }
    }
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      float top = m[g];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) top = mask >> b & 1 ? fmaxf(top, s[b][g]) : top;
      const float scale = exp2f(m[g] - top);
      m[g] = top, sum[g] *= scale;
#pragma unroll
      for (int i = 0; i < kDims; ++i) acc[g][i] *= scale;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        s[b][g] = mask >> b & 1 ? exp2f(s[b][g] - top) : 0.0f;
        sum[g] += s[b][g];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float value[kDims];
      unpack(v[b], value);
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
#pragma unroll
        for (int i = 0; i < kDims; ++i) acc[g][i] = fmaf(s[b][g], value[i], acc[g][i]);
      }
    }
  }
  // Merges the groups of the warp: all end with the same state.
  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int offset = kLanes; offset < kWarp; offset *= 2) {
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        const float other = __shfl_xor_sync(kAllLanes, m[g], offset), top = fmaxf(m[g], other);
        const float scale = exp2f(m[g] - top);
        m[g] = top, sum[g] *= scale;
        sum[g] += __shfl_xor_sync(kAllLanes, sum[g], offset);
#pragma unroll
        for (int i = 0; i < kDims; ++i) {
          acc[g][i] *= scale;
          acc[g][i] += __shfl_xor_sync(kAllLanes, acc[g][i], offset);
        }
      }
    }
  }
};

}  // namespace hearth::cuda
