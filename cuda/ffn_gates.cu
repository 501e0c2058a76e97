// The gates of all neurons of a layer, and the mask of those that fire: exact selection.
#include "cuda/activation.cuh"
#include "cuda/row_dots.cuh"
#include "cuda/sparse.cuh"

namespace hearth::cuda {
namespace {

constexpr int kPerWarp = 4;  // neurons
constexpr int kThreads = kMatvecWarps * kWarp;
static_assert(kPerWarp * kMatvecWarps == 32, "a block's neurons are one word of the mask");

struct GateArgs {
  Matrix gate;
  NeuronArgs neuron;
  Act in;
  InputNorm norm;
  float threshold;
  float* value;    // [T][n]
  uint32_t* mask;  // [T][ceil(n / 32)]
};

template <DType D>
__global__ void __launch_bounds__(kThreads, 3) gate_kernel(const __grid_constant__ GateArgs a) {
  extern __shared__ uint4 shared[];
  __shared__ float values[32];
  grid_trigger();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int n = static_cast<int>(a.gate.rows), cols = static_cast<int>(a.gate.cols);
  const int block = static_cast<int>(blockIdx.y), first = block * 32 + warp * kPerWarp;
  const int base = min(first, n - kPerWarp);  // the last warp may repeat neurons of its neighbour
  RowDots<D, kPerWarp, (kManyRegisters<D> ? 1 : 2)> dots(cols);
  dots.live = first < n;
  dots.set_rows(0, a.gate.data, base);
  dots.start();
  dots.start_norm(a.norm, shared);
  if (threadIdx.x < 32) values[threadIdx.x] = 0.0f;
  grid_wait();
  const int64_t t = blockIdx.x;
  dots.run(a.norm, input_row<D>(a.in, t, cols), shared);  // its barriers also order the zeros before the values
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    const int k = base + r;
    if (dots.live && lane == r && k >= first) values[k - block * 32] = a.neuron.gate(dots.sum[0][r], k);
  }
  __syncthreads();
  if (warp != 0) return;
  const int k = block * 32 + lane;
  if (k < n) a.value[t * n + k] = values[lane];
  const unsigned active = __ballot_sync(kAllLanes, k < n && fabsf(values[lane]) > a.threshold);
  if (lane == 0) a.mask[t * gridDim.y + block] = active;
}

}  // namespace

bool ffn_gates_fit(const Matrix& gate) {
  bool fits = false;
  with_format(gate.type, [&]<DType D>() { fits = gate.cols % Format<D>::kWeights == 0; });
  return fits && gate.rows >= kPerWarp;
}

void ffn_gates(const Gpu& gpu, const FfnShard& s, float threshold, Act in, int64_t T, const InputNorm* norm,
               float* value, uint32_t* mask) {
  HEARTH_CHECK(ffn_gates_fit(s.gate));
  const GateArgs args{s.gate, neuron_args(s), in, norm != nullptr ? *norm : InputNorm{}, threshold, value, mask};
  with_format(s.gate.type, [&]<DType D>() {
    launch(gpu, gate_kernel<D>, token_grid(T, ceil_div(s.n(), 32)), kThreads, stage_bytes<D>(s.gate.cols), args);
  });
}

}  // namespace hearth::cuda
