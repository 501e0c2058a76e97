// Which neurons one token needs, and their values, for shards that ffn_gates.cu and ffn_list.cu cannot take (weights of
// several types, very long or very few rows): the list of a mask, gate rows of all candidates, ordered compaction of
// the active ones, then up rows of those alone. Grids are fixed and read counts from device memory, so the whole runs
// inside a graph.
#include "cuda/activation.cuh"
#include "cuda/neuron_mask.cuh"
#include "cuda/row_dots.cuh"
#include "cuda/sparse.cuh"

namespace hearth::cuda {
namespace {

struct RowListArgs {
  Matrix w;
  NeuronArgs neuron;
  Act in;
  const int32_t* ids;    // rows to compute; null = all
  const int32_t* count;  // their number; null = w.rows
  float* value;          // gate: written; up: multiplied
};

// value[i] = act(w[ids[i]] . in), or value[i] *= up_act(...). One warp a row.
template <DType D, bool kIsGate>
__global__ void __launch_bounds__(kMatvecWarps* kWarp, 4) row_list_kernel(const __grid_constant__ RowListArgs a) {
  extern __shared__ uint4 shared[];
  grid_trigger();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int cols = static_cast<int>(a.w.cols);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kMatvecWarps;
  int64_t first = static_cast<int64_t>(blockIdx.x) * kMatvecWarps;  // of the block's current entries, one a warp
  RowDots<D, 1, 4> dots(cols);
  const auto start = [&](int64_t row, bool live) {
    dots.live = live;
    dots.set_rows(0, a.w.data, live ? row : 0);
    dots.start();
  };
  bool started = a.ids == nullptr;  // then the rows are known before the input is
  if (started) start(first + warp, first + warp < a.w.rows);
  grid_wait();
  const int64_t count = a.count != nullptr ? __ldcg(a.count) : a.w.rows;
  const InputRow in = input_row<D>(a.in, 0, cols);
  for (; first < count; first += stride) {
    const int64_t i = first + warp;
    const int64_t row = i >= count ? 0 : (a.ids != nullptr ? __ldcg(a.ids + i) : i);
    if (!started) start(row, i < count);
    started = false;
    dots.run(in, shared);
    if (i < count && lane == 0) {
      a.value[i] = kIsGate ? a.neuron.gate(dots.sum[0][0], row) : __ldcg(a.value + i) * a.neuron.up(dots.sum[0][0], row);
    }
    __syncthreads();  // before the input is staged again
  }
}

struct CompactArgs {
  const float* gate;          // activations by candidate
  const int32_t* candidates;  // their ids; null = 0, 1, ...
  const int32_t* n_candidates;
  int64_t n;
  float threshold;
  float* value;
  int32_t* ids;
  int32_t* count;
  int32_t* n_active;  // the caller's, optional
};

constexpr int kCompactThreads = 1024;

// One block.
__global__ void __launch_bounds__(kCompactThreads)
    list_kernel(const uint32_t* mask, int n, int32_t* ids, int32_t* count) {
  grid_trigger();
  grid_wait();
  const int length = each_masked(mask, 0, n, 0, 1, n, [&](int i, int32_t id) { ids[i] = id; });
  if (threadIdx.x == 0) *count = length;
}

// One block. Each warp has a contiguous share of the candidates, counts its active ones, and writes them at the place
// that the counts of the warps before give: ascending order, whatever the timing.
__global__ void __launch_bounds__(kCompactThreads) compact_kernel(const __grid_constant__ CompactArgs a) {
  __shared__ int counts[kWarp];
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t n = a.n_candidates != nullptr ? __ldcg(a.n_candidates) : a.n;
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
      a.value[to] = __ldcg(a.gate + i);
      a.ids[to] = a.candidates != nullptr ? __ldcg(a.candidates + i) : static_cast<int32_t>(i);
    }
    at += __popc(ballot);
  }
  if (threadIdx.x == kCompactThreads - 1) {
    *a.count = at;
    if (a.n_active != nullptr) *a.n_active = at;
  }
}

template <bool kIsGate>
void row_list(const Gpu& gpu, const RowListArgs& args) {
  const int64_t all = ceil_div(args.w.rows, kMatvecWarps);
  const int64_t blocks = args.count == nullptr ? all : std::min<int64_t>(all, gpu.multiprocessors * 4);
  with_format(args.w.type, [&]<DType D>() {
    if (args.w.cols % Format<D>::kWeights != 0) {
      fail("sparse FFN on the GPU needs rows of a multiple of {} elements, found {}; use --sparsity off",
           Format<D>::kWeights, args.w.cols);
    }
    launch(gpu, row_list_kernel<D, kIsGate>, grid_size(blocks), kMatvecWarps * kWarp, stage_bytes<D>(args.w.cols),
           args);
  });
}

}  // namespace

void ffn_select(const Gpu& gpu, const FfnShard& s, float threshold, const uint32_t* mask, Act in, int32_t* n_active,
                const SelectScratch& to) {
  const bool all = mask == nullptr;
  const int32_t* const candidates = all ? nullptr : to.candidates;
  const int32_t* const n_candidates = all ? nullptr : to.n_candidates;
  if (!all) {
    launch(gpu, list_kernel, 1, kCompactThreads, 0, mask, static_cast<int>(s.n()), to.candidates, to.n_candidates);
  }
  row_list<true>(gpu, {s.gate, neuron_args(s), in, candidates, n_candidates, to.gate});
  launch(gpu, compact_kernel, 1, kCompactThreads, 0,
         CompactArgs{to.gate, candidates, n_candidates, s.n(), threshold, to.value, to.ids, to.count, n_active});
  if (s.up) row_list<false>(gpu, {s.up, neuron_args(s), in, to.ids, to.count, to.value});
}

}  // namespace hearth::cuda
