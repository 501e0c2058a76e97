#pragma once
// The input of a product in shared memory, copied there or normed on the way.
//
// The RMS norm of a single token costs a kernel that does next to nothing: every block of the product after it reads
// the whole input anyway. So the product can do the norm itself: blocks stage x * weight while they sum x^2, and the
// factor 1 / rms is applied to the finished dot products.
#include "cuda/format.cuh"
#include "cuda/launch.cuh"

namespace hearth::cuda {

constexpr int kTileColumns = 8192;  // of the input, staged in shared memory at once

// Bytes of shared memory that stages the input of rows of `cols` columns.
template <DType D>
constexpr size_t stage_bytes(int64_t cols) {
  const int64_t columns = cols < kTileColumns ? cols : kTileColumns;
  return static_cast<size_t>(Format<D>::kQuantized ? columns + columns / 32 * static_cast<int64_t>(sizeof(Q8Scale))
                                                   : columns * static_cast<int64_t>(sizeof(float)));
}

// One input row as the format reads it.
struct InputRow {
  const uint4* units;     // f32 values, or 8-bit quants
  const Q8Scale* scales;  // quantised formats
};
template <DType D>
__device__ __forceinline__ InputRow input_row(Act in, int64_t t, int64_t cols) {
  if constexpr (Format<D>::kQuantized) {
    const std::byte* row = static_cast<const std::byte*>(in.q8) + t * q8_row_bytes(cols);
    return {reinterpret_cast<const uint4*>(row), reinterpret_cast<const Q8Scale*>(row + q8_quants_bytes(cols))};
  } else {
    return {reinterpret_cast<const uint4*>(in.x + t * cols), nullptr};
  }
}

// The part of an input row that is in shared memory: chunks [0, n) of the tile, planes `plane` units apart.
template <DType D>
struct StagedInput {
  using F = Format<D>;
  uint4* units;
  Q8Scale* scales;
  int plane;

  __device__ StagedInput(uint4* shared, int n_chunks) {
    constexpr int kTileChunks = kTileColumns / F::kWeights;
    plane = min(n_chunks, kTileChunks);
    units = shared;
    scales = reinterpret_cast<Q8Scale*>(shared + plane * F::kUnits);
  }
  __device__ __forceinline__ uint4& unit(int i) const { return units[i % F::kUnits * plane + i / F::kUnits]; }
  // Called by the whole block, between barriers.
  __device__ __forceinline__ void fill(const InputRow& in, int first_chunk, int n_chunks) {
    const uint4* from = in.units + static_cast<int64_t>(first_chunk) * F::kUnits;
#pragma unroll 4
    for (int i = threadIdx.x; i < n_chunks * F::kUnits; i += blockDim.x) unit(i) = __ldcg(from + i);
    if constexpr (F::kQuantized) {
      const auto* from_scales = reinterpret_cast<const float2*>(in.scales + first_chunk * F::kWeights / 32);
      for (int i = threadIdx.x; i < n_chunks * F::kWeights / 32; i += blockDim.x) {
        reinterpret_cast<float2*>(scales)[i] = __ldcg(from_scales + i);
      }
    }
  }
};

// An RMS norm of one row of n elements, n a multiple of 32 and at most kTileColumns.
struct InputNorm {
  const float* x = nullptr;  // null: there is no norm to do
  const float* weight = nullptr;
  float eps = 0.0f;
  int n = 0;
  Act out;  // gets the result too, for operations to come
};

template <DType D>
struct NormedInput {
  static_assert(!Format<D>::kQuantized);
  static constexpr int kInFlight = 4;  // loads a thread
  const InputNorm& norm;
  StagedInput<D> staged;
  int n_quads;  // groups of four elements

  __device__ NormedInput(const InputNorm& a, uint4* shared)
      : norm(a), staged(shared, a.n / Format<D>::kWeights), n_quads(a.n / 4) {}

  // Brings the norm's weights to where their products with x will be. May be called before grid_wait().
  __device__ __forceinline__ void start() const {
    const auto* from = reinterpret_cast<const uint4*>(norm.weight);
    for (int i = threadIdx.x; i < n_quads; i += blockDim.x) staged.unit(i) = load_weights(from + i);
  }
  // Stages x * weight; called by the whole block after grid_wait(). Returns 1 / rms, after a barrier of the block.
  __device__ __forceinline__ float fill() const {
    __shared__ float warp_squares[kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const auto* from = reinterpret_cast<const float4*>(norm.x);
    float squares = 0.0f;
    for (int base = threadIdx.x; base < n_quads; base += kInFlight * blockDim.x) {
      float4 x[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int i = base + u * static_cast<int>(blockDim.x);
        x[u] = i < n_quads ? __ldcg(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int i = base + u * static_cast<int>(blockDim.x);
        squares = fmaf(x[u].x, x[u].x, fmaf(x[u].y, x[u].y, fmaf(x[u].z, x[u].z, fmaf(x[u].w, x[u].w, squares))));
        if (i >= n_quads) continue;
        const uint4 w = staged.unit(i);  // this thread's own
        staged.unit(i) =
            make_uint4(__float_as_uint(x[u].x * __uint_as_float(w.x)), __float_as_uint(x[u].y * __uint_as_float(w.y)),
                       __float_as_uint(x[u].z * __uint_as_float(w.z)), __float_as_uint(x[u].w * __uint_as_float(w.w)));
      }
    }
    squares = group_sum(squares);
    if (lane == 0) warp_squares[warp] = squares;
    __syncthreads();
    const float sum = group_sum(lane < static_cast<int>(blockDim.x) / kWarp ? warp_squares[lane] : 0.0f);
    return 1.0f / sqrtf(sum / static_cast<float>(norm.n) + norm.eps);
  }
  // Writes the block's share of the norm's result. Called by whole warps; the first does it.
  __device__ __forceinline__ void store_result(float scale) const {
    if (threadIdx.x >= kWarp) return;
    for (int block = blockIdx.x; block < norm.n / 32; block += gridDim.x) {
      const int i = block * 32 + threadIdx.x;
      const float v = __ldcg(norm.x + i) * norm.weight[i] * scale;
      norm.out.x[i] = v;
      if (norm.out.q8 != nullptr) store_q8_block(v, static_cast<std::byte*>(norm.out.q8), norm.n, block);
    }
  }
};

}  // namespace hearth::cuda
