#pragma once
// What kernels know about a weight type: how 16 bytes of weights ("a chunk") meet the input. One specialisation a type;
// the kernels are written once over Format<D>.
//
// A chunk's input is staged in shared memory as kUnits planes of 16-byte units, so that 32 lanes with consecutive
// chunks read consecutive units: no bank conflicts, whatever the width of the weights.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "core/dtype.h"
#include "core/error.h"
#include "cuda/layout.h"
#include "cuda/reduce.cuh"

namespace hearth::cuda {

struct Chunk {
  uint4 q;           // 16 bytes of weights
  unsigned short d;  // the block's f16 scale (quantised types)
};

// Weights are read once: past L1, and never from a line that this kernel could have changed. Volatile keeps the loads
// where they are written, ahead of grid_wait() where that is wanted.
__device__ __forceinline__ uint4 load_weights(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ unsigned short load_scale(const unsigned short* p) {
  unsigned short v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ float half_bits_to_float(unsigned short bits) {
  return __half2float(__ushort_as_half(bits));
}
__device__ __forceinline__ float2 half2_bits_to_float2(unsigned bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ float2 bfloat2_bits_to_float2(unsigned bits) {  // no bf16 instructions needed: also sm_75
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
}

// kWeights: weights in a chunk. kUnits: 16-byte units of its input. decode(): the chunk's weights in column order,
// except for Q4_0, whose chunk is a block: decode() gives columns in order there too.
template <DType D>
struct Format;

template <>
struct Format<DType::f32> {
  static constexpr int kWeights = 4, kUnits = 1;
  static constexpr bool kQuantized = false;
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    out[0] = __uint_as_float(w.q.x), out[1] = __uint_as_float(w.q.y);
    out[2] = __uint_as_float(w.q.z), out[3] = __uint_as_float(w.q.w);
  }
};
template <>
struct Format<DType::f16> {
  static constexpr int kWeights = 8, kUnits = 2;
  static constexpr bool kQuantized = false;
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = half2_bits_to_float2(words[i]);
      out[2 * i] = f.x, out[2 * i + 1] = f.y;
    }
  }
};
template <>
struct Format<DType::bf16> {
  static constexpr int kWeights = 8, kUnits = 2;
  static constexpr bool kQuantized = false;
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = bfloat2_bits_to_float2(words[i]);
      out[2 * i] = f.x, out[2 * i + 1] = f.y;
    }
  }
};
template <>
struct Format<DType::q8_0> {
  static constexpr int kWeights = 16, kUnits = 1;  // half a block
  static constexpr bool kQuantized = true;
  static __device__ __forceinline__ float dot(const Chunk& w, const uint4* x, Q8Scale scale) {
    int sum = __dp4a(static_cast<int>(w.q.x), static_cast<int>(x[0].x), 0);
    sum = __dp4a(static_cast<int>(w.q.y), static_cast<int>(x[0].y), sum);
    sum = __dp4a(static_cast<int>(w.q.z), static_cast<int>(x[0].z), sum);
    sum = __dp4a(static_cast<int>(w.q.w), static_cast<int>(x[0].w), sum);
    return half_bits_to_float(w.d) * (scale.d * static_cast<float>(sum));
  }
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
    const float d = half_bits_to_float(w.d);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      out[i] = d * static_cast<float>(static_cast<signed char>(words[i / 4] >> (8 * (i % 4))));
    }
  }
};
template <>
struct Format<DType::q4_0> {
  static constexpr int kWeights = 32, kUnits = 2;  // a block: low nibbles are columns 0-15, high nibbles 16-31
  static constexpr bool kQuantized = true;
  static __device__ __forceinline__ float dot(const Chunk& w, const uint4* x, Q8Scale scale) {
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
    const unsigned low[4] = {x[0].x, x[0].y, x[0].z, x[0].w}, high[4] = {x[1].x, x[1].y, x[1].z, x[1].w};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum = __dp4a(static_cast<int>(words[i] & 0x0F0F0F0Fu), static_cast<int>(low[i]), sum);
      sum = __dp4a(static_cast<int>((words[i] >> 4) & 0x0F0F0F0Fu), static_cast<int>(high[i]), sum);
    }
    return half_bits_to_float(w.d) * (scale.d * static_cast<float>(sum) - 8.0f * scale.d_sum);
  }
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
    const float d = half_bits_to_float(w.d);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const unsigned byte = words[i / 4] >> (8 * (i % 4));
      out[i] = d * static_cast<float>(static_cast<int>(byte & 15u) - 8);
      out[i + 16] = d * static_cast<float>(static_cast<int>((byte >> 4) & 15u) - 8);
    }
  }
};

// acc += v * (a chunk's weights), in f32, for one chunk of columns and many rows.
template <DType D>
struct ScaledSum {
  static constexpr int kWeights = Format<D>::kWeights;
  float acc[kWeights] = {};
  __device__ __forceinline__ void add(const Chunk& w, float v) {
    float values[kWeights];
    Format<D>::decode(w, values);
#pragma unroll
    for (int i = 0; i < kWeights; ++i) acc[i] = fmaf(v, values[i], acc[i]);
  }
  __device__ __forceinline__ void finish() {}
};
// Conversions from integers run at a quarter of the rate of other instructions. A byte u below the exponent of 2^23 is
// the float 2^23 + u.
template <>
struct ScaledSum<DType::q8_0> {
  float acc[16] = {};
  __device__ __forceinline__ void add(const Chunk& w, float v) {
    const float s = v * half_bits_to_float(w.d);
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const unsigned bits =
          __byte_perm(words[i / 4] ^ 0x80808080u, 0x4B000000u, 0x7440u | static_cast<unsigned>(i % 4));
      acc[i] = fmaf(s, __uint_as_float(bits) - 8388736.0f, acc[i]);  // 2^23 + 128
    }
  }
  __device__ __forceinline__ void finish() {}
};
// A nibble u in bits 19 to 22 under the exponent of 1 is 1 + u / 16, in bits 15 to 18 1 + u / 256: one shift serves two
// columns. What that adds to each sum depends on the row alone and is taken off at the end. The sums are larger than
// their result by a factor of about 16 or 256 / 5, so that up to six of f32's 24 bits are lost.
template <>
struct ScaledSum<DType::q4_0> {
  float acc[32] = {};
  float sum = 0.0f;
  __device__ __forceinline__ void add(const Chunk& w, float v) {
    const float s = v * half_bits_to_float(w.d);
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
    sum += s;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int left = 15 - 8 * (i % 4);
      const unsigned bits = left > 0 ? words[i / 4] << (left & 31) : words[i / 4] >> (-left & 31);
      acc[i] = fmaf(s, __uint_as_float((bits & 0x00078000u) | 0x3F800000u), acc[i]);
      acc[i + 16] = fmaf(s, __uint_as_float((bits & 0x00780000u) | 0x3F800000u), acc[i + 16]);
    }
  }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      acc[i] = fmaf(256.0f, acc[i], -264.0f * sum);
      acc[i + 16] = fmaf(16.0f, acc[i + 16], -24.0f * sum);
    }
  }
};

// Chunk c of a row; scales is the row's, unused by types without.
template <DType D>
__device__ __forceinline__ Chunk load_chunk(const uint4* row, const unsigned short* scales, int64_t c) {
  Chunk w;
  w.q = load_weights(row + c);
  w.d = 0;
  if constexpr (Format<D>::kQuantized) w.d = load_scale(scales + c * Format<D>::kWeights / 32);
  return w;
}

// A warp's 32 values, one a lane, as a block of the 8-bit form.
__device__ __forceinline__ void store_q8_block(float value, std::byte* row, int64_t n, int64_t block) {
  const int lane = threadIdx.x % kWarp;
  const float amax = warp_max_magnitude(value);
  const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
  const int q = max(-127, min(127, __float2int_rn(value * inverse)));
  const int sum = warp_sum(q);
  reinterpret_cast<signed char*>(row)[block * 32 + lane] = static_cast<signed char>(q);
  if (lane == 0) {
    const float d = amax / 127.0f;
    reinterpret_cast<Q8Scale*>(row + q8_quants_bytes(n))[block] = {d, d * static_cast<float>(sum)};
  }
}

// kQuads groups of four values of a lane, each part of a block of 32 with those of seven neighbouring lanes: blocks of
// the 8-bit form. Whole warps call it.
struct Q8Quad {
  unsigned word;
  Q8Scale scale;  // the block's; d_sum only with kSum
};
template <int kQuads, bool kSum>
__device__ __forceinline__ void quantize_quads(const float (&v)[kQuads][4], Q8Quad (&out)[kQuads]) {
  float amax[kQuads];
#pragma unroll
  for (int k = 0; k < kQuads; ++k)
    amax[k] = fmaxf(fmaxf(fabsf(v[k][0]), fabsf(v[k][1])), fmaxf(fabsf(v[k][2]), fabsf(v[k][3])));
#pragma unroll
  for (int o = 1; o < 8; o *= 2) {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) amax[k] = fmaxf(amax[k], __shfl_xor_sync(kAllLanes, amax[k], o));
  }
  int sum[kQuads];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const float inverse = amax[k] > 0.0f ? 127.0f / amax[k] : 0.0f;
    unsigned q[4];  // in the low byte: adding 1.5 * 2^23 rounds to the nearest integer, faster than a conversion
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = __float_as_uint(fmaf(v[k][i], inverse, 12582912.0f));
    out[k].word = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
    out[k].scale = {amax[k] / 127.0f, 0.0f};
    sum[k] = kSum ? __dp4a(static_cast<int>(out[k].word), 0x01010101, 0) : 0;
  }
  if constexpr (kSum) {
#pragma unroll
    for (int o = 1; o < 8; o *= 2) {
#pragma unroll
      for (int k = 0; k < kQuads; ++k) sum[k] += __shfl_xor_sync(kAllLanes, sum[k], o);
    }
#pragma unroll
    for (int k = 0; k < kQuads; ++k) out[k].scale.d_sum = out[k].scale.d * static_cast<float>(sum[k]);
  }
}

// Calls f.template operator()<D>() for the run-time type; the one place where types become template arguments.
template <typename F>
void with_format(DType type, F&& f) {
  switch (type) {
    case DType::f32:
      return f.template operator()<DType::f32>();
    case DType::f16:
      return f.template operator()<DType::f16>();
    case DType::bf16:
      return f.template operator()<DType::bf16>();
    case DType::q8_0:
      return f.template operator()<DType::q8_0>();
    case DType::q4_0:
      return f.template operator()<DType::q4_0>();
    default:
      fail("weights of type {} cannot be computed with on the GPU; expected f32, f16, bf16, q8_0 or q4_0",
           traits(type).name);
  }
}

}  // namespace hearth::cuda
