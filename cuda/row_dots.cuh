#pragma once
// The heart of decoding: a warp's dot products of a few weight rows with one input row.
//
// kRows rows share every load of the input, kUnroll chunks a row are in flight in each lane, and each chunk's register
// is refilled as soon as it has been used, so that the memory system always has work. The first chunks are requested
// before grid_wait(), while the kernel that produces the input still runs.
#include "cuda/format.cuh"
#include "cuda/launch.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

constexpr int kMatvecWarps = 8;

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
  static constexpr int kTileChunks = kTileColumns<D> / F::kWeights;
  static_assert(kTileChunks % (kWarp * kUnroll) == 0, "a batch of chunks must not straddle tiles");

  const RowFields<D> fields;
  const std::byte* base[kBases];
  int n_chunks;  // of a row
  bool live;     // a warp without rows still helps to stage the input
  Chunk w[kRows][kUnroll];
  float sum[kRows];

  __device__ __forceinline__ explicit RowDots(int cols) : fields(cols), n_chunks(cols / F::kWeights) {}
  __device__ __forceinline__ void set_rows(int b, const void* data, int64_t first_row) {
    base[b] = static_cast<const std::byte*>(data) + first_row * fields.stride;
  }
  __device__ __forceinline__ void load(int r, int u, int c) {
    const auto row = static_cast<unsigned>(r % kRowsPerBase);
    if (live && c < n_chunks) w[r][u] = fields.load(base[r / kRowsPerBase], row * fields.stride, static_cast<unsigned>(c));
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
  // The same in kernels with a token dimension, where the input is the result of a norm to be done here, unless norm.x
  // is null; a token's blocks write that result too, each a share.
  __device__ __forceinline__ void start_norm(const InputNorm& norm, uint4* shared) const {
    if (norm.x != nullptr) NormedInput<D>(norm, shared).start();
  }
  __device__ __forceinline__ void run(const InputNorm& norm, const InputRow& in, uint4* shared) {
    if (norm.x == nullptr) return run(in, shared);
    NormedInput<D> normed(norm, shared);
    normed.fill();
    const float scale = normed.scale();
    if (threadIdx.x < kWarp) normed.store_result(scale);  // its stores pass beside the products
    const int lane = threadIdx.x % kWarp;
    for (int batch = 0; live && batch < n_chunks; batch += kWarp * kUnroll) consume(normed.staged, 0, batch + lane);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = group_sum(sum[r]) * scale;
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
