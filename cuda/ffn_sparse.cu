// Which neurons a token needs, and their values: gate rows of all candidates, ordered compaction of the active ones,
// then up rows of those alone. Grids are fixed and read counts from device memory, so the whole runs inside a graph.
#include "cuda/activation.cuh"
#include "cuda/kernels.cuh"
#include "cuda/row_stream.cuh"

namespace hearth::cuda {
namespace {

struct RowListArgs {
  Matrix w;
  NeuronArgs neuron;
  const int32_t* ids;    // rows to compute; null = all
  const int32_t* count;  // their number
  float* value;          // gate: written; up: multiplied
};

// value[i] = act(w[ids[i]] . x), or value[i] *= up_act(w[ids[i]] . x).
template <DType D, bool kIsGate, bool kAll>
struct RowListJob {
  static constexpr bool kRowsKnown = kAll;
  static constexpr int kRowsPerOutput = 1;
  const RowListArgs& a;

  __device__ __forceinline__ int n_outputs() const { return kAll ? static_cast<int>(a.w.rows) : __ldcg(a.count); }
  __device__ __forceinline__ int id(int i) const { return kAll ? i : __ldcg(a.ids + i); }
  __device__ __forceinline__ RowAt row(int i) const {
    return row_at<D>(a.w.data, a.w.scales, id(i), static_cast<int>(a.w.cols));
  }
  __device__ __forceinline__ float start(int i) const { return kIsGate ? 0.0f : __ldcg(a.value + i); }
  __device__ __forceinline__ void finish(int i, float start, const float* sums, int parts) const {
    const float z = sum_parts(sums, parts);
    a.value[i] = kIsGate ? a.neuron.gate(z, id(i)) : start * a.neuron.up(z, id(i));
  }
};

template <DType D, int kChunks, bool kIsGate, bool kAll>
__global__ void __launch_bounds__(kStreamMaxThreads, 2)
    row_list_kernel(const __grid_constant__ RowListArgs a, const __grid_constant__ StreamArgs s) {
  stream_rows<D, kChunks>(RowListJob<D, kIsGate, kAll>{a}, s, s.x);
}

struct CompactArgs {
  const float* gate;         // activations by candidate
  const int32_t* predicted;  // ids of the candidates; null = 0, 1, ...
  const int32_t* n_predicted;
  int64_t n;
  float threshold;
  float* value;
  int32_t* ids;
  int32_t* count;
  int32_t* active_ids;  // the caller's, optional
  int32_t* n_active;
};

constexpr int kCompactThreads = 1024;

// One block. Each warp has a contiguous share of the candidates, counts its active ones, and writes them at the place
// that the counts of the warps before give: ascending order, whatever the timing.
__global__ void __launch_bounds__(kCompactThreads) compact_kernel(const __grid_constant__ CompactArgs a) {
  __shared__ int counts[kWarp];
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t n = a.n_predicted != nullptr ? __ldcg(a.n_predicted) : a.n;
  const int64_t share = round_up(ceil_div(n, kCompactThreads / kWarp), kWarp);
  const int64_t begin = warp * share, end = min(begin + share, n);
  const auto is_active = [&](int64_t i) { return i < end && fabsf(__ldcg(a.gate + i)) > a.threshold; };
  int mine = 0;
#pragma unroll 4
  for (int64_t i = begin; i < end; i += kWarp) mine += is_active(i + lane) ? 1 : 0;
  mine = warp_sum(mine);
  if (lane == 0) counts[warp] = mine;
  __syncthreads();
  int at = warp_sum(lane < warp ? counts[lane] : 0);
  for (int64_t i = begin + lane; i - lane < end; i += kWarp) {
    const bool active = is_active(i);
    const unsigned ballot = __ballot_sync(kAllLanes, active);
    if (active) {
      const int to = at + __popc(ballot & ((1u << lane) - 1));
      const int32_t id = a.predicted != nullptr ? __ldcg(a.predicted + i) : static_cast<int32_t>(i);
      a.value[to] = __ldcg(a.gate + i);
      a.ids[to] = id;
      if (a.active_ids != nullptr) a.active_ids[to] = id;
    }
    at += __popc(ballot);
  }
  if (threadIdx.x == kCompactThreads - 1) {
    *a.count = at;
    if (a.n_active != nullptr) *a.n_active = at;
  }
}

template <bool kIsGate, bool kAll>
void row_list(const Gpu& gpu, const RowListArgs& a, const float* x) {
  with_format(a.w.type, [&]<DType D>() {
    if (a.w.cols % Format<D>::kWeights != 0) {
      fail("sparse FFN on the GPU needs rows of a multiple of {} elements, found {}; use --sparsity off",
           Format<D>::kWeights, a.w.cols);
    }
    const StreamArgs s = stream_args<D>(gpu, x, a.w.cols);
    with_chunks(s.plan, [&]<int kChunks>() {
      launch_stream<D, kChunks>(gpu, row_list_kernel<D, kChunks, kIsGate, kAll>, a.w.rows, 1, 1, s, a);
    });
  });
}

}  // namespace

void ffn_select(const Gpu& gpu, const FfnShard& s, const SparseArgs& sparse, const float* x,
                const SparseScratch& scratch) {
  const RowListArgs gate{s.gate, neuron_args(s), sparse.predicted, sparse.n_predicted, scratch.gate};
  if (sparse.predicted != nullptr) {
    row_list<true, false>(gpu, gate, x);
  } else {
    row_list<true, true>(gpu, gate, x);
  }
  launch(gpu, compact_kernel, 1, kCompactThreads, 0,
         CompactArgs{scratch.gate, sparse.predicted, sparse.n_predicted, s.n(), sparse.threshold, scratch.value,
                     scratch.ids, scratch.count, sparse.active_ids, sparse.n_active});
  if (s.up) row_list<false, false>(gpu, {s.up, neuron_args(s), scratch.ids, scratch.count, scratch.value}, x);
}

}  // namespace hearth::cuda
