// The transposed down projection: y += sum_i value[i] * row[ids[i]]. Blocks own column tiles and shares of the rows;
// each accumulates in registers, and the block that finishes a tile last adds the shares in fixed order. No atomics on
// results: the same bits run after run.
#include "cuda/kernels.cuh"
#include "cuda/row_dots.cuh"

namespace hearth::cuda {
namespace {

constexpr int kTile = 256;     // columns of a tile, where a warp's 16-byte loads are that many
constexpr int kSegment = 512;  // rows whose values are staged at once

template <DType D>
constexpr int kTileLanes = kTile / Format<D>::kWeights < kWarp ? kTile / Format<D>::kWeights : kWarp;
template <DType D>
constexpr int kTileColumnsOf = kTileLanes<D>* Format<D>::kWeights;
constexpr int shared_bytes(int threads) {
  return std::max(threads / kWarp * kTile * static_cast<int>(sizeof(float)),
                  kSegment * static_cast<int>(sizeof(float) + sizeof(int32_t)));
}

// Threads of a block, blocks that share a multiprocessor, rows in flight a thread.
struct DownShape {
  int threads, blocks, unroll;
};
template <DType D>
constexpr DownShape down_shape = {512, 2, 4};
template <DType D>
requires(Format<D>::kWeights == 32)  // 32 sums take the registers
constexpr DownShape down_shape<D> = kManyRegisters<D> ? DownShape{256, 3, 2} : DownShape{512, 2, 2};

struct DownArgs {
  Matrix w;            // [n][n_embd]
  const float* value;  // [T][n]

  const int32_t* ids;
  const int32_t* count;
  const float* bias;
  float* y;            // [T][n_embd]
  float* partial;      // [T][splits][tiles][columns of a tile]
  unsigned* finished;  // [T][tiles] blocks that have written their share; zero before and after
};

// The block's column tile, summed over rows of the list. kLanes threads share a row.
template <DType D, int kThreads, int kUnroll>
struct TileSum {
  static constexpr int kLanes = kTileLanes<D>, kWeights = Format<D>::kWeights;
  static constexpr int kRowsPerStep = kThreads / kLanes;   // that the block handles at once
  static constexpr int kKept = kWeights * kLanes / kWarp;  // columns of a lane once the rows of its warp are added
  static_assert(kSegment % (kRowsPerStep * kUnroll) == 0,
                "a thread's chunks keep their places from segment to segment");

  const RowFields<D> fields;
  const std::byte* data;
  unsigned n_chunks;  // of a row
  unsigned chunk;     // of the row, this thread's
  int slot;           // of the thread's row in a step
  bool live;
  Chunk w[kUnroll];
  ScaledSum<D> sum;

  __device__ __forceinline__ explicit TileSum(const Matrix& m)
      : fields(m.cols), data(static_cast<const std::byte*>(m.data)) {
    n_chunks = static_cast<unsigned>(m.cols) / kWeights;
    chunk = blockIdx.y * kLanes + threadIdx.x % kLanes;
    slot = threadIdx.x / kLanes;
    live = chunk < n_chunks;
  }
  __device__ __forceinline__ void load(int u, unsigned row) {
    w[u] = fields.load(data + uint64_t{row} * fields.stride, 0, chunk);
  }
  // Requests the first of the n rows that row_of() names.
  template <typename RowOf>
  __device__ __forceinline__ void start(int n, RowOf row_of) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = slot + u * kRowsPerStep;
      if (live && i < n) load(u, row_of(i));
    }
  }
  // Adds rows [0, n), and goes on to request rows behind them, up to n_known.
  template <typename RowOf>
  __device__ __forceinline__ void run(int n, int n_known, const float* value, RowOf row_of) {
    if (!live) return;
    for (int base = slot; base < n; base += kRowsPerStep * kUnroll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int i = base + u * kRowsPerStep, next = i + kUnroll * kRowsPerStep;
        if (i >= n) continue;
        sum.add(w[u], value[i]);
        if (next < n_known) load(u, row_of(next));
      }
    }
  }
  // The sum over the block of the column that column() names, in the first kLanes * kWeights threads.
  __device__ __forceinline__ float total(float* shared) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    sum.finish();
    // Lanes of different rows: each exchange leaves a lane half of its columns, summed over twice the rows.
    int n = kWeights;
#pragma unroll
    for (int o = kWarp / 2; o >= kLanes; o /= 2) {
      n /= 2;
      const bool upper = (lane & o) != 0;
#pragma unroll
      for (int k = 0; k < kWeights / 2; ++k) {
        if (k >= n) break;
        const float mine = upper ? sum.acc[k + n] : sum.acc[k], other = upper ? sum.acc[k] : sum.acc[k + n];
        sum.acc[k] = mine + __shfl_xor_sync(kAllLanes, other, o);
      }
    }
#pragma unroll
    for (int k = 0; k < kKept; ++k) shared[(warp * kKept + k) * kWarp + lane] = sum.acc[k];
    __syncthreads();
    float v = 0.0f;
    if (threadIdx.x < kLanes * kWeights) {
#pragma unroll
      for (int s = 0; s < kThreads / kWarp; ++s) v += shared[s * kLanes * kWeights + threadIdx.x];
    }
    return v;
  }
  // Thread j's column of the tile, after total().
  static __device__ __forceinline__ int column(int j) {
    int first = 0, n = kWeights;
    for (int o = kWarp / 2; o >= kLanes; o /= 2) {
      n /= 2;
      if ((j % kWarp & o) != 0) first += n;
    }
    return j % kLanes * kWeights + first + j / kWarp;
  }
};

// Grid: (T, tiles, splits).
template <DType D, int kThreads, int kBlocks, int kUnroll>
__global__ void __launch_bounds__(kThreads, kBlocks) down_kernel(const __grid_constant__ DownArgs a) {
  constexpr int kColumns = kTileColumnsOf<D>;
  static_assert(kColumns <= kThreads);
  extern __shared__ float shared[];
  __shared__ bool last_block;
  float* values = shared;
  auto* ids = reinterpret_cast<int32_t*>(shared + kSegment);
  grid_trigger();
  TileSum<D, kThreads, kUnroll> tile(a.w);
  const auto share = [&](int64_t count, int64_t i) { return count * i / gridDim.z; };
  const bool all_rows = a.ids == nullptr;  // then they are known before their values are
  if (all_rows) {
    const int64_t begin = share(a.w.rows, blockIdx.z);
    tile.start(static_cast<int>(share(a.w.rows, blockIdx.z + 1) - begin),
               [&](int i) { return static_cast<unsigned>(begin + i); });
  }
  grid_wait();
  const int64_t count = all_rows ? a.w.rows : __ldcg(a.count);
  const int64_t end = share(count, blockIdx.z + 1);
  const float* const value = a.value + blockIdx.x * a.w.rows;
  for (int64_t begin = share(count, blockIdx.z); begin < end; begin += kSegment) {
    const int n_known = static_cast<int>(end - begin), n = min(n_known, kSegment);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads) {
      values[i] = __ldcg(value + begin + i);
      if (!all_rows) ids[i] = __ldcg(a.ids + begin + i);
    }
    __syncthreads();
    if (all_rows) {
      tile.run(n, n_known, values, [&](int i) { return static_cast<unsigned>(begin + i); });
    } else {
      const auto row_of = [&](int i) { return static_cast<unsigned>(ids[i]); };
      tile.start(n, row_of);
      tile.run(n, n, values, row_of);
    }
  }
  __syncthreads();
  float v = tile.total(shared);
  const int j = static_cast<int>(threadIdx.x);
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns + tile.column(j);
  const bool writes = j < kColumns && column < a.w.cols;
  float* const to = a.y + blockIdx.x * a.w.cols + column;
  float y = 0.0f;
  if (writes) y = __ldcg(to) + (a.bias != nullptr ? a.bias[column] : 0.0f);
  if (gridDim.z > 1) {
    const int64_t stride = static_cast<int64_t>(gridDim.y) * kColumns;
    float* partial = a.partial + blockIdx.x * gridDim.z * stride + static_cast<int64_t>(blockIdx.y) * kColumns + j;
    unsigned* finished = a.finished + blockIdx.x * gridDim.y + blockIdx.y;
    if (j < kColumns) __stcg(partial + blockIdx.z * stride, v);
    __threadfence();  // the share is visible before it is counted
    __syncthreads();
    if (j == 0) {
      last_block = atomicAdd(finished, 1u) == gridDim.z - 1;
      if (last_block) *finished = 0;  // for the next launch
    }
    __syncthreads();
    if (!last_block || !writes) return;
    __threadfence();
    v = 0.0f;
#pragma unroll 16
    for (int s = 0; s < static_cast<int>(gridDim.z); ++s) v += __ldcg(partial + s * stride);
  }
  if (writes) *to = y + v;
}

constexpr int64_t max_tiles(int64_t n_embd) {
  return ceil_div(n_embd, kTileColumnsOf<DType::f32>);
}

void launch_down(const Gpu& gpu, int64_t T, const DownArgs& args) {
  const Matrix& w = args.w;
  with_format(w.type, [&]<DType D>() {
    constexpr int kWeights = Format<D>::kWeights;
    if (w.cols % kWeights != 0) {
      fail(
          "a transposed down projection on the GPU needs rows of a multiple of {} elements, found {}; use --device cpu",
          kWeights, w.cols);
    }
    constexpr int kThreads = down_shape<D>.threads, kBlocks = down_shape<D>.blocks;
    const DownPlan plan =
        down_plan(w.cols, kTileColumnsOf<D>, w.rows, 2 * kThreads / kTileLanes<D>, kBlocks * gpu.multiprocessors);
    launch(gpu, down_kernel<D, kThreads, kBlocks, down_shape<D>.unroll>,
           dim3(grid_size(T), grid_size(plan.tiles), grid_size(plan.splits)), kThreads, shared_bytes(kThreads), args);
  });
}

}  // namespace

DownScratch down_scratch(int64_t n_embd, int64_t T) {
  return {static_cast<size_t>(T * kMaxDownSplits * round_up(n_embd, kTile)) * sizeof(float),
          static_cast<size_t>(T * max_tiles(n_embd)) * sizeof(unsigned)};
}

void down_rows(const Gpu& gpu, const Matrix& down_t, const float* value, int64_t T, Vector bias, float* partial,
               unsigned* counters, float* y) {
  launch_down(gpu, T, {down_t, value, nullptr, nullptr, bias.data, y, partial, counters});
}

void down_listed_rows(const Gpu& gpu, const Matrix& down_t, const float* value, const int32_t* ids,
                      const int32_t* count, Vector bias, float* partial, unsigned* counters, float* y) {
  launch_down(gpu, 1, {down_t, value, ids, count, bias.data, y, partial, counters});
}

}  // namespace hearth::cuda
