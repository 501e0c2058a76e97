// The two ends of a token: its embedding row, and the index of its largest logit.
#include "cuda/format.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {
namespace {

// Elements [i, i + kEach<D>) of row r; rows of types without blocks may have any length.
template <DType D>
constexpr int kEach = Format<D>::kQuantized ? Format<D>::kWeights : 1;
template <DType D>
__device__ void elements(const Matrix& w, int64_t r, int i, float* out) {
  const int64_t at = r * w.cols + i;
  if constexpr (D == DType::f32) out[0] = static_cast<const float*>(w.data)[at];
  if constexpr (D == DType::f16) out[0] = half_bits_to_float(static_cast<const unsigned short*>(w.data)[at]);
  if constexpr (D == DType::bf16) out[0] = bfloat2_bits_to_float2(static_cast<const unsigned short*>(w.data)[at]).x;
  if constexpr (Format<D>::kQuantized) {
    const RowFields<D> fields(w.cols);
    Format<D>::decode(fields.load(row_of(w, fields, r), 0, static_cast<unsigned>(i / kEach<D>)), out);
  }
}

template <DType D, bool kAdd>
__global__ void embed_kernel(Matrix table, const int32_t* ids, int64_t offset, float* x) {
  grid_trigger();
  grid_wait();
  const int64_t t = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kEach<D>;
  if (i >= table.cols) return;
  float v[kEach<D>];
  elements<D>(table, __ldcg(ids + t) + offset, i, v);
  float* to = x + t * table.cols + i;
#pragma unroll
  for (int k = 0; k < kEach<D>; ++k) to[k] = kAdd ? __ldcg(to + k) + v[k] : v[k];
}

// Orders logits as unsigned numbers: larger logit first, then smaller index; NaN loses to everything.
__device__ unsigned long long rank(float logit, int64_t index) {
  const unsigned bits = __float_as_uint(logit + 0.0f);  // -0 ranks as +0
  const unsigned ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  const unsigned key = isnan(logit) ? 0u : ordered;
  return static_cast<unsigned long long>(key) << 32 | (0xFFFFFFFFu - static_cast<unsigned>(index));
}

__device__ unsigned long long block_max(unsigned long long v) {
  __shared__ unsigned long long shared[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto reduce = [](unsigned long long m) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) m = max(m, __shfl_xor_sync(kAllLanes, m, offset));
    return m;
  };
  v = reduce(v);
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  return reduce(lane < static_cast<int>(blockDim.x / kWarp) ? shared[lane] : 0ull);
}

// Grid: (blocks of a row, T).
__global__ void argmax_partial_kernel(const float* logits, int64_t n, unsigned long long* partial) {
  grid_trigger();
  grid_wait();
  logits += blockIdx.y * n;
  unsigned long long best = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    best = max(best, rank(__ldcg(logits + i), i));
  }
  best = block_max(best);
  if (threadIdx.x == 0) partial[blockIdx.y * kArgmaxBlocks + blockIdx.x] = best;
}

__global__ void argmax_final_kernel(const unsigned long long* partial, int count, int32_t* ids) {
  grid_trigger();
  grid_wait();
  partial += blockIdx.x * kArgmaxBlocks;
  const unsigned long long best =
      block_max(static_cast<int>(threadIdx.x) < count ? __ldcg(partial + threadIdx.x) : 0ull);
  if (threadIdx.x == 0) ids[blockIdx.x] = static_cast<int32_t>(0xFFFFFFFFu - static_cast<unsigned>(best));
}

}  // namespace

void embed(const Gpu& gpu, const Matrix& table, const int32_t* ids, const Matrix& positions, const int32_t* pos,
           int64_t position_offset, int64_t T, float* x) {
  const auto grid = [&](int64_t each) { return dim3(grid_size(ceil_div(table.cols, 256 * each)), grid_size(T)); };
  with_format(table.type, [&]<DType D>() {
    launch(gpu, embed_kernel<D, false>, grid(kEach<D>), 256, 0, table, ids, int64_t{0}, x);
  });
  if (!positions) return;
  with_format(positions.type, [&]<DType D>() {
    launch(gpu, embed_kernel<D, true>, grid(kEach<D>), 256, 0, positions, pos, position_offset, x);
  });
}

void argmax(const Gpu& gpu, const float* logits, int64_t n, int64_t T, unsigned long long* partial, int32_t* ids) {
  const int64_t blocks = std::clamp<int64_t>(ceil_div(n, 1024), 1, kArgmaxBlocks);
  launch(gpu, argmax_partial_kernel, dim3(grid_size(blocks), grid_size(T)), 256, 0, logits, n, partial);
  launch(gpu, argmax_final_kernel, grid_size(T), 64, 0, static_cast<const unsigned long long*>(partial),
         static_cast<int>(blocks), ids);
}

}  // namespace hearth::cuda
