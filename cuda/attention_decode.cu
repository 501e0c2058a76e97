// Attention of one or a few new tokens over a long cache: the context is split over blocks (flash decoding), every key
// and value is read once for all query heads that share it, and the pieces are merged by a second kernel.
//
// A lane has 8 dimensions of a head; kLanes lanes share a key. Each such group walks its keys with its own online
// softmax (Milakov and Gimelshein 2018) in base 2; groups, warps and blocks are merged at the end, always in the same
// order.
#include <cuda_fp16.h>

#include "cuda/format.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kDims = 8;         // a lane's, one 16-byte load
constexpr int kBatch = 4;        // keys in flight per group
constexpr float kNone = -1e30f;  // below every score; finite, so that differences stay numbers

struct DecodeArgs {
  AttentionArgs a;
  int group;       // query heads of a kv head
  int n_blocks_q;  // blocks that share a kv head's query heads
  int max_splits;
  float* acc;       // [T][n_head][max_splits][head_dim], not normalised
  float2* max_sum;  // [T][n_head][max_splits]
};

struct Span {
  int begin, end;
};
__device__ __forceinline__ Span context_span(const AttentionArgs& a, int64_t t) {
  const int end = __ldcg(a.pos + t) + 1;
  return {a.window > 0 ? max(0, end - static_cast<int>(a.window)) : 0, end};
}

__device__ __forceinline__ void unpack(const uint4& v, float* out) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = half2_bits_to_float2(words[i]);
    out[2 * i] = f.x, out[2 * i + 1] = f.y;
  }
}

// One group's running softmax over the keys it has seen, for kHeads query heads.
template <int kLanes, int kHeads>
struct Running {
  float m[kHeads], sum[kHeads], acc[kHeads][kDims];

  __device__ __forceinline__ Running() {
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      m[g] = kNone, sum[g] = 0.0f;
#pragma unroll
      for (int i = 0; i < kDims; ++i) acc[g][i] = 0.0f;
    }
  }
  // n keys (the first n of kBatch) with their values.
  __device__ __forceinline__ void add(const float (&q)[kHeads][kDims], const uint4 (&k)[kBatch],
                                      const uint4 (&v)[kBatch], int n) {
    float s[kBatch][kHeads];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float key[kDims];
      unpack(k[b], key);
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kDims; ++i) dot = fmaf(q[g][i], key[i], dot);
        s[b][g] = group_sum<kLanes>(dot);
      }
    }
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      float top = m[g];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) top = b < n ? fmaxf(top, s[b][g]) : top;
      const float scale = exp2f(m[g] - top);
      m[g] = top, sum[g] *= scale;
#pragma unroll
      for (int i = 0; i < kDims; ++i) acc[g][i] *= scale;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        s[b][g] = b < n ? exp2f(s[b][g] - top) : 0.0f;
        sum[g] += s[b][g];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float value[kDims];
      unpack(v[b], value);
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
#pragma unroll
        for (int i = 0; i < kDims; ++i) acc[g][i] = fmaf(s[b][g], value[i], acc[g][i]);
      }
    }
  }
  // Merges the groups of the warp: all end with the same state.
  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int offset = kLanes; offset < kWarp; offset *= 2) {
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        const float other = __shfl_xor_sync(kAllLanes, m[g], offset), top = fmaxf(m[g], other);
        const float scale = exp2f(m[g] - top);
        m[g] = top, sum[g] *= scale;
        sum[g] += __shfl_xor_sync(kAllLanes, sum[g], offset);
#pragma unroll
        for (int i = 0; i < kDims; ++i) {
          acc[g][i] *= scale;
          acc[g][i] += __shfl_xor_sync(kAllLanes, acc[g][i], offset);
        }
      }
    }
  }
};

// Grid: (splits, n_head_kv * n_blocks_q, T).
template <int kLanes, int kHeads>
__global__ void __launch_bounds__(kWarps* kWarp) decode_kernel(const __grid_constant__ DecodeArgs d) {
  constexpr int kGroups = kWarp / kLanes * kWarps;  // keys that the block handles at once
  __shared__ float shared_acc[kWarps][kHeads][kLanes * kDims];
  __shared__ float2 shared_max_sum[kWarps][kHeads];
  const AttentionArgs& a = d.a;
  grid_trigger();
  grid_wait();
  const int64_t t = blockIdx.z;
  const Span span = context_span(a, t);
  const int keys = static_cast<int>(attention_split_keys(span.end - span.begin, d.max_splits));
  const int first = span.begin + static_cast<int>(blockIdx.x) * keys, last = min(first + keys, span.end);
  if (first >= last) return;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, part = lane % kLanes;
  const int64_t kv_head = blockIdx.y / d.n_blocks_q;
  const int head_in_group = static_cast<int>(blockIdx.y) % d.n_blocks_q * kHeads;
  const int64_t head = kv_head * d.group + head_in_group;
  const int n_heads = min(kHeads, d.group - head_in_group);
  const int dim = part * kDims;
  const bool has_dims = dim < a.head_dim;
  float q[kHeads][kDims];
#pragma unroll
  for (int g = 0; g < kHeads; ++g) {
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      const bool real = has_dims && g < n_heads;
      q[g][i] =
          real ? __ldcg(a.q + t * a.q_stride + (head + g) * a.head_dim + dim + i) * (a.scale * 1.44269504f) : 0.0f;
    }
  }
  const auto* k_rows = reinterpret_cast<const uint4*>(a.k_cache + kv_head * a.n_ctx * a.head_dim + dim);
  const auto* v_rows = reinterpret_cast<const uint4*>(a.v_cache + kv_head * a.n_ctx * a.head_dim + dim);
  const int64_t row_units = a.head_dim / kDims;
  Running<kLanes, kHeads> state;
  for (int base = first; base < last; base += kGroups * kBatch) {
    const int key0 = base + warp * (kWarp / kLanes) + lane / kLanes;
    uint4 k[kBatch], v[kBatch];
    int n = 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int key = key0 + b * kGroups;
      k[b] = v[b] = make_uint4(0, 0, 0, 0);
      if (key < last) n = b + 1;
      if (key < last && has_dims) k[b] = __ldcg(k_rows + key * row_units), v[b] = __ldcg(v_rows + key * row_units);
    }
    state.add(q, k, v, n);
  }
  state.merge_warp();
  if (lane < kLanes) {
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
#pragma unroll
      for (int i = 0; i < kDims; ++i) shared_acc[warp][g][dim + i] = state.acc[g][i];
      if (lane == 0) shared_max_sum[warp][g] = {state.m[g], state.sum[g]};
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n_heads * a.head_dim; i += blockDim.x) {
    const int g = i / static_cast<int>(a.head_dim), c = i % static_cast<int>(a.head_dim);
    float top = kNone, sum = 0.0f, total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared_max_sum[w][g].x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float scale = exp2f(shared_max_sum[w][g].x - top);
      sum = fmaf(scale, shared_max_sum[w][g].y, sum);
      total = fmaf(scale, shared_acc[w][g][c], total);
    }
    const int64_t at = (t * a.n_head + head + g) * d.max_splits + blockIdx.x;
    d.acc[at * a.head_dim + c] = total;
    if (c == 0) d.max_sum[at] = {top, sum};
  }
}

constexpr int kMergeThreads = 512;
constexpr int kMaxSplits = 128;  // plan.h, attention_max_splits

// One block a query head: weighs the pieces, adds them (threads share the pieces of a dimension), normalises.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ DecodeArgs d, Act out) {
  __shared__ float weight[kMaxSplits];
  __shared__ float sums[kMergeThreads];
  const AttentionArgs& a = d.a;
  grid_trigger();
  grid_wait();
  const int64_t head = blockIdx.x, t = blockIdx.y;
  const Span span = context_span(a, t);
  const int n = span.end - span.begin;
  const int splits = static_cast<int>(ceil_div(n, attention_split_keys(n, d.max_splits)));
  const int64_t at = (t * a.n_head + head) * d.max_splits;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (warp == 0) {
    float2 piece[kMaxSplits / kWarp];
    float top = kNone, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kMaxSplits / kWarp; ++k) {
      const int s = lane + k * kWarp;
      piece[k] = s < splits ? __ldcg(d.max_sum + at + s) : make_float2(kNone, 0.0f);
      top = fmaxf(top, piece[k].x);
    }
    top = warp_max(top);
#pragma unroll
    for (int k = 0; k < kMaxSplits / kWarp; ++k) {
      piece[k].x = exp2f(piece[k].x - top);
      sum = fmaf(piece[k].x, piece[k].y, sum);
    }
    sum = group_sum(sum);
#pragma unroll
    for (int k = 0; k < kMaxSplits / kWarp; ++k) weight[lane + k * kWarp] = piece[k].x / sum;
  }
  __syncthreads();
  const int dim = static_cast<int>(a.head_dim);
  const int shares = kMergeThreads / dim, share = threadIdx.x / dim, c = threadIdx.x % dim;
  float total = 0.0f;
  if (share < shares) {
#pragma unroll 8
    for (int s = share; s < splits; s += shares) total = fmaf(weight[s], __ldcg(d.acc + (at + s) * dim + c), total);
  }
  sums[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x >= round_up(dim, kWarp)) return;
  const bool real = static_cast<int>(threadIdx.x) < dim;
  for (int s = 1; s < shares && real; ++s) total += sums[s * dim + threadIdx.x];
  const int64_t n_out = a.n_head * dim;
  if (real) out.x[t * n_out + head * dim + threadIdx.x] = total;
  if (out.q8 != nullptr) {  // only when heads are whole blocks
    std::byte* row = static_cast<std::byte*>(out.q8) + t * q8_row_bytes(n_out);
    store_q8_block(total, row, n_out, head * (dim / 32) + warp);
  }
}

template <int kLanes>
auto choose_kernel(int64_t group) {
  if (group == 1) return decode_kernel<kLanes, 1>;
  if (group == 2) return decode_kernel<kLanes, 2>;
  if (group <= 4) return decode_kernel<kLanes, 4>;
  return decode_kernel<kLanes, 8>;
}

}  // namespace

size_t attention_partial_bytes(const Gpu& gpu, int64_t n_head, int64_t n_head_kv, int64_t head_dim,
                               int64_t max_tokens) {
  const int64_t splits = attention_max_splits(n_head_kv, gpu.multiprocessors);
  return static_cast<size_t>(max_tokens * n_head * splits * (head_dim + 2)) * sizeof(float);
}

void attention_decode(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* partial, Act out) {
  AttentionArgs a = args;
  if (a.q_stride == 0) a.q_stride = a.n_head * a.head_dim;
  const int64_t group = a.n_head / a.n_head_kv, max_splits = attention_max_splits(a.n_head_kv, gpu.multiprocessors);
  const int64_t heads = group <= 2 ? group : (group <= 4 ? 4 : 8);
  const int64_t blocks_q = ceil_div(group, heads), pieces = T * a.n_head * max_splits;
  const DecodeArgs d{a,
                     static_cast<int>(group),
                     static_cast<int>(blocks_q),
                     static_cast<int>(max_splits),
                     partial + 2 * pieces,
                     reinterpret_cast<float2*>(partial)};
  const int64_t longest = a.window > 0 ? std::min(a.window, a.max_kv) : a.max_kv;
  const dim3 grid(grid_size(attention_grid_splits(longest, max_splits)), grid_size(a.n_head_kv * blocks_q),
                  grid_size(T));
  const auto kernel = a.head_dim <= 32    ? choose_kernel<4>(group)
                      : a.head_dim <= 64  ? choose_kernel<8>(group)
                      : a.head_dim <= 128 ? choose_kernel<16>(group)
                                          : choose_kernel<32>(group);
  launch(gpu, kernel, grid, kWarps * kWarp, 0, d);
  const bool whole_blocks = a.head_dim % 32 == 0;
  launch(gpu, merge_kernel, dim3(grid_size(a.n_head), grid_size(T)), kMergeThreads, 0, d,
         Act{out.x, whole_blocks ? out.q8 : nullptr});
  if (out.q8 != nullptr && !whole_blocks) quantize_rows(gpu, out.x, T, a.n_head * a.head_dim, out.q8);
}

}  // namespace hearth::cuda
