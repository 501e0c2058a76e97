// Causal attention of many tokens on tensor cores, tile by tile with an online softmax (FlashAttention-2, Dao 2023):
// scores live in registers and are never written. A block has 64 queries of one head; a warp has 16 of them.
//
// One launch has the blocks of many runs, each of one sequence.
#include "cuda/attention.cuh"
#include "cuda/mma.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kQueries = 16 * kWarps;
constexpr float kNone = -1e30f;  // the score of a masked key

// A run as the kernel has it: its blocks of the grid begin at first_block.
struct PrefillRun {
  int first_block, first_row, n_rows, first_position;
};
constexpr int kMaxRuns = 64;  // of one launch: what its arguments have room for
struct PrefillArgs {
  AttentionArgs a;
  float* out;
  int n_runs;
  PrefillRun runs[kMaxRuns];
};

template <int kDim>
constexpr int kKeys = kDim > 128 ? 32 : 64;  // of a tile
template <int kDim>
constexpr int kRow = kDim + 8;  // halves between tile rows: the padding keeps ldmatrix free of bank conflicts

// A tile of one head's keys or values, which lie at `cache`: positions [first, first + kKeys), of one page. Zeros
// outside [begin, end) and past head_dim.
template <int kDim>
__device__ __forceinline__ void load_tile(__half* tile, const f16_t* cache, int first, int begin, int end,
                                          int head_dim) {
  constexpr int kUnits = kDim / 8;
  static_assert(kPage % kKeys<kDim> == 0);
#pragma unroll
  for (int i = threadIdx.x; i < kKeys<kDim> * kUnits; i += kWarps * kWarp) {
    const int row = i / kUnits, unit = i % kUnits;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (first + row >= begin && first + row < end && unit * 8 < head_dim) {
      v = __ldcg(reinterpret_cast<const uint4*>(cache + row * head_dim + unit * 8));
    }
    *reinterpret_cast<uint4*>(tile + row * kRow<kDim> + unit * 8) = v;
  }
}

// A warp's 16 queries: their fragments, running softmax, and output. A lane has rows lane / 4 and lane / 4 + 8.
template <int kDim>
struct WarpQueries {
  FragmentA q[kDim / 16];
  FragmentC out[kDim / 8];
  float top[2], sum[2];
  int pos[2];  // of the two rows

  // Reads queries first .. first + 15 of a run, of one head (beyond the run: zeros), scaled for base-2 softmax.
  __device__ __forceinline__ void load(const AttentionArgs& a, const PrefillRun& run, int first, int64_t head) {
    const int lane = threadIdx.x % kWarp;
    const float scale = a.scale * kLog2E;
    const auto pair = [&](int r, int c) {
      if (r >= run.n_rows || c >= a.head_dim) return 0u;
      const float* from = a.q + ((run.first_row + static_cast<int64_t>(r)) * a.n_head + head) * a.head_dim + c;
      const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
      return pack_half2(v.x * scale, v.y * scale);
    };
    const int row = first + lane / 4;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int c = k * 16 + lane % 4 * 2;
      q[k] = {{pair(row, c), pair(row + 8, c), pair(row, c + 8), pair(row + 8, c + 8)}};
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) out[i] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = kNone, sum[r] = 0.0f;
      pos[r] = run.first_position + row + 8 * r;
    }
  }

  // scores[j] = Q K^T of keys 8j .. 8j + 7 of the tile.
  __device__ __forceinline__ void score(const __half* keys, FragmentC (&s)[kKeys<kDim> / 8]) const {
    const int lane = threadIdx.x % kWarp;
    const __half* row = keys + (lane % 8 + lane / 16 * 8) * kRow<kDim> + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kKeys<kDim> / 8; ++j) s[j] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int j = 0; j < kKeys<kDim> / 8; j += 2) {
        unsigned b[4];
        load_matrices(b, row + j * 8 * kRow<kDim> + k * 16);
        mma(s[j], q[k], b[0], b[1]);
        mma(s[j + 1], q[k], b[2], b[3]);
      }
    }
  }
  // Masks the keys that a row does not see, and turns scores into probabilities relative to the new maximum.
  __device__ __forceinline__ void softmax(const AttentionArgs& a, FragmentC (&s)[kKeys<kDim> / 8], int first_key) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int oldest = a.window > 0 ? pos[r] - static_cast<int>(a.window) + 1 : 0;
      float best = top[r];
#pragma unroll
      for (int j = 0; j < kKeys<kDim> / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first_key + j * 8 + lane % 4 * 2 + i;
          float& v = s[j].v[2 * r + i];
          v = key > pos[r] || key < oldest ? kNone : capped(a, v);
          best = fmaxf(best, v);
        }
      }
      best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
      best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
      const float scale = exp2f(top[r] - best);
      top[r] = best, sum[r] *= scale;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) out[i].v[2 * r] *= scale, out[i].v[2 * r + 1] *= scale;
#pragma unroll
      for (int j = 0; j < kKeys<kDim> / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& v = s[j].v[2 * r + i];
          v = v == kNone ? 0.0f : exp2f(v - best);
          sum[r] += v;  // this lane's keys; lanes are added at the end
        }
      }
    }
  }
  __device__ __forceinline__ void add_values(const __half* values, const FragmentC (&p)[kKeys<kDim> / 8]) {
    const int lane = threadIdx.x % kWarp;
    const __half* row = values + (lane % 8 + lane / 8 % 2 * 8) * kRow<kDim> + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kKeys<kDim> / 16; ++k) {
      const FragmentC &low = p[2 * k], &high = p[2 * k + 1];
      const FragmentA a{{pack_half2(low.v[0], low.v[1]), pack_half2(low.v[2], low.v[3]),
                         pack_half2(high.v[0], high.v[1]), pack_half2(high.v[2], high.v[3])}};
#pragma unroll
      for (int i = 0; i < kDim / 8; i += 2) {
        unsigned b[4];
        load_matrices_transposed(b, row + k * 16 * kRow<kDim> + i * 8);
        mma(out[i], a, b[0], b[1]);
        mma(out[i + 1], a, b[2], b[3]);
      }
    }
  }
  __device__ __forceinline__ void store(const AttentionArgs& a, const PrefillRun& run, int first, int64_t head,
                                        float* out_rows) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      total += sink_share(a, head, top[r]);
      const int row = first + lane / 4 + 8 * r;
      if (row >= run.n_rows) continue;
      float* to = out_rows + ((run.first_row + static_cast<int64_t>(row)) * a.n_head + head) * a.head_dim;
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const int c = i * 8 + lane % 4 * 2;
        if (c >= a.head_dim) continue;
        *reinterpret_cast<float2*>(to + c) = {out[i].v[2 * r] / total, out[i].v[2 * r + 1] / total};
      }
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kWarps* kWarp) prefill_kernel(const __grid_constant__ PrefillArgs args) {
  extern __shared__ uint4 shared[];
  __half* keys = reinterpret_cast<__half*>(shared);
  __half* values = keys + kKeys<kDim> * kRow<kDim>;
  grid_trigger();
  const AttentionArgs& a = args.a;
  const int64_t head = blockIdx.y, kv_head = head / (a.n_head / a.n_head_kv);
  const int block = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // the longest rows of a run start first
  int index = args.n_runs - 1;
  while (args.runs[index].first_block > block) --index;
  const PrefillRun run = args.runs[index];
  const int block_first = (block - run.first_block) * kQueries;
  const int first = block_first + static_cast<int>(threadIdx.x) / kWarp * 16;
  const int window = static_cast<int>(a.window), head_dim = static_cast<int>(a.head_dim);
  const int begin = window > 0 ? max(0, run.first_position + block_first - window + 1) : 0;
  const int end = run.first_position + min(block_first + kQueries, run.n_rows);
  grid_wait();
  const int32_t* pages = page_table(a.rows, __ldcg(a.rows.slot + run.first_row));
  WarpQueries<kDim> w;
  w.load(a, run, first, head);
  int tile = begin / kKeys<kDim> * kKeys<kDim>, page = __ldcg(pages + page_index(tile));
  for (; tile < end; tile += kKeys<kDim>) {
    const int64_t at = cache_offset(a, page, kv_head, tile);
    __syncthreads();
    load_tile<kDim>(keys, a.cache.k + at, tile, begin, end, head_dim);
    load_tile<kDim>(values, a.cache.v + at, tile, begin, end, head_dim);
    if (tile + kKeys<kDim> < end) page = __ldcg(pages + page_index(tile + kKeys<kDim>));
    __syncthreads();
    FragmentC s[kKeys<kDim> / 8];
    w.score(keys, s);
    w.softmax(a, s, tile);
    w.add_values(values, s);
  }
  w.store(a, run, first, head, args.out);
}

template <int kDim>
void launch_prefill(const Gpu& gpu, const PrefillArgs& args, int64_t n_blocks) {
  launch(gpu, prefill_kernel<kDim>, dim3(grid_size(n_blocks), grid_size(args.a.n_head)), kWarps * kWarp,
         sizeof(__half) * 2 * kKeys<kDim> * kRow<kDim>, args);
}

}  // namespace

void attention_prefill(const Gpu& gpu, const AttentionArgs& a, float* out) {
  const auto kernel = a.head_dim <= 64    ? launch_prefill<64>
                      : a.head_dim <= 128 ? launch_prefill<128>
                                          : launch_prefill<256>;
  PrefillArgs args{a, out, 0, {}};
  int64_t n_blocks = 0;
  const auto flush = [&] {
    if (args.n_runs > 0) kernel(gpu, args, n_blocks);
    args.n_runs = 0, n_blocks = 0;
  };
  for (const BatchRun& r : a.rows.runs) {
    if (args.n_runs == kMaxRuns) flush();
    args.runs[args.n_runs++] = {static_cast<int>(n_blocks), static_cast<int>(r.first_row), static_cast<int>(r.n_rows),
                                static_cast<int>(r.first_position)};
    n_blocks += ceil_div(r.n_rows, kQueries);
  }
  flush();
}

}  // namespace hearth::cuda
