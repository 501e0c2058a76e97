// Products of one or a few tokens: every weight is read from memory once, so bandwidth is all that counts.
#include "cuda/kernels.cuh"
#include "cuda/row_dots.cuh"

namespace hearth::cuda {
namespace {

struct Part {
  const void* data;
  const float* bias;
  float* y;
  int64_t y_stride;
  int rows;
  int first_group;  // groups of kRows rows are numbered through all parts
  bool accumulate;
};
struct MatvecArgs {
  Part part[kMaxParts];
  int n_parts;
  int n_groups;
  int cols;
  Act in;
  InputNorm norm;
  OutputNorm next;
};

// Leaves the block's 32 rows for the norm that follows. Lane r < kRows of each warp has the warp's row r.
template <int kRows>
struct LeavesNorm {
  const OutputNorm& norm;
  const int n;

  __device__ __forceinline__ static float* shared_weight() {
    __shared__ alignas(16) float weight[32];
    return weight;
  }
  // Requests the norm's weights. May be called before grid_wait().
  __device__ __forceinline__ void start() const {
    const int i = static_cast<int>(threadIdx.x) * 4;
    if (i < 32) copy_async<16>(shared_weight() + i, norm.weight + blockIdx.y * 32 + i);
    end_copy_group();
  }
  // Called by the whole block.
  __device__ __forceinline__ void store(float y) const {
    __shared__ float rows[32];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane < kRows) rows[warp * kRows + lane] = y;
    wait_copy_groups<0>();
    __syncthreads();
    if (warp != 0) return;
    norm.store(blockIdx.x, n, static_cast<int>(blockIdx.y), rows[lane], shared_weight()[lane]);
  }
};

__device__ __forceinline__ int find_part(const MatvecArgs& a, int group) {
  int p = 0;
  while (p + 1 < a.n_parts && group >= a.part[p + 1].first_group) ++p;
  return p;
}

// The value that y starts from: the bias, and what is there when accumulating. Lane r has row r.
__device__ __forceinline__ float start_value(const Part& m, int64_t t, int row) {
  float v = m.bias != nullptr ? m.bias[row] : 0.0f;
  if (m.accumulate) v += __ldcg(m.y + t * m.y_stride + row);
  return v;
}

template <DType D, int kRows, int kUnroll, int kWarps, int kBlocks>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocks) matvec_kernel(const __grid_constant__ MatvecArgs a) {
  extern __shared__ uint4 shared[];
  grid_trigger();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int t = static_cast<int>(blockIdx.x), group = static_cast<int>(blockIdx.y) * kWarps + warp;
  RowDots<D, kRows, kUnroll> dots(a.cols);
  dots.live = group < a.n_groups;
  const Part& m = a.part[find_part(a, group)];
  const int first = (group - m.first_group) * kRows;
  const int base = dots.live ? min(first, m.rows - kRows) : 0;  // the last group may repeat rows of its neighbour
  dots.set_rows(0, m.data, base);
  dots.start();
  dots.start_norm(a.norm, shared);
  const LeavesNorm<kRows> next{a.next, m.rows};
  const bool leaves_norm = kRows * kWarps == 32 && a.next.weight != nullptr;
  if (leaves_norm) next.start();
  grid_wait();
  const int row = base + lane;
  const bool writes = dots.live && lane < kRows && row >= first;
  float y = writes ? start_value(m, t, row) : 0.0f;
  dots.run(a.norm, input_row<D>(a.in, t, a.cols), shared);
  float sum = dots.sum[0][0];
#pragma unroll
  for (int r = 1; r < kRows; ++r) sum = lane == r ? dots.sum[0][r] : sum;
  y += sum;
  if (writes) m.y[t * m.y_stride + row] = y;
  if (leaves_norm) next.store(y);
}

// Rows that 16-byte loads cannot be aligned to (f32, f16, bf16 with an odd number of columns): one element at a time.
template <DType D>
__global__ void __launch_bounds__(kMatvecWarps* kWarp) matvec_unaligned_kernel(const __grid_constant__ MatvecArgs a) {
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x % kWarp;
  const int64_t t = blockIdx.x;
  const int group = static_cast<int>(blockIdx.y) * kMatvecWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (group >= a.n_groups) return;
  const Part& m = a.part[find_part(a, group)];
  const int row = group - m.first_group;
  const int64_t at = static_cast<int64_t>(row) * a.cols;
  float sum = 0.0f;
  for (int c = lane; c < a.cols; c += kWarp) {
    float w = 0.0f;
    if constexpr (D == DType::f32) w = static_cast<const float*>(m.data)[at + c];
    if constexpr (D == DType::f16) w = half_bits_to_float(static_cast<const unsigned short*>(m.data)[at + c]);
    if constexpr (D == DType::bf16) w = bfloat2_bits_to_float2(static_cast<const unsigned short*>(m.data)[at + c]).x;
    sum = fmaf(w, __ldcg(a.in.x + t * a.cols + c), sum);
  }
  sum = group_sum(sum);
  if (lane == 0) m.y[t * m.y_stride + row] = start_value(m, t, row) + sum;
}

MatvecArgs make_args(std::span<const MatmulPart> parts, Act in, int rows) {
  HEARTH_CHECK(!parts.empty() && parts.size() <= kMaxParts);
  MatvecArgs a{};
  a.n_parts = static_cast<int>(parts.size());
  a.cols = static_cast<int>(parts[0].w.cols);
  a.in = in;
  for (size_t i = 0; i < parts.size(); ++i) {
    const MatmulPart& p = parts[i];
    HEARTH_CHECK(p.w.type == parts[0].w.type && p.w.cols == parts[0].w.cols);
    HEARTH_CHECK(!is_quantized(p.w.type) || (p.w.layout == Layout::planes && in.q8 != nullptr),
                 "quantised weights must be adopted and need the 8-bit form of their input");
    a.part[i] = {p.w.data, p.bias.data, p.y, y_stride(p), static_cast<int>(p.w.rows), a.n_groups, p.accumulate};
    a.n_groups += static_cast<int>(ceil_div(p.w.rows, rows));
  }
  return a;
}

}  // namespace

bool can_norm(const Matrix& w) {
  bool whole_chunks = false;
  with_format(w.type, [&]<DType D>() { whole_chunks = w.cols % Format<D>::kWeights == 0; });
  return whole_chunks;
}

bool can_leave_norm(const Gpu& gpu, const Matrix& w) {
  return can_norm(w) && w.rows % 32 == 0 && w.rows <= kMaxNormColumns &&
         matvec_shape(w.rows, w.rows, gpu.multiprocessors) != MatvecShape::few_rows;
}

void matvec(const Gpu& gpu, std::span<const MatmulPart> parts, Act in, int64_t T, const InputNorm* norm,
            const OutputNorm* next) {
  int64_t rows = 0, fewest = INT64_MAX;
  for (const MatmulPart& p : parts) rows += p.w.rows, fewest = std::min(fewest, p.w.rows);
  const int64_t cols = parts[0].w.cols;
  HEARTH_CHECK(norm == nullptr || !is_quantized(parts[0].w.type) || (norm->unscaled.q8 != nullptr && rows >= cols));
  HEARTH_CHECK(next == nullptr || (norm == nullptr && parts.size() == 1 && can_leave_norm(gpu, parts[0].w) &&
                                   y_stride(parts[0]) == parts[0].w.rows));
  with_format(parts[0].w.type, [&]<DType D>() {
    if constexpr (!Format<D>::kQuantized) {
      if (cols % Format<D>::kWeights != 0) {
        const MatvecArgs a = make_args(parts, in, 1);
        return launch(gpu, matvec_unaligned_kernel<D>, token_grid(T, ceil_div(a.n_groups, kMatvecWarps)),
                      kMatvecWarps * kWarp, 0, a);
      }
    }
    const auto run = [&]<int kRows, int kUnroll, int kWarps, int kBlocks>() {
      MatvecArgs a = make_args(parts, in, kRows);
      if (norm != nullptr) a.norm = *norm;
      if (next != nullptr) a.next = *next;
      launch(gpu, matvec_kernel<D, kRows, kUnroll, kWarps, kBlocks>, token_grid(T, ceil_div(a.n_groups, kWarps)),
             kWarps * kWarp, stage_bytes<D>(cols), a);
    };
    constexpr int kTogether = Format<D>::kWeights == 32 ? 4 : 8;
    constexpr int kInFour = kManyRegisters<D> ? 1 : 2;  // chunks of each of four rows
    switch (matvec_shape(rows, fewest, gpu.multiprocessors)) {
      case MatvecShape::few_rows:
        return run.template operator()<1, 4, 8, 4>();
      case MatvecShape::two_rows_a_warp:
        return run.template operator()<2, kTogether, 16, 1>();
      case MatvecShape::two_blocks:
        return run.template operator()<2, kTogether / 2, 16, 2>();
      case MatvecShape::four_rows_a_warp:
        return run.template operator()<4, kInFour, 8, 3>();
    }
  });
}

}  // namespace hearth::cuda
