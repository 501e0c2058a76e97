#pragma once
// The input of a product in shared memory, copied there or normed on the way.
//
// The RMS norm of a single token costs a kernel that does next to nothing: every block of the product after it reads
// the whole input anyway. So the product can do the norm itself: blocks stage x * weight while they sum x^2, and the
// factor 1 / rms is applied to the finished dot products.
#include "cuda/format.cuh"
#include "cuda/launch.cuh"

namespace hearth::cuda {

// Columns of the input that are staged in shared memory at once.
template <DType D>
constexpr int kTileColumns = Format<D>::kQuantized ? 12288 : 8192;
constexpr int kMaxNormColumns = 8192;  // of an input that is normed on the way: one tile in every format

// Bytes of shared memory that stages the input of rows of `cols` columns.
template <DType D>
constexpr size_t stage_bytes(int64_t cols) {
  const int64_t columns = cols < kTileColumns<D> ? cols : kTileColumns<D>;
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
    constexpr int kTileChunks = kTileColumns<D> / F::kWeights;
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

// An RMS norm of one row of n elements, n a multiple of 32 and at most kMaxNormColumns.
struct InputNorm {
  const float* x = nullptr;  // null: there is no norm to do
  const float* weight = nullptr;
  float eps = 0.0f;
  int n = 0;
  Act out;  // gets the result too, for operations to come
};

// Writes one of n_workers' share of the norm's result. Called by a warp.
__device__ __forceinline__ void store_norm(const InputNorm& norm, float scale, int worker, int n_workers) {
  for (int block = worker; block < norm.n / 32; block += n_workers) {
    const int i = block * 32 + static_cast<int>(threadIdx.x % kWarp);
    const float v = __ldcg(norm.x + i) * norm.weight[i] * scale;
    norm.out.x[i] = v;
    if (norm.out.q8 != nullptr) store_q8_block(v, static_cast<std::byte*>(norm.out.q8), norm.n, block);
  }
}

__device__ __forceinline__ float sum_of_squares(const float4& v, float sum) {
  return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
}
__device__ __forceinline__ float4 multiply(const float4& a, const float4& b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// Groups of four of a row's elements, spread over the threads of a block: the next kQuads of this thread.
template <int kQuads>
struct RowQuads {
  float4 v[kQuads];
  // Those of row [n_quads * 4]; whole warps take part, so that the blocks of 32 can be quantised.
  __device__ __forceinline__ void load(const float* row, int base, int n_quads) {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int i = base + u * static_cast<int>(blockDim.x);
      v[u] = i < n_quads ? __ldcg(reinterpret_cast<const float4*>(row) + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
};

// The 8-bit form of x [n], or of x * weight where that is given, n a multiple of 32, as quantize_rows() makes it: calls
// store(quad, q), and the scale is worth storing when quad % 8 is 0. Called by the whole block; returns the sum of the
// thread's x^2.
template <typename Store>
__device__ __forceinline__ float quantize_by_block(const float* x, const float* weight, int n, Store store) {
  constexpr int kQuads = 4;
  const int n_quads = n / 4;
  float squares = 0.0f;
#pragma unroll 1
  for (int first = 0; first < n_quads; first += kQuads * static_cast<int>(blockDim.x)) {
    const int base = first + static_cast<int>(threadIdx.x);
    RowQuads<kQuads> a, w;
    a.load(x, base, n_quads);
    if (weight != nullptr) w.load(weight, base, n_quads);
    float values[kQuads][4];
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      squares = sum_of_squares(a.v[u], squares);
      const float4 v = weight != nullptr ? multiply(a.v[u], w.v[u]) : a.v[u];
      values[u][0] = v.x, values[u][1] = v.y, values[u][2] = v.z, values[u][3] = v.w;
    }
    Q8Quad q[kQuads];
    quantize_quads<kQuads, true>(values, q);
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int quad = base + u * static_cast<int>(blockDim.x);
      if (quad < n_quads) store(quad, q[u]);
    }
  }
  return squares;
}

template <DType D>
struct NormedInput {
  static_assert(!Format<D>::kQuantized, "quantising the input anew in every block takes longer than a norm of its own");
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
    const float squares = group_sum(stage());
    if (lane == 0) warp_squares[warp] = squares;
    __syncthreads();
    const float sum = group_sum(lane < static_cast<int>(blockDim.x) / kWarp ? warp_squares[lane] : 0.0f);
    return 1.0f / sqrtf(sum / static_cast<float>(norm.n) + norm.eps);
  }
  // Returns the sum of the thread's x^2.
  __device__ __forceinline__ float stage() const {
    float squares = 0.0f;
    for (int base = threadIdx.x; base < n_quads; base += kInFlight * blockDim.x) {
      RowQuads<kInFlight> x;
      x.load(norm.x, base, n_quads);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int i = base + u * static_cast<int>(blockDim.x);
        squares = sum_of_squares(x.v[u], squares);
        if (i >= n_quads) continue;
        const uint4 w = staged.unit(i);  // this thread's own
        const float4 v = multiply(x.v[u], make_float4(__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z),
                                                      __uint_as_float(w.w)));
        staged.unit(i) =
            make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
      }
    }
    return squares;
  }
  // Writes the block's share of the norm's result. Called by whole warps; the first does it.
  __device__ __forceinline__ void store_result(float scale) const {
    if (threadIdx.x < kWarp) store_norm(norm, scale, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  }
};

}  // namespace hearth::cuda
