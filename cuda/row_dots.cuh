#pragma once
// The heart of decoding: a warp's dot products of a few weight rows with one input row.
//
// The rows of a pass share every load of the input, kUnroll chunks of each are in flight in each lane, and each chunk's
// register is refilled as soon as it has been used, at last with chunks of the next pass, so that the memory system
// always has work. The first chunks are requested before grid_wait(), while the kernel that produces the input still
// runs.
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

// kRows rows in kBases runs of consecutive rows (gate rows and up rows, say). A pass takes as many of each run.
template <DType D, int kRows, int kUnroll, int kBases = 1, int kPasses = 1>
struct RowDots {
  using F = Format<D>;
  static constexpr int kRunRows = kRows / kBases, kPassRows = kRunRows / kPasses;  // of a run; and in a pass
  static constexpr int kTileChunks = kTileColumns<D> / F::kWeights;
  static_assert(kTileChunks % (kWarp * kUnroll) == 0, "a batch of chunks must not straddle tiles");

  const RowFields<D> fields;
  const std::byte* base[kBases];
  int n_chunks;  // of a row
  bool live;     // a warp without rows still helps to stage the input
  Chunk w[kBases][kPassRows][kUnroll];
  float sum[kBases][kRunRows];

  __device__ __forceinline__ explicit RowDots(int cols) : fields(cols), n_chunks(cols / F::kWeights) {}
  __device__ __forceinline__ void set_rows(int b, const void* data, int64_t first_row) {
    base[b] = static_cast<const std::byte*>(data) + first_row * fields.stride;
  }
  __device__ __forceinline__ void load(int pass, int r, int u, int c) {
    const unsigned row = static_cast<unsigned>(pass * kPassRows + r) * fields.stride;
#pragma unroll
    for (int b = 0; b < kBases; ++b) {
      if (live && c < n_chunks) w[b][r][u] = fields.load(base[b], row, static_cast<unsigned>(c));
    }
  }
  // Requests the first chunks. May be called before grid_wait().
  __device__ __forceinline__ void start() {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < kPassRows; ++r) load(0, r, u, lane + u * kWarp);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r / kRunRows][r % kRunRows] = 0.0f;
  }
  // Called by the whole block, after grid_wait(). Leaves each row's dot product in sum[], in every lane.
  __device__ __forceinline__ void run(const InputRow& in, uint4* shared) {
    StagedInput<D> staged(shared, n_chunks);
    for (int tile = 0; tile < n_chunks; tile += kTileChunks) {
      const int end = min(tile + kTileChunks, n_chunks);
      if (tile > 0) __syncthreads();
      staged.fill(in, tile, end - tile);
      __syncthreads();
      if (live) add_tile(staged, tile, end);
    }
    add_lanes(1.0f);
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
    if (live) add_tile(normed.staged, 0, n_chunks);
    add_lanes(scale);
  }

 private:
  // Adds the products of chunks [tile, end), pass by pass.
  __device__ __forceinline__ void add_tile(const StagedInput<D>& staged, int tile, int end) {
    const int first = tile + static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      for (int batch = 0; tile + batch < end; batch += kWarp * kUnroll) {
        const bool ends = kPasses > 1 && tile + batch + kWarp * kUnroll >= end;  // the pass
        const int next_pass = ends ? (pass + 1) % kPasses : pass;
        const int step = ends && next_pass > 0 ? -batch : kWarp * kUnroll;  // to the chunk that is requested next
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int c = first + batch + u * kWarp;
          const bool exists = c < n_chunks;  // if not, there may be one to request
          if (kPasses == 1 && !exists) continue;
          const ChunkInput<D> x(staged, exists ? c - tile : 0);
#pragma unroll
          for (int r = 0; r < kPassRows; ++r) {
#pragma unroll
            for (int b = 0; b < kBases; ++b) {
              float& total = sum[b][pass * kPassRows + r];
              if (exists) total = x.dot(w[b][r][u], total);
            }
            load(next_pass, r, u, c + step);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void add_lanes(float scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float& total = sum[r / kRunRows][r % kRunRows];
      total = group_sum(total) * scale;
    }
  }
};

}  // namespace hearth::cuda
