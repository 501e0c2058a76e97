// Norms of heads of q and k, and of latents, rotary embedding, and the write of k and v into the cache: one warp a head.
#include <cuda_fp16.h>

#include "cuda/attention.cuh"
#include "cuda/rope.cuh"

namespace hearth::cuda {
namespace {

constexpr int kHeadsPerBlock = 4;

// Heads of a token are numbered q, then k, then v, which latent attention has none of.
constexpr __host__ __device__ int64_t heads_of_token(const AttentionArgs& a) {
  return a.n_head + (a.latent_norm.n > 0 ? 1 : 2) * a.n_head_kv;
}

// n: heads of all tokens.
__global__ void __launch_bounds__(kHeadsPerBlock* kWarp)
    rope_kv_kernel(const __grid_constant__ AttentionArgs a, int64_t n) {
  extern __shared__ float heads[];
  grid_trigger();
  grid_wait();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kHeadsPerBlock + warp;
  if (index >= n) return;
  const int64_t per_token = heads_of_token(a), t = index / per_token;
  int64_t h = index % per_token;
  const int pos = __ldcg(a.rows.pos + t), d = static_cast<int>(a.head_dim);
  float* head = heads + warp * d;
  const bool is_q = h < a.n_head, is_k = !is_q && h < a.n_head + a.n_head_kv;
  if (!is_q) h -= a.n_head + (is_k ? 0 : a.n_head_kv);
  const float* from = is_q ? a.q + t * a.n_head * d : (is_k ? a.k : a.v) + t * a.n_head_kv * d;
  for (int i = lane; i < d; i += kWarp) head[i] = __ldcg(from + h * d + i);
  __syncwarp();
  if (is_q || is_k) {
    const Vector& weight = is_q ? a.q_norm : a.k_norm;
    if (weight.data != nullptr) norm_head(head, d, weight.data, a.norm_eps);
    if (is_k && a.latent_norm.data != nullptr) {
      const int n_latent = static_cast<int>(a.latent_norm.n);
      norm_head(head + d - n_latent, n_latent, a.latent_norm.data, a.norm_eps);
    }
    if (a.rope != RopeKind::none) rotate_head(head, a, [&](int pair) { return rotation(a, pair, pos); });
  }
  if (is_q) {
    for (int i = lane; i < d; i += kWarp) a.q[(t * a.n_head + h) * d + i] = head[i];
    return;
  }
  const int page = __ldcg(page_table(a.rows, __ldcg(a.rows.slot + t)) + page_index(pos));
  f16_t* to = (is_k ? a.cache.k : a.cache.v) + cache_offset(a, page, h, pos);
  for (int i = lane; i < d; i += kWarp) to[i] = __half_as_ushort(__float2half_rn(head[i]));
}

}  // namespace

void rope_kv(const Gpu& gpu, const AttentionArgs& a, int64_t T) {
  const int64_t n = T * heads_of_token(a);
  launch(gpu, rope_kv_kernel, grid_size(ceil_div(n, kHeadsPerBlock)), kHeadsPerBlock * kWarp,
         static_cast<size_t>(kHeadsPerBlock * a.head_dim) * sizeof(float), a, n);
}

}  // namespace hearth::cuda
