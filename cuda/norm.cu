// RMSNorm and LayerNorm, one block a row, values in registers; operations on single elements; the 8-bit form of rows.
#include "cuda/format.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {
namespace {

struct NormKernelArgs {
  const float* x;
  const float* weight;
  const float* bias;
  float* out;
  std::byte* q8;
  int64_t q8_stride;  // bytes
  int n;
  float eps;
};

template <int kVec>
struct Elements {
  float v[kVec];
};
template <int kVec>
__device__ __forceinline__ Elements<kVec> load(const float* p) {
  Elements<kVec> e;
  if constexpr (kVec == 4) {
    const float4 f = __ldcg(reinterpret_cast<const float4*>(p));
    e = {{f.x, f.y, f.z, f.w}};
  } else {
    e.v[0] = __ldcg(p);
  }
  return e;
}

template <int kGroups>
__device__ __forceinline__ void store_q8_quads(const float (&v)[kGroups][4], std::byte* row, int n) {
  Q8Quad q[kGroups];
  quantize_quads<kGroups, true>(v, q);
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    const int quad = static_cast<int>(threadIdx.x + k * blockDim.x);
    if (quad * 4 >= n) continue;
    reinterpret_cast<unsigned*>(row)[quad] = q[k].word;
    if (quad % 8 == 0) reinterpret_cast<Q8Scale*>(row + q8_quants_bytes(n))[quad / 8] = q[k].scale;
  }
}

// Thread i has groups i, i + threads, ... of kVec neighbouring elements.
template <NormKind kKind, int kVec, int kGroups>
__global__ void __launch_bounds__(1024, 1) norm_kernel(const __grid_constant__ NormKernelArgs a) {
  __shared__ float shared[2][kWarp];
  grid_trigger();
  const int64_t row = blockIdx.x;
  const auto at = [&](int k) { return static_cast<int>(threadIdx.x + k * blockDim.x) * kVec; };
  Elements<kVec> weight[kGroups], bias[kGroups], x[kGroups];
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    weight[k] = bias[k] = x[k] = {};
    if (at(k) < a.n) weight[k] = load<kVec>(a.weight + at(k));
    if (at(k) < a.n && a.bias != nullptr) bias[k] = load<kVec>(a.bias + at(k));
  }
  grid_wait();
  float sum = 0.0f, mean = 0.0f;
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    if (at(k) < a.n) x[k] = load<kVec>(a.x + row * a.n + at(k));
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum += kKind == NormKind::layer ? x[k].v[i] : x[k].v[i] * x[k].v[i];
  }
  sum = block_sum(sum, shared[0]);
  if constexpr (kKind == NormKind::layer) {
    mean = sum / static_cast<float>(a.n);
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares += at(k) < a.n ? (x[k].v[i] - mean) * (x[k].v[i] - mean) : 0.0f;
    }
    sum = block_sum(squares, shared[1]);
  }
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(a.n) + a.eps);
  float y[kGroups][kVec];
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    float* out = a.out + row * a.n + at(k);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[k][i] = (x[k].v[i] - mean) * scale * weight[k].v[i] + bias[k].v[i];
    if (at(k) >= a.n) continue;
    if constexpr (kVec == 4) {
      *reinterpret_cast<float4*>(out) = make_float4(y[k][0], y[k][1], y[k][2], y[k][3]);
    } else {
      *out = y[k][0];
    }
  }
  if constexpr (kVec == 4) {
    if (a.q8 != nullptr) store_q8_quads<kGroups>(y, a.q8 + row * a.q8_stride, a.n);
  }
}

template <NormKind kKind>
auto choose_kernel(bool vectors, int64_t groups) {
  if (!vectors) return norm_kernel<kKind, 1, 16>;
  if (groups <= 1) return norm_kernel<kKind, 4, 1>;
  if (groups <= 2) return norm_kernel<kKind, 4, 2>;
  return norm_kernel<kKind, 4, 4>;
}

__global__ void quantize_kernel(const float* x, int64_t n_blocks, int64_t n, std::byte* q8, int64_t q8_stride) {
  grid_trigger();
  grid_wait();
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (block >= n_blocks) return;
  const int64_t per_row = ceil_div(n, 32), row = block / per_row;
  const int64_t i = block % per_row * 32 + threadIdx.x % kWarp;
  store_q8_block(i < n ? __ldcg(x + row * n + i) : 0.0f, q8 + row * q8_stride, n, block % per_row);
}

// x[i] = op(x[i], i)
template <typename Op>
__global__ void each_kernel(float* x, int64_t n, Op op) {
  grid_trigger();
  grid_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] = op(__ldcg(x + i), i);
}
struct AddOp {
  const float* x;
  __device__ float operator()(float y, int64_t i) const { return y + __ldcg(x + i); }
};
struct ScaleOp {
  float factor;
  __device__ float operator()(float x, int64_t) const { return factor * x; }
};
struct SoftCapOp {
  float cap;
  __device__ float operator()(float x, int64_t) const { return cap * tanhf(x / cap); }
};
template <typename Op>
void each(const Gpu& gpu, float* x, int64_t n, Op op) {
  constexpr int kThreads = 256;
  launch(gpu, each_kernel<Op>, grid_size(ceil_div(n, kThreads)), kThreads, 0, x, n, op);
}

}  // namespace

void add(const Gpu& gpu, const float* x, int64_t n, float* y) {
  each(gpu, y, n, AddOp{x});
}
void scale(const Gpu& gpu, float factor, int64_t n, float* x) {
  each(gpu, x, n, ScaleOp{factor});
}
void soft_cap(const Gpu& gpu, float cap, int64_t n, float* x) {
  each(gpu, x, n, SoftCapOp{cap});
}

void norm(const Gpu& gpu, const NormArgs& a, const float* x, int64_t T, Act out) {
  constexpr int64_t kThreads = 1024, kLongest = 16 * kThreads;
  if (a.n > kLongest) {
    fail("rows of {} elements cannot be normalised on the GPU; the longest possible is {}", a.n, kLongest);
  }
  HEARTH_CHECK(out.q8 == nullptr || a.n % 32 == 0, "the 8-bit form of {} elements", a.n);
  const bool vectors = a.n % 4 == 0;
  const int64_t groups = vectors ? a.n / 4 : a.n, threads = std::min(kThreads, round_up(groups, kWarp));
  const NormKernelArgs args{x,
                            a.weight.data,
                            a.bias.data,
                            out.x,
                            static_cast<std::byte*>(out.q8),
                            q8_row_bytes(a.n),
                            static_cast<int>(a.n),
                            a.eps};
  const int64_t per_thread = ceil_div(groups, threads);
  const auto kernel = a.kind == NormKind::rms ? choose_kernel<NormKind::rms>(vectors, per_thread)
                                              : choose_kernel<NormKind::layer>(vectors, per_thread);
  launch(gpu, kernel, grid_size(T), static_cast<int>(threads), 0, args);
}

void quantize_rows(const Gpu& gpu, const float* x, int64_t T, int64_t n, void* q8) {
  const int64_t blocks = T * ceil_div(n, 32);
  launch(gpu, quantize_kernel, grid_size(ceil_div(blocks, 8)), 8 * kWarp, 0, x, blocks, n, static_cast<std::byte*>(q8),
         q8_row_bytes(n));
}

}  // namespace hearth::cuda
