// Per-head q/k norm, rotary embedding, and the write of k and v into the cache: one warp a head.
#include <cuda_fp16.h>

#include "cuda/kernels.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rope.cuh"

namespace hearth::cuda {
namespace {

constexpr int kHeadsPerBlock = 4;

__device__ void store_cache(f16_t* cache, const RopeKvArgs& a, int64_t head, int pos, const float* values) {
  f16_t* to = cache + (head * a.n_ctx + pos) * a.head_dim;
  for (int i = threadIdx.x % kWarp; i < a.head_dim; i += kWarp) to[i] = __half_as_ushort(__float2half_rn(values[i]));
}

// Heads are numbered q, then k, then v.
__global__ void __launch_bounds__(kHeadsPerBlock* kWarp)
    rope_kv_kernel(const __grid_constant__ RopeKvArgs a, int64_t n) {
  extern __shared__ float heads[];
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kHeadsPerBlock + warp;
  if (index >= n) return;
  const int64_t per_token = a.n_head + 2 * a.n_head_kv, t = index / per_token;
  int64_t h = index % per_token;
  const int pos = __ldcg(a.pos + t);
  const int d = static_cast<int>(a.head_dim);
  float* head = heads + warp * d;
  const bool is_q = h < a.n_head, is_k = !is_q && h < a.n_head + a.n_head_kv;
  if (!is_q) h -= a.n_head + (is_k ? 0 : a.n_head_kv);
  const float* from = is_q ? a.q + t * a.q_stride : (is_k ? a.k + t * a.k_stride : a.v + t * a.v_stride);
  for (int i = lane; i < d; i += kWarp) head[i] = __ldcg(from + h * d + i);
  __syncwarp();
  if (!is_q && !is_k) return store_cache(a.v_cache, a, h, pos, head);
  const Vector& weight = is_q ? a.q_norm : a.k_norm;
  if (weight.data != nullptr) norm_head(head, d, weight.data, a.norm_eps);
  if (a.rope != RopeKind::none) rotate_head(head, a, [&](int pair) { return rotation(a, pair, pos); });
  if (is_k) return store_cache(a.k_cache, a, h, pos, head);
  for (int i = lane; i < d; i += kWarp) a.q[t * a.q_stride + h * d + i] = head[i];
}

}  // namespace

void rope_kv(const Gpu& gpu, const RopeKvArgs& args, int64_t T) {
  RopeKvArgs a = args;
  if (a.q_stride == 0) a.q_stride = a.n_head * a.head_dim;
  if (a.k_stride == 0) a.k_stride = a.n_head_kv * a.head_dim;
  if (a.v_stride == 0) a.v_stride = a.n_head_kv * a.head_dim;
  const int64_t n = T * (a.n_head + 2 * a.n_head_kv);
  launch(gpu, rope_kv_kernel, grid_size(ceil_div(n, kHeadsPerBlock)), kHeadsPerBlock * kWarp,
         static_cast<size_t>(kHeadsPerBlock * a.head_dim) * sizeof(float), a, n);
}

}  // namespace hearth::cuda
