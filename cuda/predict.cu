// Predictors: which neurons of a layer a token needs (core/device.h, Predictor).
#include "cuda/kernels.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {
namespace {

constexpr int kThreads = 1024;

// score[k] = n - 2 popcount(signs[k] ^ signs of in): one warp a neuron.
__global__ void __launch_bounds__(kThreads)
    sign_kernel(const uint32_t* signs, const float* in, int n, int64_t n_neurons, float* score) {
  extern __shared__ uint32_t input[];  // [ceil(n / 32)]
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int words = (n + 31) / 32;
  for (int w = warp; w < words; w += warps) {
    const int c = w * 32 + lane;
    const unsigned bits = __ballot_sync(kAllLanes, c < n && __ldcg(in + c) < 0.0f);
    if (lane == 0) input[w] = bits;
  }
  __syncthreads();
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * warps + warp; k < n_neurons; k += gridDim.x * warps) {
    int differ = 0;
    for (int w = lane; w < words; w += kWarp) differ += __popc(input[w] ^ signs[k * words + w]);
    differ = warp_sum(differ);
    if (lane == 0) score[k] = static_cast<float>(n - 2 * differ);
  }
}

__global__ void relu_kernel(float* x, int64_t n) {
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] = fmaxf(__ldcg(x + i), 0.0f);
}

struct ListArgs {
  const float* score;
  const float* threshold;
  int64_t begin, end;  // of the neurons; listed from 0
  NeuronList list;
};

// One block an interval: each warp has a share of it, counts, and writes behind the warps before it.
__global__ void __launch_bounds__(kThreads) list_kernel(const ListArgs first, const ListArgs rest) {
  __shared__ int counts[kWarp];
  grid_trigger();
  grid_wait();
  const ListArgs& a = blockIdx.x == 0 ? first : rest;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t share = round_up(ceil_div(a.end - a.begin, kThreads / kWarp), kWarp);
  const int64_t begin = a.begin + warp * share, end = min(begin + share, a.end);
  const auto named = [&](int64_t k) { return k < end && __ldcg(a.score + k) > a.threshold[k]; };
  int mine = 0;
  for (int64_t k = begin; k < end; k += kWarp) mine += named(k + lane) ? 1 : 0;
  mine = warp_sum(mine);
  if (lane == 0) counts[warp] = mine;
  __syncthreads();
  int at = warp_sum(lane < warp ? counts[lane] : 0);
  for (int64_t k = begin + lane; k - lane < end; k += kWarp) {
    const unsigned ballot = __ballot_sync(kAllLanes, named(k));
    if (named(k)) a.list.ids[at + __popc(ballot & ((1u << lane) - 1))] = static_cast<int32_t>(k - a.begin);
    at += __popc(ballot);
  }
  if (threadIdx.x == kThreads - 1) *a.list.count = at;
}

}  // namespace

void sign_scores(const Gpu& gpu, const Predictor& p, const float* in, float* score) {
  const int64_t per_block = kThreads / kWarp;
  const int64_t blocks = std::min<int64_t>(ceil_div(p.n(), per_block), gpu.multiprocessors * 2);
  launch(gpu, sign_kernel, grid_size(blocks), kThreads, static_cast<size_t>(ceil_div(p.n_signs, 32)) * 4, p.signs, in,
         static_cast<int>(p.n_signs), p.n(), score);
}

void relu(const Gpu& gpu, float* x, int64_t n) {
  launch(gpu, relu_kernel, grid_size(ceil_div(n, 256)), 256, 0, x, n);
}

void list_predicted(const Gpu& gpu, const Predictor& p, const float* score, int64_t n_first, NeuronList first,
                    NeuronList rest) {
  const float* threshold = p.threshold.data;
  const ListArgs a{score, threshold, 0, n_first, first}, b{score, threshold, n_first, p.n(), rest};
  // Both blocks, or the one whose list is asked for.
  if (n_first == 0) return launch(gpu, list_kernel, 1, kThreads, 0, b, b);
  launch(gpu, list_kernel, n_first < p.n() ? 2 : 1, kThreads, 0, a, b);
}

}  // namespace hearth::cuda
