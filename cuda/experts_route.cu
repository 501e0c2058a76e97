// From a router's logits to a token's experts. One warp a token: a choice among at most kMostExperts numbers.
#include "cuda/experts.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {
namespace {

constexpr float kSmallestSum = 6.103515625e-5f;  // as in core/experts.cpp

struct ChooseArgs {
  Routing routing;
  const float* logits;      // [T][n_expert]
  const float* shared;      // [T] or null
  const float* correction;  // [n_expert] or null
  bool has_shared;
  ExpertChoice to;
};

// Numbers in the order of (score, the smaller id first); 0 is below all.
__device__ __forceinline__ unsigned long long order_of(float score, int id) {
  const unsigned bits = __float_as_uint(score + 0.0f);  // -0 becomes 0
  const unsigned ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | (0xFFFFFFFFu - static_cast<unsigned>(id));
}
__device__ __forceinline__ int id_of(unsigned long long order) {
  return static_cast<int>(0xFFFFFFFFu - static_cast<unsigned>(order));
}
__device__ __forceinline__ unsigned long long warp_largest(unsigned long long v) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) v = max(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}

// x[i] becomes exp(x[i] - the largest) / their sum.
__device__ __forceinline__ void softmax(float* x, int n) {
  const int lane = threadIdx.x;
  float largest = -INFINITY, sum = 0.0f;
  for (int i = lane; i < n; i += kWarp) largest = fmaxf(largest, x[i]);
  largest = warp_max(largest);
  for (int i = lane; i < n; i += kWarp) sum += x[i] = expf(x[i] - largest);
  sum = group_sum(sum);
  for (int i = lane; i < n; i += kWarp) x[i] /= sum;
  __syncwarp();
}

// Experts of groups that are not among the best get the order of -inf.
__device__ void keep_best_groups(const Routing& r, const float* score, const float* correction,
                                 unsigned long long* order, unsigned long long* of_group) {
  const int lane = threadIdx.x, n_groups = static_cast<int>(r.n_groups);
  const int size = static_cast<int>(r.n_expert) / n_groups;
  const auto selecting = [&](int i) { return score[i] + (correction != nullptr ? correction[i] : 0.0f); };
  for (int g = lane; g < n_groups; g += kWarp) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      const float s = selecting(i);
      second = fmaxf(second, fminf(best, s));
      best = fmaxf(best, s);
    }
    of_group[g] = order_of(size > 1 ? best + second : best, g);
  }
  for (int k = 0; k < r.n_groups_used; ++k) {
    unsigned long long best = 0;
    __syncwarp();
    for (int g = lane; g < n_groups; g += kWarp) best = max(best, of_group[g]);
    best = warp_largest(best);
    if (lane == 0) of_group[id_of(best)] = 0;  // kept
  }
  __syncwarp();
  for (int i = lane; i < r.n_expert; i += kWarp) {
    if (of_group[i / size] != 0) order[i] = order_of(-INFINITY, i);
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kWarp) choose_kernel(const __grid_constant__ ChooseArgs a) {
  extern __shared__ unsigned long long orders[];  // of the experts, then of the groups
  const Routing& r = a.routing;
  const int lane = threadIdx.x, n = static_cast<int>(r.n_expert), n_used = static_cast<int>(r.n_used);
  unsigned long long* const of_group = orders + n;
  float* const score = reinterpret_cast<float*>(of_group + r.n_groups);
  float* const chosen = score + n;  // weights of the chosen ones
  grid_trigger();
  grid_wait();
  const float* const logits = a.logits + static_cast<int64_t>(blockIdx.x) * n;
  int32_t* const ids = a.to.ids + blockIdx.x * a.to.n_named;
  float* const weights = a.to.weights + blockIdx.x * a.to.n_named;
  bool is_nan = false;
  for (int i = lane; i < n; i += kWarp) is_nan |= isnan(score[i] = __ldcg(logits + i));
  if (a.has_shared && lane == 0) {
    ids[n_used] = n;
    weights[n_used] = a.shared != nullptr ? 1.0f / (1.0f + expf(-__ldcg(a.shared + blockIdx.x))) : 1.0f;
  }
  if (__any_sync(kAllLanes, is_nan)) {
    for (int j = lane; j < n_used; j += kWarp) ids[j] = j, weights[j] = NAN;
    return;
  }
  __syncwarp();
  if (r.gating == Gating::softmax) softmax(score, n);
  for (int i = lane; i < n; i += kWarp) {
    if (r.gating == Gating::sigmoid) score[i] = 1.0f / (1.0f + expf(-score[i]));
    orders[i] = order_of(score[i] + (a.correction != nullptr ? a.correction[i] : 0.0f), i);
  }
  __syncwarp();
  if (r.n_groups_used < r.n_groups) keep_best_groups(r, score, a.correction, orders, of_group);
  for (int j = 0; j < n_used; ++j) {
    unsigned long long best = 0;
    for (int i = lane; i < n; i += kWarp) best = max(best, orders[i]);
    best = warp_largest(best);
    if (lane == id_of(best) % kWarp) orders[id_of(best)] = 0;  // that lane's own
  }
  __syncwarp();
  for (int base = 0, count = 0; base < n; base += kWarp) {
    const int i = base + lane;
    const unsigned mask = __ballot_sync(kAllLanes, i < n && orders[i] == 0);
    if (i < n && orders[i] == 0) {
      const int j = count + __popc(mask & ((1u << lane) - 1));
      ids[j] = i;
      chosen[j] = score[i];
    }
    count += __popc(mask);
  }
  __syncwarp();
  if (r.gating == Gating::selected_softmax) softmax(chosen, n_used);
  float sum = 1.0f;
  if (r.normalize) {
    sum = 0.0f;
    for (int j = lane; j < n_used; j += kWarp) sum += chosen[j];
    sum = fmaxf(group_sum(sum), kSmallestSum);
  }
  for (int j = lane; j < n_used; j += kWarp) weights[j] = chosen[j] / sum * r.scale;
}

}  // namespace

void choose(const Gpu& gpu, const Router& router, const float* logits, const float* shared, int64_t T,
            const ExpertChoice& choice) {
  const Routing& r = router.routing;
  HEARTH_CHECK(r.n_used >= 1 && r.n_used <= r.n_expert && r.n_expert <= kMostExperts, "{} experts of {}", r.n_used,
               r.n_expert);
  const size_t bytes = static_cast<size_t>(r.n_expert + r.n_groups) * sizeof(unsigned long long) +
                       static_cast<size_t>(r.n_expert + r.n_used) * sizeof(float);
  launch(gpu, choose_kernel, grid_size(T), kWarp, bytes,
         ChooseArgs{r, logits, shared, router.correction.data, router.shared, choice});
}

}  // namespace hearth::cuda
