// Experts of many tokens on tensor cores. Tokens are grouped by expert on the GPU itself, so that nothing waits for the
// host; one launch has all experts. Weights are turned into f16 on their way into shared memory, a tile at a time.
#include "cuda/activation.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/experts.cuh"
#include "cuda/format.cuh"
#include "cuda/mma.cuh"

namespace hearth::cuda {
namespace {

// --- grouping ---

constexpr int kGroupThreads = 1024;

// A position among the pairs of an expert depends on which thread came first. No result does: pairs of a tile are
// computed alike, wherever they are in it.
__global__ void __launch_bounds__(kGroupThreads) group_kernel(ExpertRun run, int n_pairs, PairGroups to) {
  __shared__ int count[kMostExperts + 1], first[kMostExperts + 1], first_tile[kMostExperts + 1];
  const int tid = static_cast<int>(threadIdx.x);
  grid_trigger();
  for (int e = tid; e < run.n_experts; e += kGroupThreads) count[e] = 0;
  grid_wait();
  __syncthreads();
  const auto expert_of = [&](int p) {
    const int id = __ldcg(run.ids + p / run.n_slots * run.n_named + run.first_slot + p % run.n_slots);
    return run.table[id].gate != nullptr ? id : -1;
  };
  for (int p = tid; p < n_pairs; p += kGroupThreads) {
    const int e = expert_of(p);
    if (e >= 0) atomicAdd(&count[e], 1);
  }
  __syncthreads();
  if (tid < kWarp) {
    int pairs = 0, tiles = 0;  // of the experts before
    for (int base = 0; base < run.n_experts; base += kWarp) {
      const int e = base + tid, own = e < run.n_experts ? count[e] : 0,
                own_tiles = (own + kTileTokens - 1) / kTileTokens;
      int sum = own, sum_tiles = own_tiles;
#pragma unroll
      for (int o = 1; o < kWarp; o *= 2) {
        const int before = __shfl_up_sync(kAllLanes, sum, o), tiles_before = __shfl_up_sync(kAllLanes, sum_tiles, o);
        if (tid >= o) sum += before, sum_tiles += tiles_before;
      }
      if (e < run.n_experts) first[e] = pairs + sum - own, first_tile[e] = tiles + sum_tiles - own_tiles;
      pairs += __shfl_sync(kAllLanes, sum, kWarp - 1), tiles += __shfl_sync(kAllLanes, sum_tiles, kWarp - 1);
    }
    if (tid == 0) *to.n_tiles = tiles;
  }
  __syncthreads();
  for (int e = tid; e < run.n_experts; e += kGroupThreads) {
    for (int k = 0; k < count[e]; k += kTileTokens) {
      to.tiles[first_tile[e] + k / kTileTokens] = make_int4(e, first[e] + k, min(kTileTokens, count[e] - k), 0);
    }
  }
  __syncthreads();
  for (int p = tid; p < n_pairs; p += kGroupThreads) {
    const int e = expert_of(p);
    const int at = e >= 0 ? atomicAdd(&first[e], 1) : -1;
    to.position[p] = at;
    if (at >= 0) to.pair[at] = p;
  }
}

// --- products ---

// A block multiplies kTileRows rows of weights, in two groups of 32, by the kTileTokens pairs of a tile, kTileDepth
// columns at a time. A warp has 16 rows of each group and half of the pairs.
constexpr int kTileRows = 64, kTileDepth = 64, kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kStride = kTileDepth + 8;  // so that eight rows of fragments lie in different banks

struct ProductArgs {
  ExpertRun run;
  PairGroups groups;
  NeuronArgs neuron;
  const __half* x;
  int rows_per_x;  // pairs that share a row of x; 0: x has a row by position
  __half* values;  // of gate and up: [positions][n]
  float* sums;     // of down: [positions][n_embd]
  int rows, cols;  // of a matrix
};

template <DType D>
struct Tile {
  using F = Format<D>;
  static constexpr int kPerRow = kTileDepth / F::kWeights, kChunks = kTileRows * kPerRow / kThreads;
  const RowFields<D> fields;
  const std::byte* row[kChunks];  // of the thread's chunks
  int n_chunks;
  Chunk w[kChunks];

  __device__ __forceinline__ explicit Tile(int cols) : fields(cols), n_chunks(cols / F::kWeights) {}
  static __device__ __forceinline__ int row_at(int k) {
    return (static_cast<int>(threadIdx.x) + k * kThreads) / kPerRow;
  }
  static __device__ __forceinline__ int chunk_at(int k) {
    return (static_cast<int>(threadIdx.x) + k * kThreads) % kPerRow;
  }
  __device__ __forceinline__ void load(int step) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int c = step * kPerRow + chunk_at(k);
      if (c < n_chunks) w[k] = fields.load(row[k], 0, static_cast<unsigned>(c));
    }
  }
  __device__ __forceinline__ void store(int step, __half (*to)[kStride]) const {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      uint4* const out = reinterpret_cast<uint4*>(&to[row_at(k)][chunk_at(k) * F::kWeights]);
      const bool beyond = step * kPerRow + chunk_at(k) >= n_chunks;
      if constexpr (D == DType::f16) {
        *out = beyond ? make_uint4(0, 0, 0, 0) : w[k].q;
      } else {
        float values[F::kWeights];
        F::decode(w[k], values);
#pragma unroll
        for (int i = 0; i < F::kWeights / 8; ++i) {
          const float* v = values + 8 * i;
          out[i] = beyond ? make_uint4(0, 0, 0, 0)
                          : make_uint4(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]),
                                       pack_half2(v[6], v[7]));
        }
      }
    }
  }
};

__device__ __forceinline__ float finite_half(float v) {
  return isnan(v) ? v : fminf(fmaxf(v, -65504.0f), 65504.0f);
}

// Grid: (blocks of rows, tiles). Of gate and up a block has 32 rows of each; of one matrix alone 64 rows.
template <DType D, bool kDown>
__global__ void __launch_bounds__(kThreads) product_kernel(const __grid_constant__ ProductArgs a) {
  __shared__ alignas(16) __half weights[2][kTileRows][kStride], inputs[2][kTileTokens][kStride];
  grid_trigger();
  grid_wait();
  if (static_cast<int>(blockIdx.y) >= __ldcg(a.groups.n_tiles)) return;
  const int4 tile = __ldcg(a.groups.tiles + blockIdx.y);
  const ExpertEntry e = a.run.table[tile.x];
  const bool gated = !kDown && e.up != nullptr;
  const int n_tokens = tile.z, tid = static_cast<int>(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  const int first_row = static_cast<int>(blockIdx.x) * (gated ? 32 : 64);

  Tile<D> tiles(a.cols);
#pragma unroll
  for (int k = 0; k < Tile<D>::kChunks; ++k) {
    const int r = tiles.row_at(k);
    const bool second = gated && r >= 32;
    const std::byte* const data = kDown ? e.down : second ? e.up : e.gate;
    tiles.row[k] = data + uint64_t{static_cast<unsigned>(min(first_row + (second ? r - 32 : r), a.rows - 1))} *
                              tiles.fields.stride;
  }
  // The thread's units of 8 inputs, and their rows.
  constexpr int kUnits = kTileTokens * kTileDepth / 8 / kThreads;
  const __half* x[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int token = (tid + k * kThreads) / (kTileDepth / 8), at = tile.y + min(token, n_tokens - 1);
    const int row = a.rows_per_x > 0 ? __ldcg(a.groups.pair + at) / a.rows_per_x : at;
    x[k] = token < n_tokens ? a.x + static_cast<int64_t>(row) * a.cols : nullptr;
  }
  const auto copy_inputs = [&](int step, __half(*to)[kStride]) {
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      const int token = (tid + k * kThreads) / (kTileDepth / 8), c = (tid + k * kThreads) % (kTileDepth / 8) * 8;
      const int column = step * kTileDepth + c;
      if (x[k] != nullptr && column < a.cols) {
        copy_async<16>(&to[token][c], x[k] + column);
      } else {
        *reinterpret_cast<uint4*>(&to[token][c]) = make_uint4(0, 0, 0, 0);
      }
    }
    end_copy_group();
  };

  const int rows16 = warp % 2 * 16, tokens32 = warp / 2 * 32;
  FragmentC sum[2][2][2] = {};  // 16 pairs, group of rows, 8 rows
  const int steps = (a.cols + kTileDepth - 1) / kTileDepth;
  tiles.load(0);
  copy_inputs(0, inputs[0]);
  tiles.store(0, weights[0]);
  for (int step = 0; step < steps; ++step) {
    const int buffer = step % 2;
    wait_copy_groups<0>();
    __syncthreads();
    if (step + 1 < steps) tiles.load(step + 1), copy_inputs(step + 1, inputs[buffer ^ 1]);
#pragma unroll
    for (int k = 0; k < kTileDepth; k += 16) {
      unsigned b[2][4];
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        load_matrices(b[g], &weights[buffer][g * 32 + rows16 + lane % 8 + lane / 16 * 8][k + lane / 8 % 2 * 8]);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (tokens32 + m * 16 >= n_tokens) continue;
        FragmentA in;
        load_matrices(in.r, &inputs[buffer][tokens32 + m * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          mma(sum[m][g][0], in, b[g][0], b[g][1]);
          mma(sum[m][g][1], in, b[g][2], b[g][3]);
        }
      }
    }
    if (step + 1 < steps) tiles.store(step + 1, weights[buffer ^ 1]);
  }

  NeuronArgs neuron = a.neuron;
  neuron.gate_bias = e.gate_bias, neuron.up_bias = e.up_bias;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tokens32 + m * 16 + lane / 4 + half * 8;
      if (token >= n_tokens) continue;
      const int64_t at = static_cast<int64_t>(tile.y + token) * a.rows;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          if (gated && g == 1) continue;
          const int r = first_row + g * 32 + rows16 + i * 8 + lane % 4 * 2;
          if (r >= a.rows) continue;
          const float low = sum[m][g][i].v[2 * half], high = sum[m][g][i].v[2 * half + 1];
          if constexpr (kDown) {
            *reinterpret_cast<float2*>(a.sums + at + r) = {low, high};
          } else {
            float up[2] = {1.0f, 1.0f};
            if (gated) {
              up[0] = neuron.up(sum[m][1][i].v[2 * half], r);
              up[1] = neuron.up(sum[m][1][i].v[2 * half + 1], r + 1);
            }
            const float v[2] = {value_above(a.run.threshold, neuron.gate(low, r), up[0]),
                                value_above(a.run.threshold, neuron.gate(high, r + 1), up[1])};
            *reinterpret_cast<unsigned*>(a.values + at + r) = pack_half2(finite_half(v[0]), finite_half(v[1]));
          }
        }
      }
    }
  }
}

// y[t][c] += the sum over the token's slots, in their order.
__global__ void add_sums_kernel(ExpertRun run, PairGroups groups, const float* sums, int64_t n_embd, float* y) {
  grid_trigger();
  grid_wait();
  const int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, t = blockIdx.y;
  if (c >= n_embd) return;
  float sum = 0.0f;
  for (int i = 0; i < run.n_slots; ++i) {
    const int at = __ldcg(groups.position + t * run.n_slots + i);
    if (at < 0) continue;
    const int64_t slot = t * run.n_named + run.first_slot + i;
    const float* const bias = run.table[__ldcg(run.ids + slot)].down_bias;
    const float v = __ldcg(sums + at * n_embd + c) + (bias != nullptr ? bias[c] : 0.0f);
    sum = fmaf(__ldcg(run.weights + slot), v, sum);
  }
  y[t * n_embd + c] += sum;
}

template <bool kDown>
void launch_product(const Gpu& gpu, DType type, int64_t row_blocks, int64_t T, const ProductArgs& args) {
  const int64_t most = PairGroups::most_tiles(T * args.run.n_slots, args.run.n_experts);
  HEARTH_CHECK(most <= 65535 && args.cols % 8 == 0 && args.rows % 2 == 0, "{} tiles of {} x {}", most, args.rows,
               args.cols);
  with_format(type, [&]<DType D>() {
    if constexpr (D == DType::f32) {
      HEARTH_CHECK(false, "f32 experts are not multiplied in f16");
    } else {
      launch(gpu, product_kernel<D, kDown>, dim3(grid_size(row_blocks), grid_size(most)), kThreads, 0, args);
    }
  });
}

const __half* as_half(const f16_t* p) {
  return reinterpret_cast<const __half*>(p);
}

}  // namespace

PairGroups PairGroups::at(int32_t* memory, int64_t n_pairs, int64_t n_experts) {
  const int64_t tiles = most_tiles(n_pairs, n_experts);
  return {memory + 4 * tiles + 4, memory + 4 * tiles + 4 + n_pairs, reinterpret_cast<int4*>(memory),
          memory + 4 * tiles};
}

void group_pairs(const Gpu& gpu, const ExpertRun& run, int64_t T, const PairGroups& groups) {
  launch(gpu, group_kernel, 1, kGroupThreads, 0, run, static_cast<int>(T * run.n_slots), groups);
}

void experts_gate_up(const Gpu& gpu, const ExpertRun& run, const PairGroups& groups, const f16_t* x, int64_t T,
                     f16_t* hidden) {
  const FfnShard& s = run.shape;
  const ProductArgs args{run,
                         groups,
                         neuron_args(s),
                         as_half(x),
                         run.n_slots,
                         reinterpret_cast<__half*>(hidden),
                         nullptr,
                         static_cast<int>(s.n()),
                         static_cast<int>(s.gate.cols)};
  launch_product<false>(gpu, s.gate.type, ceil_div(s.n(), s.up ? 32 : 64), T, args);
}

void experts_down(const Gpu& gpu, const ExpertRun& run, const PairGroups& groups, const f16_t* hidden, int64_t T,
                  float* sums, float* y) {
  const Matrix& w = run.shape.down;
  const ProductArgs args{
      run, groups, {}, as_half(hidden), 0, nullptr, sums, static_cast<int>(w.rows), static_cast<int>(w.cols)};
  launch_product<true>(gpu, w.type, ceil_div(w.rows, 64), T, args);
  launch(gpu, add_sums_kernel, dim3(grid_size(ceil_div(w.rows, 256)), grid_size(T)), 256, 0, run, groups, sums, w.rows,
         y);
}

}  // namespace hearth::cuda
