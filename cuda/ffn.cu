// The first half of the FFN: gate, up and activation. A few tokens in one pass over the weights; batches element by
// element after their products.
#include "cuda/activation.cuh"
#include "cuda/kernels.cuh"
#include "cuda/row_dots.cuh"

namespace hearth::cuda {
namespace {

constexpr int kPerWarp = 4;  // neurons
constexpr int kPerBlock = kPerWarp * kMatvecWarps;
static_assert(kPerBlock == 32, "a block's neurons are one block of the 8-bit form");

struct GateUpArgs {
  Matrix gate, up;
  NeuronArgs neuron;
  Act in;
  Act hidden;
  InputNorm norm;
};

// Three blocks share a multiprocessor. Eight rows with a chunk each in flight take too many registers for that where
// kManyRegisters says so: those types have half of them in flight, and two passes.
template <DType D, bool kGated>
__global__ void __launch_bounds__(kMatvecWarps* kWarp, 3) gate_up_kernel(const __grid_constant__ GateUpArgs a) {
  extern __shared__ uint4 shared[];
  __shared__ float values[kPerBlock];
  grid_trigger();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int n = static_cast<int>(a.gate.rows), cols = static_cast<int>(a.gate.cols);
  const int64_t t = blockIdx.x;
  const int block_first = static_cast<int>(blockIdx.y) * kPerBlock, first = block_first + warp * kPerWarp;
  const int base = min(first, n - kPerWarp);  // the last warp may repeat neurons of its neighbour
  constexpr int kBases = kGated ? 2 : 1;
  RowDots<D, kPerWarp * kBases, 2 / kBases, kBases, kManyRegisters<D> ? 2 : 1> dots(cols);
  dots.live = first < n;
  dots.set_rows(0, a.gate.data, base);
  if constexpr (kGated) dots.set_rows(1, a.up.data, base);
  dots.start();
  dots.start_norm(a.norm, shared);
  if (threadIdx.x < kPerBlock) values[threadIdx.x] = 0.0f;
  grid_wait();
  dots.run(a.norm, input_row<D>(a.in, t, cols), shared);  // its barriers also order the zeros before the values
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    const int k = base + r;
    if (dots.live && lane == r && k >= first) {
      float v = a.neuron.gate(dots.sum[0][r], k);
      if constexpr (kGated) v *= a.neuron.up(dots.sum[1][r], k);
      values[k - block_first] = v;
    }
  }
  __syncthreads();
  if (warp != 0) return;
  const int k = block_first + lane;
  if (k < n) a.hidden.x[t * n + k] = values[lane];
  if (a.hidden.q8 == nullptr) return;
  store_q8_block(values[lane], static_cast<std::byte*>(a.hidden.q8) + t * q8_row_bytes(n), n, blockIdx.y);
}

__global__ void combine_kernel(NeuronArgs neuron, const float* gate, const float* up, int64_t n, int64_t total,
                               float* hidden) {
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= total) return;
  const int64_t k = i % n;
  float v = neuron.gate(__ldcg(gate + i), k);
  if (up != nullptr) v *= neuron.up(__ldcg(up + i), k);
  hidden[i] = v;
}

int64_t chunk_weights(DType type) {
  int64_t n = 0;
  with_format(type, [&]<DType D>() { n = Format<D>::kWeights; });
  return n;
}

}  // namespace

bool ffn_fusable(const FfnShard& s) {
  return s.n() >= kPerWarp && (!s.up || s.up.type == s.gate.type) && s.gate.cols % chunk_weights(s.gate.type) == 0;
}

void ffn_gate_up(const Gpu& gpu, const FfnShard& s, Act in, int64_t T, Act hidden, const InputNorm* norm) {
  HEARTH_CHECK(ffn_fusable(s));
  GateUpArgs args{s.gate, s.up, neuron_args(s), in, hidden};
  if (norm != nullptr) args.norm = *norm;
  with_format(s.gate.type, [&]<DType D>() {
    launch(gpu, s.up ? gate_up_kernel<D, true> : gate_up_kernel<D, false>, token_grid(T, ceil_div(s.n(), kPerBlock)),
           kMatvecWarps * kWarp, stage_bytes<D>(s.gate.cols), args);
  });
}

void ffn_combine(const Gpu& gpu, const FfnShard& s, const float* gate, const float* up, int64_t T, float* hidden) {
  const int64_t total = T * s.n();
  launch(gpu, combine_kernel, grid_size(ceil_div(total, 256)), 256, 0, neuron_args(s), gate, up, s.n(), total, hidden);
}

}  // namespace hearth::cuda
