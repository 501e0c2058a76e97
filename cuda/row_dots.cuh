#pragma once
// The heart of decoding: a warp's dot products of a few weight rows with one input row.
//
// kRows rows share every load of the input, kUnroll chunks a row are in flight in each lane, and each chunk's register
// is refilled as soon as it has been used, so that the memory system always has work. The first chunks are requested
// before grid_wait(), while the kernel that produces the input still runs.
#include "cuda/format.cuh"
#include "cuda/launch.cuh"

namespace hearth::cuda {

constexpr int kMatvecWarps = 8;
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
  // Called by the whole block, between barriers.
  __device__ __forceinline__ void fill(const InputRow& in, int first_chunk, int n_chunks) {
    const uint4* from = in.units + static_cast<int64_t>(first_chunk) * F::kUnits;
    for (int i = threadIdx.x; i < n_chunks * F::kUnits; i += blockDim.x) {
      units[i % F::kUnits * plane + i / F::kUnits] = __ldcg(from + i);
    }
    if constexpr (F::kQuantized) {
      const auto* from_scales = reinterpret_cast<const float2*>(in.scales + first_chunk * F::kWeights / 32);
      for (int i = threadIdx.x; i < n_chunks * F::kWeights / 32; i += blockDim.x) {
        reinterpret_cast<float2*>(scales)[i] = __ldcg(from_scales + i);
      }
    }
  }
};

// The input of one chunk, in registers.
template <DType D>
struct ChunkInput {
  using F = Format<D>;
  uint4 units[F::kUnits];
  Q8Scale scale;

  __device__ __forceinline__ ChunkInput(const StagedInput<D>& staged, int c) {
#pragma unroll
    for (int u = 0; u < F::kUnits; ++u) units[u] = staged.units[u * staged.plane + c];
    if constexpr (F::kQuantized) scale = staged.scales[c * F::kWeights / 32];
  }
  __device__ __forceinline__ float dot(const Chunk& w, float sum) const {
    if constexpr (F::kQuantized) {
      return sum + F::dot(w, units, scale);
    } else {
      float values[F::kWeights];
      F::decode(w, values);
      const float* x = reinterpret_cast<const float*>(units);
#pragma unroll
      for (int i = 0; i < F::kWeights; ++i) sum = fmaf(values[i], x[i], sum);
      return sum;
    }
  }
};

// kRows rows in kBases runs of consecutive rows (gate rows and up rows, say).
template <DType D, int kRows, int kUnroll, int kBases = 1>
struct RowDots {
  using F = Format<D>;
  static constexpr int kRowsPerBase = kRows / kBases;
  static constexpr int kTileChunks = kTileColumns / F::kWeights;
  static_assert(kTileChunks % (kWarp * kUnroll) == 0, "a batch of chunks must not straddle tiles");

  const uint4* base[kBases];
  const unsigned short* scales[kBases];
  int n_chunks;  // of a row
  bool live;     // a warp without rows still helps to stage the input
  Chunk w[kRows][kUnroll];
  float sum[kRows];

  __device__ __forceinline__ void set_rows(int b, const void* data, const void* all_scales, int64_t first_row,
                                           int cols) {
    base[b] = static_cast<const uint4*>(data) + first_row * (cols / F::kWeights);
    scales[b] = static_cast<const unsigned short*>(all_scales) + first_row * (cols / 32);
    n_chunks = cols / F::kWeights;
  }
  __device__ __forceinline__ void load(int r, int u, int c) {
    const int64_t row = r % kRowsPerBase;
    if (live && c < n_chunks) {
      w[r][u] = load_chunk<D>(base[r / kRowsPerBase] + row * n_chunks,
                              scales[r / kRowsPerBase] + row * (n_chunks * F::kWeights / 32), c);
    }
  }
  // Requests the first chunks. May be called before grid_wait().
  __device__ __forceinline__ void start() {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) load(r, u, lane + u * kWarp);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = 0.0f;
  }
  // Called by the whole block, after grid_wait(). Leaves each row's dot product in sum[], in every lane.
  __device__ __forceinline__ void run(const InputRow& in, uint4* shared) {
    const int lane = threadIdx.x % kWarp;
    StagedInput<D> staged(shared, n_chunks);
    for (int tile = 0; tile < n_chunks; tile += kTileChunks) {
      const int end = min(tile + kTileChunks, n_chunks);
      if (tile > 0) __syncthreads();
      staged.fill(in, tile, end - tile);
      __syncthreads();
      if (!live) continue;
      for (int batch = tile; batch < end; batch += kWarp * kUnroll) consume(staged, tile, batch + lane);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = group_sum(sum[r]);
  }

 private:
  __device__ __forceinline__ void consume(const StagedInput<D>& staged, int tile, int c) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u, c += kWarp) {
      if (c >= n_chunks) continue;
      const ChunkInput<D> x(staged, c - tile);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] = x.dot(w[r][u], sum[r]);
        load(r, u, c + kWarp * kUnroll);
      }
    }
  }
};

}  // namespace hearth::cuda
