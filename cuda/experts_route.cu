// From a router's input to a token's experts. One warp chooses: among at most kMostExperts numbers.
#include "cuda/exchange.cuh"
#include "cuda/experts.cuh"
#include "cuda/reduce.cuh"
#include "cuda/staged_input.cuh"

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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto high = static_cast<unsigned>(v >> 32), top = __reduce_max_sync(kAllLanes, high);
  const unsigned low = __reduce_max_sync(kAllLanes, high == top ? static_cast<unsigned>(v) : 0u);
  return static_cast<unsigned long long>(top) << 32 | low;
#else
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) v = max(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
#endif
}

// of_group[g] becomes 0 for the best groups. selecting(i): the selecting score of expert i.
template <typename Selecting>
__device__ void keep_best_groups(const Routing& r, Selecting selecting, unsigned long long* of_group) {
  const int lane = threadIdx.x, n_groups = static_cast<int>(r.n_groups);
  const int size = static_cast<int>(r.n_expert) / n_groups;
  for (int g = lane; g < n_groups; g += kWarp) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = g * size; i < (g + 1) * size; ++i) {
      const float s = selecting(i);
      second = fmaxf(second, fminf(best, s));
      best = fmaxf(best, s);
    }
    of_group[g] = order_of(size > 1 && r.n_best_of_group > 1 ? best + second : best, g);
  }
  for (int k = 0; k < r.n_groups_used; ++k) {
    unsigned long long best = 0;
    __syncwarp();
    for (int g = lane; g < n_groups; g += kWarp) best = max(best, of_group[g]);
    best = warp_largest(best);
    if (lane == 0) of_group[id_of(best)] = 0;  // kept
  }
  __syncwarp();
}

// Shared memory of choose_one().
size_t choose_bytes(const Routing& r) {
  if (r.n_groups_used >= r.n_groups) return 0;
  return static_cast<size_t>(r.n_groups) * sizeof(unsigned long long) + static_cast<size_t>(r.n_expert) * sizeof(float);
}

// Calls run.operator()<kPerLane>() for so many experts.
template <typename Run>
void with_experts_a_lane(int64_t n_expert, const Run& run) {
  if (n_expert <= 4 * kWarp) return run.template operator()<4>();
  if (n_expert <= 8 * kWarp) return run.template operator()<8>();
  run.template operator()<static_cast<int>(kMostExperts) / kWarp>();
}

// Token t's choice. Called by one warp, the block's first. Lane l has experts l, l + 32, ... in registers.
template <int kPerLane>
__device__ void choose_one(const ChooseArgs& a, int64_t t, unsigned long long* shared) {
  const Routing& r = a.routing;
  const int lane = threadIdx.x, n = static_cast<int>(r.n_expert), n_used = static_cast<int>(r.n_used);
  const float* const logits = a.logits + t * n;
  int32_t* const ids = a.to.ids + t * a.to.n_named;
  float* const weights = a.to.weights + t * a.to.n_named;
  float score[kPerLane] = {};
  unsigned long long order[kPerLane];  // 0: no expert, or chosen
  bool is_nan = false;
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) body(k, lane + k * kWarp);
  };
  const auto sum = [&] {
    float v = 0.0f;
    each([&](int k, int) { v += score[k]; });
    return group_sum(v);
  };
  // Scores become exp(score - the largest) / their sum; those of minus infinity, 0.
  const auto softmax = [&] {
    float largest = -INFINITY;
    each([&](int k, int) { largest = fmaxf(largest, score[k]); });
    largest = warp_max(largest);
    each([&](int k, int) { score[k] = score[k] == -INFINITY ? 0.0f : expf(score[k] - largest); });
    const float all = sum();
    each([&](int k, int) { score[k] /= all; });
  };
  each([&](int k, int i) { score[k] = i < n ? __ldcg(logits + i) : -INFINITY; });
  each([&](int k, int) { is_nan |= isnan(score[k]); });
  if (a.has_shared && lane == 0) {
    ids[n_used] = n;
    weights[n_used] = a.shared != nullptr ? 1.0f / (1.0f + expf(-__ldcg(a.shared + t))) : 1.0f;
  }
  if (__any_sync(kAllLanes, is_nan)) {
    for (int j = lane; j < n_used; j += kWarp) ids[j] = j, weights[j] = NAN;
    return;
  }
  if (r.gating == Gating::softmax) softmax();
  if (r.gating == Gating::sigmoid) each([&](int k, int) { score[k] = 1.0f / (1.0f + expf(-score[k])); });
  const auto selecting = [&](int k, int i) { return score[k] + (a.correction != nullptr ? a.correction[i] : 0.0f); };
  each([&](int k, int i) { order[k] = i < n ? order_of(selecting(k, i), i) : 0; });
  if (r.n_groups_used < r.n_groups) {
    auto* const by_id = reinterpret_cast<float*>(shared + r.n_groups);
    each([&](int k, int i) {
      if (i < n) by_id[i] = selecting(k, i);
    });
    __syncwarp();
    keep_best_groups(
        r, [&](int i) { return by_id[i]; }, shared);
    const int size = n / static_cast<int>(r.n_groups);
    each([&](int k, int i) {
      if (i < n && shared[i / size] != 0) order[k] = order_of(-INFINITY, i);
    });
  }
  for (int j = 0; j < n_used; ++j) {
    unsigned long long best = 0;
    each([&](int k, int) { best = max(best, order[k]); });
    best = warp_largest(best);
    each([&](int k, int) { order[k] = order[k] == best ? 0 : order[k]; });
  }
  const float none = r.gating == Gating::selected_softmax ? -INFINITY : 0.0f;
  each([&](int k, int i) { score[k] = i < n && order[k] == 0 ? score[k] : none; });
  if (r.gating == Gating::selected_softmax) softmax();
  const float divisor = r.normalize ? fmaxf(sum(), kSmallestSum) : 1.0f;
  int count = 0;
  each([&](int k, int i) {
    const bool is_chosen = i < n && order[k] == 0;
    const unsigned mask = __ballot_sync(kAllLanes, is_chosen);
    const int j = count + __popc(mask & ((1u << lane) - 1));
    if (is_chosen) ids[j] = i, weights[j] = score[k] / divisor * r.scale;
    count += __popc(mask);
  });
}

template <int kPerLane>
__global__ void __launch_bounds__(kWarp) choose_kernel(const __grid_constant__ ChooseArgs a) {
  extern __shared__ unsigned long long of_group[];
  grid_trigger();
  grid_wait();
  choose_one<kPerLane>(a, blockIdx.x, of_group);
}

// --- few tokens: the norm of the input, the products and the choice in one kernel ---

constexpr int kRouterThreads = 256;
constexpr int kMaxQuads = 8;  // of a thread

struct RouteArgs {
  ChooseArgs choose;
  const float *w, *bias, *shared_gate;  // f32
  InputNorm norm;                       // norm.x null: the input is x
  const float* x;                       // [T][cols]
  float *logits, *shared;
  unsigned* arrived;  // [T], zero before and after
  int cols;
};

// Grid: (T, rows): the experts, then the shared one's gate. The token's last block to have its logit chooses.
template <int kQuads, int kPerLane>
__global__ void __launch_bounds__(kRouterThreads) route_kernel(const __grid_constant__ RouteArgs a) {
  extern __shared__ unsigned long long of_group[];
  __shared__ float2 sums[kRouterThreads / kWarp];
  __shared__ bool is_last;
  grid_trigger();
  const int tid = static_cast<int>(threadIdx.x), n = static_cast<int>(a.choose.routing.n_expert);
  const int row = static_cast<int>(blockIdx.y), n_quads = a.cols / 4;
  const int64_t t = blockIdx.x;
  const bool gates = row == n, normed = a.norm.x != nullptr;
  const uint4* const w =
      reinterpret_cast<const uint4*>(gates ? a.shared_gate : a.w + static_cast<int64_t>(row) * a.cols);
  const auto as_floats = [](const uint4& v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
  };
  float4 weight[kQuads];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int i = tid + k * kRouterThreads;
    weight[k] = make_float4(0, 0, 0, 0);
    if (i >= n_quads) continue;
    weight[k] = as_floats(load_weights(w + i));
    if (normed)
      weight[k] = multiply(weight[k], as_floats(load_weights(reinterpret_cast<const uint4*>(a.norm.weight) + i)));
  }
  grid_wait();
  const float* const x = (normed ? a.norm.x : a.x) + t * a.cols;
  float squares = 0.0f, dot = 0.0f;
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int i = tid + k * kRouterThreads;
    if (i >= n_quads) continue;
    const float4 v = __ldcg(reinterpret_cast<const float4*>(x) + i);
    squares = sum_of_squares(v, squares);
    dot = fmaf(v.x, weight[k].x, fmaf(v.y, weight[k].y, fmaf(v.z, weight[k].z, fmaf(v.w, weight[k].w, dot))));
  }
  squares = group_sum(squares), dot = group_sum(dot);
  if (tid % kWarp == 0) sums[tid / kWarp] = {squares, dot};
  __syncthreads();
  squares = dot = 0.0f;
#pragma unroll
  for (const float2& of_warp : sums) squares += of_warp.x, dot += of_warp.y;
  const float scale = normed ? a.norm.scale(squares) : 1.0f;
  if (tid == 0) {
    if (gates) {
      __stcg(a.shared + t, dot * scale);
    } else {
      __stcg(a.logits + t * n + row, dot * scale + (a.bias != nullptr ? a.bias[row] : 0.0f));
    }
    is_last = count_arrival(a.arrived + t) == gridDim.y - 1;
    if (is_last) a.arrived[t] = 0;  // for the next launch
  }
  if (normed && tid >= kRouterThreads - kWarp) {  // the block's share of the norm's result
    for (int block = row; block < a.norm.n / 32; block += static_cast<int>(gridDim.y)) {
      const int i = block * 32 + tid % kWarp;
      a.norm.store(t, block, __ldcg(x + i) * a.norm.weight[i] * scale);
    }
  }
  __syncthreads();
  if (is_last && tid < kWarp) choose_one<kPerLane>(a.choose, t, of_group);
}

ChooseArgs choose_args(const Router& router, const float* logits, const float* shared, const ExpertChoice& choice) {
  const Routing& r = router.routing;
  HEARTH_CHECK(r.n_used >= 1 && r.n_used <= r.n_expert && r.n_expert <= kMostExperts, "{} experts of {}", r.n_used,
               r.n_expert);
  return {r, logits, shared, router.correction.data, router.shared, choice};
}

}  // namespace

void choose(const Gpu& gpu, const Router& router, const float* logits, const float* shared, int64_t T,
            const ExpertChoice& choice) {
  with_experts_a_lane(router.routing.n_expert, [&]<int kPerLane>() {
    launch(gpu, choose_kernel<kPerLane>, grid_size(T), kWarp, choose_bytes(router.routing),
           choose_args(router, logits, shared, choice));
  });
}

bool route_fits(const Router& r) {
  const bool plain = r.w.type == DType::f32 && (!r.shared_gate || r.shared_gate.type == DType::f32);
  return plain && r.w.cols % 4 == 0 && r.w.cols <= 4 * kMaxQuads * kRouterThreads;
}

void route(const Gpu& gpu, const Router& r, const InputNorm* norm, const float* x, int64_t T, const RouteScratch& to,
           const ExpertChoice& choice) {
  HEARTH_CHECK(route_fits(r) && T <= kFewTokens);
  const int64_t n = r.routing.n_expert, cols = r.w.cols;
  float* const shared = r.shared_gate ? to.logits + T * n : nullptr;
  const auto data = [](const Matrix& m) { return static_cast<const float*>(m.data); };
  const RouteArgs args{choose_args(r, to.logits, shared, choice),
                       data(r.w),
                       r.bias.data,
                       data(r.shared_gate),
                       norm != nullptr ? *norm : InputNorm{},
                       x,
                       to.logits,
                       shared,
                       to.arrived,
                       static_cast<int>(cols)};
  const int64_t quads = ceil_div(cols / 4, kRouterThreads);
  with_experts_a_lane(n, [&]<int kPerLane>() {
    const auto kernel = quads <= 2   ? route_kernel<2, kPerLane>
                        : quads <= 4 ? route_kernel<4, kPerLane>
                                     : route_kernel<kMaxQuads, kPerLane>;
    launch(gpu, kernel, token_grid(T, n + (r.shared_gate ? 1 : 0)), kRouterThreads, choose_bytes(r.routing), args);
  });
}

}  // namespace hearth::cuda
