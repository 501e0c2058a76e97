// The first half of the FFN: gate, up and activation. One token in one pass over the weights; batches element by
// element after their products.
#include "cuda/activation.cuh"
#include "cuda/kernels.cuh"
#include "cuda/row_stream.cuh"

namespace hearth::cuda {
namespace {

struct GateUpArgs {
  Matrix gate, up;
  NeuronArgs neuron;
  float* hidden;
};

// Row 2k is neuron k's gate, row 2k + 1 its up; without up, row k is its gate.
template <DType D, bool kGated>
struct GateUpJob {
  static constexpr bool kRowsKnown = true;
  static constexpr int kRowsPerOutput = kGated ? 2 : 1;
  const GateUpArgs& a;

  __device__ __forceinline__ int n_outputs() const { return static_cast<int>(a.gate.rows); }
  __device__ __forceinline__ RowAt row(int row) const {
    const Matrix& w = kGated && row % 2 == 1 ? a.up : a.gate;
    return row_at<D>(w.data, w.scales, row / kRowsPerOutput, static_cast<int>(a.gate.cols));
  }
  __device__ __forceinline__ float start(int) const { return 0.0f; }
  __device__ __forceinline__ void finish(int k, float, const float* sums, int parts) const {
    float v = a.neuron.gate(sum_parts(sums, parts), k);
    if constexpr (kGated) v *= a.neuron.up(sum_parts(sums + parts, parts), k);
    a.hidden[k] = v;
  }
};

template <DType D, int kChunks, bool kGated>
__global__ void __launch_bounds__(kStreamMaxThreads, 2)
    gate_up_kernel(const __grid_constant__ GateUpArgs a, const __grid_constant__ StreamArgs s) {
  stream_rows<D, kChunks>(GateUpJob<D, kGated>{a}, s, s.x);
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
  return (!s.up || s.up.type == s.gate.type) && s.gate.cols % chunk_weights(s.gate.type) == 0;
}

void ffn_gate_up(const Gpu& gpu, const FfnShard& shard, const float* x, float* hidden) {
  HEARTH_CHECK(ffn_fusable(shard));
  const GateUpArgs a{shard.gate, shard.up, neuron_args(shard), hidden};
  const bool gated = static_cast<bool>(shard.up);
  with_format(shard.gate.type, [&]<DType D>() {
    const StreamArgs s = stream_args<D>(gpu, x, shard.gate.cols);
    with_chunks(s.plan, [&]<int kChunks>() {
      const auto kernel = gated ? gate_up_kernel<D, kChunks, true> : gate_up_kernel<D, kChunks, false>;
      launch_stream<D, kChunks>(gpu, kernel, shard.n(), gated ? 2 : 1, 1, s, a);
    });
  });
}

void ffn_combine(const Gpu& gpu, const FfnShard& s, const float* gate, const float* up, int64_t T, float* hidden) {
  const int64_t total = T * s.n();
  launch(gpu, combine_kernel, grid_size(ceil_div(total, 256)), 256, 0, neuron_args(s), gate, up, s.n(), total, hidden);
}

}  // namespace hearth::cuda
