// Products of one or a few tokens: every weight is read once, so bandwidth is all that counts.
#include "cuda/kernels.cuh"
#include "cuda/row_stream.cuh"

namespace hearth::cuda {
namespace {

struct Part {
  const void* data;
  const void* scales;
  const float* bias;
  float* y;
  int64_t y_stride;
  int first_row;  // rows are numbered through all parts
  bool accumulate;
};
struct MatvecArgs {
  Part part[kMaxParts];
  int n_parts;
  int rows;  // of all parts
  int cols;

  __device__ __forceinline__ const Part& find(int row) const {
    int p = 0;
    while (p + 1 < n_parts && row >= part[p + 1].first_row) ++p;
    return part[p];
  }
};

// The value that y starts from: the bias, and what is there when accumulating.
__device__ __forceinline__ float start_value(const Part& m, int64_t t, int row) {
  float v = m.bias != nullptr ? m.bias[row] : 0.0f;
  if (m.accumulate) v += __ldcg(m.y + t * m.y_stride + row);
  return v;
}

template <DType D>
struct MatvecJob {
  static constexpr bool kRowsKnown = true;
  static constexpr int kRowsPerOutput = 1;
  const MatvecArgs& a;
  int64_t t;

  __device__ __forceinline__ int n_outputs() const { return a.rows; }
  __device__ __forceinline__ RowAt row(int row) const {
    const Part& m = a.find(row);
    return row_at<D>(m.data, m.scales, row - m.first_row, a.cols);
  }
  __device__ __forceinline__ float start(int row) const {
    const Part& m = a.find(row);
    return start_value(m, t, row - m.first_row);
  }
  __device__ __forceinline__ void finish(int row, float start, const float* sums, int parts) const {
    const Part& m = a.find(row);
    m.y[t * m.y_stride + row - m.first_row] = start + sum_parts(sums, parts);
  }
};

template <DType D, int kChunks>
__global__ void __launch_bounds__(kStreamMaxThreads, 2)
    matvec_kernel(const __grid_constant__ MatvecArgs a, const __grid_constant__ StreamArgs s) {
  const int64_t t = blockIdx.y;
  stream_rows<D, kChunks>(MatvecJob<D>{a, t}, s, s.x + t * s.cols);
}

constexpr int kUnalignedWarps = 8;

// Rows that 16-byte loads cannot be aligned to (f32, f16, bf16 with an odd number of columns): one element at a time.
template <DType D>
__global__ void __launch_bounds__(kUnalignedWarps* kWarp)
    matvec_unaligned_kernel(const __grid_constant__ MatvecArgs a, const float* x) {
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x % kWarp;
  const int64_t t = blockIdx.y;
  const int row = static_cast<int>(blockIdx.x) * kUnalignedWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (row >= a.rows) return;
  const Part& m = a.find(row);
  const int64_t at = static_cast<int64_t>(row - m.first_row) * a.cols;
  float sum = 0.0f;
  for (int c = lane; c < a.cols; c += kWarp) {
    float w = 0.0f;
    if constexpr (D == DType::f32) w = static_cast<const float*>(m.data)[at + c];
    if constexpr (D == DType::f16) w = half_bits_to_float(static_cast<const unsigned short*>(m.data)[at + c]);
    if constexpr (D == DType::bf16) w = bfloat2_bits_to_float2(static_cast<const unsigned short*>(m.data)[at + c]).x;
    sum = fmaf(w, __ldcg(x + t * a.cols + c), sum);
  }
  sum = group_sum(sum);
  if (lane == 0) m.y[t * m.y_stride + row - m.first_row] = start_value(m, t, row - m.first_row) + sum;
}

MatvecArgs make_args(std::span<const MatmulPart> parts) {
  HEARTH_CHECK(!parts.empty() && parts.size() <= kMaxParts);
  MatvecArgs a{};
  a.n_parts = static_cast<int>(parts.size());
  a.cols = static_cast<int>(parts[0].w.cols);
  for (size_t i = 0; i < parts.size(); ++i) {
    const MatmulPart& p = parts[i];
    HEARTH_CHECK(p.w.type == parts[0].w.type && p.w.cols == parts[0].w.cols);
    HEARTH_CHECK(!is_quantized(p.w.type) || p.w.scales != nullptr, "quantised weights must be adopted");
    a.part[i] = {p.w.data, p.w.scales, p.bias.data, p.y, p.y_stride != 0 ? p.y_stride : p.w.rows, a.rows, p.accumulate};
    a.rows += static_cast<int>(p.w.rows);
  }
  return a;
}

}  // namespace

void matvec(const Gpu& gpu, std::span<const MatmulPart> parts, const float* x, int64_t T) {
  const MatvecArgs a = make_args(parts);
  with_format(parts[0].w.type, [&]<DType D>() {
    if constexpr (!Format<D>::kQuantized) {
      if (a.cols % Format<D>::kWeights != 0) {
        const dim3 grid(grid_size(ceil_div(a.rows, kUnalignedWarps)), grid_size(T));
        return launch(gpu, matvec_unaligned_kernel<D>, grid, kUnalignedWarps * kWarp, 0, a, x);
      }
    }
    const StreamArgs s = stream_args<D>(gpu, x, a.cols);
    with_chunks(s.plan,
                [&]<int kChunks>() { launch_stream<D, kChunks>(gpu, matvec_kernel<D, kChunks>, a.rows, 1, T, s, a); });
  });
}

}  // namespace hearth::cuda
