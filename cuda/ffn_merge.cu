// The second half of the FFN of masked neurons (ffn_list.cu): the sum of the blocks' sums, in fixed order, the bias,
// and the CPU's answer, for which each block waits by itself.
#include "cuda/reduce.cuh"
#include "cuda/sparse.cuh"

namespace hearth::cuda {
namespace {

constexpr int kMergeWarps = 16;

// Grid: (blocks of 32 columns, T). The last warp waits for the CPU while the others add, and finishes.
__global__ void __launch_bounds__((kMergeWarps + 1) * kWarp) merge_kernel(const __grid_constant__ MergeArgs a) {
  __shared__ alignas(16) float sums[kMergeWarps][kWarp];
  grid_trigger();
  const int t = static_cast<int>(blockIdx.y);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int c = static_cast<int>(blockIdx.x) * kWarp + lane;
  const bool finishes = warp == kMergeWarps && c < a.n;
  const float bias = finishes && a.bias != nullptr ? a.bias[c] : 0.0f;
  const float weight = finishes && a.next.weight != nullptr ? a.next.weight[c] : 0.0f;  // of the norm to come
  grid_wait();
  float y = 0.0f, answer = 0.0f;
  if (warp < kMergeWarps) {
    constexpr int kQuads = kWarp / 4, kSide = kMergeWarps * kWarp / kQuads;  // splits that are added side by side
    constexpr int kTogether = 3;  // loads in flight: all, for up to 192 blocks
    const int column = static_cast<int>(blockIdx.x) * kWarp + lane % kQuads * 4;
    const float* const partial = a.partial + int64_t{t * a.splits} * a.n + column;
    float4 sum = make_float4(0, 0, 0, 0);
    for (int first = threadIdx.x / kQuads; first < a.splits; first += kTogether * kSide) {
      float4 p[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int s = first + u * kSide;
        p[u] = make_float4(0, 0, 0, 0);
        if (column < a.n && s < a.splits) {
          p[u] = __ldcg(reinterpret_cast<const float4*>(partial + int64_t{s} * a.n));
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) sum.x += p[u].x, sum.y += p[u].y, sum.z += p[u].z, sum.w += p[u].w;
    }
    __syncwarp();
#pragma unroll
    for (int o = kQuads; o < kWarp; o *= 2) {
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, o), sum.y += __shfl_xor_sync(kAllLanes, sum.y, o);
      sum.z += __shfl_xor_sync(kAllLanes, sum.z, o), sum.w += __shfl_xor_sync(kAllLanes, sum.w, o);
    }
    if (lane < kQuads) reinterpret_cast<float4*>(sums[warp])[lane] = sum;
    const auto count = [&](int first, int end, int32_t* to) {
      const int32_t* const active = a.block_active + t * a.splits;
      int total = 0;
      for (int s = first + lane; s < end; s += kWarp) total += __ldcg(active + s);
      total = warp_sum(total);
      if (lane == 0) to[t] = total;
    };
    if (blockIdx.x == 0 && warp == 0 && a.n_active != nullptr) count(a.link_splits, a.splits, a.n_active);
    if (blockIdx.x == 0 && warp == 1 && a.n_linked_active != nullptr) count(0, a.link_splits, a.n_linked_active);
  } else {
    if (finishes) y = __ldcg(a.y + t * a.n + c) + bias;
    if (a.answer.words != nullptr) answer = wait_published(a.answer, t * a.n + c, finishes);
  }
  __syncthreads();
  if (warp < kMergeWarps) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) sum += sums[w][lane];
  y += sum;
  y += answer;
  if (finishes) a.y[t * a.n + c] = y;
  if (a.next.weight != nullptr) a.next.store(t, a.n, static_cast<int>(blockIdx.x), y, weight);
}

}  // namespace

void merge_sums(const Gpu& gpu, const MergeArgs& args, int64_t T) {
  const dim3 grid(grid_size(ceil_div(args.n, kWarp)), grid_size(T));
  launch(gpu, merge_kernel, grid, (kMergeWarps + 1) * kWarp, 0, args);
}

}  // namespace hearth::cuda
