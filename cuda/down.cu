// The transposed down projection: y += sum_i value[i] * row[ids[i]]. Blocks own column tiles and shares of the list;
// each accumulates in registers, and the shares are added in fixed order. No atomics: the same result run after run.
#include "cuda/kernels.cuh"
#include "cuda/row_dots.cuh"

namespace hearth::cuda {
namespace {

constexpr int kRowUnroll = 4;
constexpr int64_t kMaxDownSplits = 64;  // plan.h, down_plan

struct DownArgs {
  Matrix w;  // [n][n_embd]
  const float* value;
  const int32_t* ids;
  const int32_t* count;
  float* partial;  // [gridDim.y][n_embd]
};

template <DType D>
__global__ void __launch_bounds__(kMatvecWarps* kWarp, 2) down_kernel(const __grid_constant__ DownArgs a) {
  constexpr int kWeights = Format<D>::kWeights;
  extern __shared__ float sums[];  // [kMatvecWarps][kWeights][kWarp]
  grid_trigger();
  grid_wait();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t n_chunks = a.w.cols / kWeights, chunk = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  const int64_t count = a.count != nullptr ? __ldcg(a.count) : a.w.rows;
  const int64_t begin = count * blockIdx.y / gridDim.y, end = count * (blockIdx.y + 1) / gridDim.y;
  const auto* data = static_cast<const uint4*>(a.w.data) + chunk;
  const auto* scales = static_cast<const unsigned short*>(a.w.scales) + chunk * kWeights / 32;
  float acc[kWeights] = {};
  for (int64_t i = begin + warp; i < end && chunk < n_chunks; i += kMatvecWarps * kRowUnroll) {
    Chunk w[kRowUnroll];
    float v[kRowUnroll];
#pragma unroll
    for (int u = 0; u < kRowUnroll; ++u) {
      const int64_t at = i + u * kMatvecWarps;
      v[u] = at < end ? __ldcg(a.value + at) : 0.0f;
      if (at >= end) continue;
      const int64_t row = a.ids != nullptr ? __ldcg(a.ids + at) : at;
      w[u] = load_chunk<D>(data + row * n_chunks, scales + row * (n_chunks * kWeights / 32), 0);
    }
#pragma unroll
    for (int u = 0; u < kRowUnroll; ++u) {
      if (i + u * kMatvecWarps >= end) continue;
      float values[kWeights];
      Format<D>::decode(w[u], values);
#pragma unroll
      for (int k = 0; k < kWeights; ++k) acc[k] = fmaf(v[u], values[k], acc[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kWeights; ++k) sums[(warp * kWeights + k) * kWarp + lane] = acc[k];
  __syncthreads();
  for (int i = threadIdx.x; i < kWarp * kWeights; i += blockDim.x) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp * kWeights + i;
    if (column >= a.w.cols) break;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kMatvecWarps; ++s) sum += sums[(s * kWeights + i % kWeights) * kWarp + i / kWeights];
    a.partial[blockIdx.y * a.w.cols + column] = sum;
  }
}

constexpr int kCombineGroups = 8;

// y[c] += bias[c] + the partial sums: a block has 32 columns, its warps share the splits.
__global__ void __launch_bounds__(kCombineGroups* kWarp)
    combine_kernel(const float* partial, int splits, int64_t n, const float* bias, float* y) {
  __shared__ float sums[kCombineGroups][kWarp];
  grid_trigger();
  grid_wait();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (c < n) {
#pragma unroll 8
    for (int s = warp; s < splits; s += kCombineGroups) sum += __ldcg(partial + s * n + c);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c >= n) return;
  float total = bias != nullptr ? bias[c] : 0.0f;
#pragma unroll
  for (int g = 0; g < kCombineGroups; ++g) total += sums[g][lane];
  y[c] = __ldcg(y + c) + total;
}

}  // namespace

size_t down_partial_bytes(const Gpu&, int64_t n_embd) {
  return static_cast<size_t>(kMaxDownSplits * n_embd) * sizeof(float);
}

void down_rows(const Gpu& gpu, const Matrix& down_t, const float* value, const int32_t* ids, const int32_t* count,
               Vector bias, float* partial, float* y) {
  with_format(down_t.type, [&]<DType D>() {
    constexpr int kWeights = Format<D>::kWeights;
    if (down_t.cols % kWeights != 0) {
      fail(
          "a transposed down projection on the GPU needs rows of a multiple of {} elements, found {}; use --device cpu",
          kWeights, down_t.cols);
    }
    const DownPlan plan = down_plan(down_t.cols, kWarp * kWeights, gpu.multiprocessors);
    HEARTH_CHECK(plan.splits <= kMaxDownSplits);
    launch(gpu, down_kernel<D>, dim3(grid_size(plan.tiles), grid_size(plan.splits)), kMatvecWarps * kWarp,
           sizeof(float) * kMatvecWarps * kWarp * kWeights, DownArgs{down_t, value, ids, count, partial});
    launch(gpu, combine_kernel, grid_size(ceil_div(down_t.cols, kWarp)), kCombineGroups * kWarp, 0,
           static_cast<const float*>(partial), static_cast<int>(plan.splits), down_t.cols, bias.data, y);
  });
}

}  // namespace hearth::cuda
