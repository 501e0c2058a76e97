#pragma once
// Kernels know this about a weight type: how 16 bytes of weights ("a chunk") meet the input. One specialisation a type;
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
  uint4 q;         // 16 bytes of weights, or of the low bits of 32 codes (two bits: in q.x and q.y)
  uint2 high;      // the codes' high bits, where the type has some
  unsigned scale;  // the record of the chunk's 32 weights (cuda/packing.h)
  unsigned super;  // that of its 256 weights
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
// The same of 1, 2, 4 or 8 bytes. What neighbours share stays in L1.
template <int64_t kBytes>
__device__ __forceinline__ uint2 load_field(const std::byte* p) {
  uint2 v = make_uint2(0, 0);
  if constexpr (kBytes == 8) {
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v.x) : "l"(p));
  } else if constexpr (kBytes == 2) {
    unsigned short h;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(h) : "l"(p));
    v.x = h;
  } else if constexpr (kBytes == 1) {
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v.x) : "l"(p));
  }
  return v;
}

__device__ __forceinline__ float half_bits_to_float(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float2 half2_bits_to_float2(unsigned bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ float2 bfloat2_bits_to_float2(unsigned bits) {  // no bf16 instructions needed: also sm_75
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
}

// The codes of a chunk of 32, four neighbouring columns a word: unsigned bytes, or signed ones where they are levels.
template <DType D>
__device__ __forceinline__ void unpack_codes(const Chunk& w, unsigned (&out)[8]) {
  constexpr PackedFormat f = packed_format(D);
  const unsigned q[4] = {w.q.x, w.q.y, w.q.z, w.q.w}, high[2] = {w.high.x, w.high.y};
  if constexpr (f.levels != Levels::none) {
    constexpr uint32_t k0 = four_levels<f.levels>(0), k4 = four_levels<f.levels>(4), k8 = four_levels<f.levels>(8),
                       k12 = four_levels<f.levels>(12);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // The low three bits of a nibble select of eight levels, its top bit of two eights.
      const unsigned codes = q[i / 2] >> (i % 2 * 16);
      const unsigned eight = codes & 0x7777u, top = 0x3210u | (codes & 0x8888u) >> 1;
      out[i] = __byte_perm(__byte_perm(k0, k4, eight), __byte_perm(k8, k12, eight), top);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (f.low_bits == 4) {
        out[i] = (i < 4 ? q[i] : q[i - 4] >> 4) & 0x0F0F0F0Fu;
      } else {
        out[i] = q[i / 4] >> (i % 4 * 2) & 0x03030303u;
      }
      if constexpr (f.high_bits == 1) out[i] |= (high[0] >> i & 0x01010101u) << f.low_bits;
      if constexpr (f.high_bits == 2) out[i] |= (high[i / 4] >> (i % 4 * 2) & 0x03030303u) << f.low_bits;
    }
  }
}

// A chunk's weights are w = s * q - m; each group of its weights shares s and m.
template <DType D>
struct ChunkScales {
  static constexpr PackedFormat kFormat = packed_format(D);
  static constexpr int kGroups = 32 / kFormat.group;
  static constexpr bool kHasMin = kFormat.offset != 0 || kFormat.scaling == Scaling::half_min ||
                                  kFormat.scaling == Scaling::super_min || kFormat.scaling == Scaling::super_pair;
  float s[kGroups], m[kGroups];

  __device__ __forceinline__ explicit ChunkScales(const Chunk& w) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const unsigned byte = w.scale >> (8 * g) & 255u;
      m[g] = 0.0f;
      if constexpr (kFormat.scaling == Scaling::half || kFormat.scaling == Scaling::half_min) {
        s[g] = half_bits_to_float(w.scale);
        if constexpr (kFormat.scaling == Scaling::half_min) m[g] = -half_bits_to_float(w.scale >> 16);
      } else if constexpr (kFormat.scaling == Scaling::exponent) {
        s[g] = __uint_as_float(byte < 2 ? 0x00200000u << byte : (byte - 1) << 23);
      } else if constexpr (kFormat.scaling == Scaling::super_sign) {
        s[g] = half_bits_to_float(w.super) * static_cast<float>(static_cast<signed char>(byte));
      } else {
        const float2 d = half2_bits_to_float2(w.super);
        const bool pair = kFormat.scaling == Scaling::super_pair;
        s[g] = d.x * static_cast<float>(pair ? byte & 15u : w.scale & 255u);
        m[g] = d.y * static_cast<float>(pair ? byte >> 4 : w.scale >> 8 & 255u);
      }
      if constexpr (kFormat.offset != 0) m[g] = s[g] * static_cast<float>(kFormat.offset);
    }
  }
};

// kWeights: weights in a chunk. kUnits: 16-byte units of its input. decode(): the chunk's weights in column order.
// This one is for chunks of 32 codes; types whose kernels are written for them follow.
template <DType D>
struct Format {
  static constexpr int kWeights = 32, kUnits = 2;
  static constexpr bool kQuantized = true;
  static constexpr bool kSigned = packed_format(D).levels != Levels::none;
  static __device__ __forceinline__ float dot(const Chunk& w, const uint4* x, Q8Scale scale) {
    using Scales = ChunkScales<D>;
    unsigned code[8];
    unpack_codes<D>(w, code);
    const Scales scales(w);
    const int input[8] = {static_cast<int>(x[0].x), static_cast<int>(x[0].y), static_cast<int>(x[0].z),
                          static_cast<int>(x[0].w), static_cast<int>(x[1].x), static_cast<int>(x[1].y),
                          static_cast<int>(x[1].z), static_cast<int>(x[1].w)};
    if constexpr (Scales::kGroups == 1) {
      int sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = __dp4a(static_cast<int>(code[i]), input[i], sum);
      const float product = scales.s[0] * (scale.d * static_cast<float>(sum));
      return Scales::kHasMin ? product - scales.m[0] * scale.d_sum : product;
    } else {
      float total = 0.0f;
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        int sum = 0, inputs = 0;  // the inputs' sum is the same for all rows: made once
#pragma unroll
        for (int i = 4 * g; i < 4 * g + 4; ++i) {
          sum = __dp4a(static_cast<int>(code[i]), input[i], sum);
          inputs = __dp4a(0x01010101, input[i], inputs);
        }
        if constexpr (packed_format(D).offset != 0) {  // in integers, exactly
          total = fmaf(scales.s[g], static_cast<float>(sum - packed_format(D).offset * inputs), total);
        } else {
          total += scales.s[g] * static_cast<float>(sum) - scales.m[g] * static_cast<float>(inputs);
        }
      }
      return scale.d * total;
    }
  }
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    using Scales = ChunkScales<D>;
    unsigned code[8];
    unpack_codes<D>(w, code);
    const Scales scales(w);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int g = i * Scales::kGroups / 32;
      const unsigned byte = code[i / 4] >> (8 * (i % 4));
      const float q = kSigned ? static_cast<float>(static_cast<signed char>(byte)) : static_cast<float>(byte & 255u);
      out[i] = Scales::kHasMin ? scales.s[g] * q - scales.m[g] : scales.s[g] * q;
    }
  }
};

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
    return half_bits_to_float(w.scale) * (scale.d * static_cast<float>(sum));
  }
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
    const float d = half_bits_to_float(w.scale);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      out[i] = d * static_cast<float>(static_cast<signed char>(words[i / 4] >> (8 * (i % 4))));
    }
  }
};
template <>
struct Format<DType::q4_0> {
  static constexpr int kWeights = 32, kUnits = 2;  // low nibbles are columns 0-15, high nibbles 16-31
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
    return half_bits_to_float(w.scale) * (scale.d * static_cast<float>(sum) - 8.0f * scale.d_sum);
  }
  static __device__ __forceinline__ void decode(const Chunk& w, float* out) {
    const unsigned words[4] = {w.q.x, w.q.y, w.q.z, w.q.w};
    const float d = half_bits_to_float(w.scale);
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
// the float 2^23 + u. What minima add to each sum depends on the row alone and is taken off at the end.
template <DType D>
requires(is_packed(D)) struct ScaledSum<D> {
  using Scales = ChunkScales<D>;
  static constexpr float kBase = Format<D>::kSigned ? 8388736.0f : 8388608.0f;  // 2^23, and the sign's 128
  float acc[32] = {};
  float mins[Scales::kGroups] = {};
  __device__ __forceinline__ void add(const Chunk& w, float v) {
    unsigned code[8];
    unpack_codes<D>(w, code);
    const Scales scales(w);
    float s[Scales::kGroups];
#pragma unroll
    for (int g = 0; g < Scales::kGroups; ++g) {
      s[g] = v * scales.s[g];
      if constexpr (Scales::kHasMin) mins[g] = fmaf(v, scales.m[g], mins[g]);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const unsigned word = Format<D>::kSigned ? code[i / 4] ^ 0x80808080u : code[i / 4];
      const unsigned bits = __byte_perm(word, 0x4B000000u, 0x7440u | static_cast<unsigned>(i % 4));
      acc[i] = fmaf(s[i * Scales::kGroups / 32], __uint_as_float(bits) - kBase, acc[i]);
    }
  }
  __device__ __forceinline__ void finish() {
    if constexpr (Scales::kHasMin) {
#pragma unroll
      for (int i = 0; i < 32; ++i) acc[i] -= mins[i * Scales::kGroups / 32];
    }
  }
};
template <>
struct ScaledSum<DType::q8_0> {
  float acc[16] = {};
  __device__ __forceinline__ void add(const Chunk& w, float v) {
    const float s = v * half_bits_to_float(w.scale);
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
    const float s = v * half_bits_to_float(w.scale);
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

// The fields of a packed row of `cols` columns, as offsets from its begin (cuda/packing.h).
template <DType D>
struct RowFields {
  static constexpr PackedFormat kFormat = packed_format(D);
  // Bytes of a chunk in each field.
  static constexpr int64_t kLow = kFormat.low_bits == 2 ? 8 : 16, kHigh = kFormat.high_bytes(),
                           kScale = Format<D>::kQuantized ? kFormat.scale_bytes() : 0,
                           kSuper = Format<D>::kQuantized ? kFormat.super_bytes() : 0;
  unsigned high = 0, scales = 0, supers = 0;
  unsigned stride;  // bytes from row to row

  __device__ __forceinline__ explicit RowFields(int64_t cols) {
    if constexpr (Format<D>::kQuantized) {
      const PackedRow at = packed_row(packed_format(D), cols);
      high = static_cast<unsigned>(at.high), scales = static_cast<unsigned>(at.scales);
      supers = static_cast<unsigned>(at.supers), stride = static_cast<unsigned>(at.stride);
    } else {
      stride = static_cast<unsigned>(cols) * (16 / Format<D>::kWeights);
    }
  }
  // Where chunk c's fields are in a row.
  __device__ __forceinline__ unsigned low_at(unsigned c) const { return c * static_cast<unsigned>(kLow); }
  __device__ __forceinline__ unsigned high_at(unsigned c) const { return high + c * static_cast<unsigned>(kHigh); }
  __device__ __forceinline__ unsigned scale_at(unsigned c) const {
    return scales + c * Format<D>::kWeights / 32 * static_cast<unsigned>(kScale);
  }
  __device__ __forceinline__ unsigned super_at(unsigned c) const {
    return supers + c / 8 * static_cast<unsigned>(kSuper);
  }
  // Chunk c of the row at base + offset: sums of 32 bits before the one of 64 take fewer registers.
  __device__ __forceinline__ Chunk load(const std::byte* base, unsigned offset, unsigned c) const {
    Chunk w;
    if constexpr (kLow == 16) {
      w.q = load_weights(reinterpret_cast<const uint4*>(base + (offset + low_at(c))));
    } else {
      const uint2 q = load_field<8>(base + (offset + low_at(c)));
      w.q = make_uint4(q.x, q.y, 0, 0);
    }
    w.high = load_field<kHigh>(base + (offset + high_at(c)));
    w.scale = load_field<kScale>(base + (offset + scale_at(c))).x;
    w.super = load_field<kSuper>(base + (offset + super_at(c))).x;
    return w;
  }
};
// Types whose chunks and scales take more registers than those of Q8_0 and Q4_0: fewer are in flight at once.
template <DType D>
constexpr bool kManyRegisters = is_packed(D) && D != DType::q8_0 && D != DType::q4_0;

template <DType D>
__device__ __forceinline__ const std::byte* row_of(const Matrix& w, const RowFields<D>& fields, int64_t row) {
  return static_cast<const std::byte*>(w.data) + uint64_t{static_cast<uint32_t>(row)} * fields.stride;
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

// Calls f.template operator()<D>() for the run-time type, where kernels have types as template arguments.
template <typename F>
void with_format(DType type, F&& f) {
  switch (type) {
    case DType::f32:
      return f.template operator()<DType::f32>();
    case DType::f16:
      return f.template operator()<DType::f16>();
    case DType::bf16:
      return f.template operator()<DType::bf16>();
    default:
      with_block(type, [&]<DType D, typename Block>() { f.template operator()<D>(); });
  }
}
// The same for kernels that are made for the types which predictors have; false for another type.
template <typename F>
bool with_predictor_format(DType type, F&& f) {
  switch (type) {
    case DType::q8_0:
      f.template operator()<DType::q8_0>();
      break;
    case DType::q4_0:
      f.template operator()<DType::q4_0>();
      break;
    case DType::f32:
      f.template operator()<DType::f32>();
      break;
    case DType::f16:
      f.template operator()<DType::f16>();
      break;
    case DType::bf16:
      f.template operator()<DType::bf16>();
      break;
    default:
      return false;
  }
  return true;
}

}  // namespace hearth::cuda
