// Attention of one or a few new tokens over a long cache: the context is split over blocks (flash decoding), and every
// key and value is read once for all query heads that share it. The block that finishes a head last merges its pieces.
//
// A lane has 8 dimensions of a head; kLanes lanes share a key. Each such group walks its keys with its own online
// softmax (Milakov and Gimelshein 2018) in base 2; groups, warps and blocks are merged at the end, always in the same
// order.
#include <cuda_fp16.h>

#include "cuda/format.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {
namespace {

constexpr int kDims = 8;         // a lane's, one 16-byte load
constexpr int kBatch = 4;        // keys in flight per group
constexpr float kNone = -1e30f;  // below every score; finite, so that differences stay numbers

struct DecodeArgs {
  AttentionArgs a;
  int group;       // query heads of a kv head
  int n_blocks_q;  // blocks that share a kv head's query heads
  int max_splits;
  float* acc;          // [T][n_head][max_splits][head_dim], not normalised
  float2* max_sum;     // [T][n_head][max_splits]
  unsigned* finished;  // [T][n_head_kv * n_blocks_q] blocks that have written their piece; zero before and after
  Act out;             // [T][n_head][head_dim]; q8 only when heads are whole blocks of 32
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

// Warps of a block: as many as registers allow, so that a short context is one block's work.
template <int kHeads>
constexpr int kWarps = kHeads <= 2 ? 16 : (kHeads == 4 ? 8 : 4);

// Output i of the heads from `head` on. Whole warps call it with consecutive i.
__device__ __forceinline__ void store_output(const DecodeArgs& d, int64_t t, int64_t head, int i, float value) {
  const int64_t n = d.a.n_head * d.a.head_dim, at = head * d.a.head_dim + i;
  d.out.x[t * n + at] = value;
  if (d.out.q8 != nullptr) store_q8_block(value, static_cast<std::byte*>(d.out.q8) + t * q8_row_bytes(n), n, at / 32);
}

// Merges the pieces of heads [head, head + n_heads) of token t and writes their outputs. Called by a whole block.
template <int kThreads, int kHeads>
__device__ void merge_pieces(const DecodeArgs& d, int64_t t, int64_t head, int n_heads, int splits) {
  __shared__ float weight[kHeads][kMaxSplits];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, dim = static_cast<int>(d.a.head_dim);
  for (int g = warp; g < n_heads; g += kThreads / kWarp) {
    const float2* pieces = d.max_sum + (t * d.a.n_head + head + g) * d.max_splits;
    float2 piece[kMaxSplits / kWarp];
    float top = kNone, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kMaxSplits / kWarp; ++k) {
      const int s = lane + k * kWarp;
      piece[k] = s < splits ? __ldcg(pieces + s) : make_float2(kNone, 0.0f);
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
    for (int k = 0; k < kMaxSplits / kWarp; ++k) weight[g][lane + k * kWarp] = piece[k].x / sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n_heads * dim; i += kThreads) {
    const int64_t h = head + i / dim;
    const float* acc = d.acc + (t * d.a.n_head + h) * d.max_splits * dim + i % dim;
    float total = 0.0f;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) total = fmaf(weight[i / dim][s], __ldcg(acc + s * dim), total);
    store_output(d, t, head, i, total);
  }
}

// Grid: (splits, n_head_kv * n_blocks_q, T).
template <int kLanes, int kHeads>
__global__ void __launch_bounds__(kWarps<kHeads>* kWarp, kHeads == 2 ? 1 : 2)
    decode_kernel(const __grid_constant__ DecodeArgs d) {
  constexpr int kThreads = kWarps<kHeads> * kWarp;
  constexpr int kGroups = kThreads / kLanes;  // keys that the block handles at once
  __shared__ float shared_acc[kWarps<kHeads>][kHeads][kLanes * kDims];
  __shared__ float2 shared_max_sum[kWarps<kHeads>][kHeads];
  __shared__ bool last_block;
  const AttentionArgs& a = d.a;
  grid_trigger();
  grid_wait();
  const int64_t t = blockIdx.z;
  const Span span = context_span(a, t);
  const int n = span.end - span.begin, keys = static_cast<int>(attention_split_keys(n, d.max_splits));
  const int splits = (n + keys - 1) / keys;
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
    for (int i = 0; i < kDims; i += 4) {
      const float* from = a.q + t * a.q_stride + (head + g) * a.head_dim + dim + i;
      const float scale = a.scale * 1.44269504f;
      const float4 v =
          has_dims && g < n_heads ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
      q[g][i] = v.x * scale, q[g][i + 1] = v.y * scale, q[g][i + 2] = v.z * scale, q[g][i + 3] = v.w * scale;
    }
  }
  const auto* k_rows = reinterpret_cast<const uint4*>(a.k_cache + kv_head * a.n_ctx * a.head_dim + dim);
  const auto* v_rows = reinterpret_cast<const uint4*>(a.v_cache + kv_head * a.n_ctx * a.head_dim + dim);
  const int row_units = static_cast<int>(a.head_dim) / kDims;
  Running<kLanes, kHeads> state;
  for (int base = first; base < last; base += kGroups * kBatch) {
    const int key0 = base + warp * (kWarp / kLanes) + lane / kLanes;
    uint4 k[kBatch], v[kBatch];
    int count = 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int key = key0 + b * kGroups;
      k[b] = v[b] = make_uint4(0, 0, 0, 0);
      if (key < last) count = b + 1;
      if (key < last && has_dims) {
        const int64_t at = static_cast<int64_t>(key) * row_units;
        k[b] = __ldcg(k_rows + at), v[b] = __ldcg(v_rows + at);
      }
    }
    state.add(q, k, v, count);
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
  for (int i = threadIdx.x; i < n_heads * a.head_dim; i += kThreads) {
    const int g = i / static_cast<int>(a.head_dim), c = i % static_cast<int>(a.head_dim);
    float top = kNone, sum = 0.0f, total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps<kHeads>; ++w) top = fmaxf(top, shared_max_sum[w][g].x);
#pragma unroll
    for (int w = 0; w < kWarps<kHeads>; ++w) {
      const float scale = exp2f(shared_max_sum[w][g].x - top);
      sum = fmaf(scale, shared_max_sum[w][g].y, sum);
      total = fmaf(scale, shared_acc[w][g][c], total);
    }
    if (splits == 1) {
      store_output(d, t, head, i, (1.0f / sum) * total);
      continue;
    }
    const int64_t at = (t * a.n_head + head + g) * d.max_splits + blockIdx.x;
    d.acc[at * a.head_dim + c] = total;
    if (c == 0) d.max_sum[at] = {top, sum};
  }
  if (splits == 1) return;
  __threadfence();  // the piece is visible before it is counted
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned& finished = d.finished[t * gridDim.y + blockIdx.y];
    last_block = atomicAdd(&finished, 1u) == static_cast<unsigned>(splits) - 1;
    if (last_block) finished = 0;  // for the next launch
  }
  __syncthreads();
  if (!last_block) return;
  __threadfence();
  merge_pieces<kThreads, kHeads>(d, t, head, n_heads, splits);
}

using DecodeKernel = void (*)(DecodeArgs);
struct Variant {
  DecodeKernel kernel;
  int heads;  // query heads of a block
  int threads;
};
template <int kLanes>
Variant choose_variant(int64_t group) {
  if (group == 1) return {decode_kernel<kLanes, 1>, 1, kWarps<1> * kWarp};
  if (group == 2) return {decode_kernel<kLanes, 2>, 2, kWarps<2> * kWarp};
  if (group <= 4) return {decode_kernel<kLanes, 4>, 4, kWarps<4> * kWarp};
  return {decode_kernel<kLanes, 8>, 8, kWarps<8> * kWarp};
}
Variant choose_variant(int64_t group, int64_t head_dim) {
  if (head_dim <= 32) return choose_variant<4>(group);
  if (head_dim <= 64) return choose_variant<8>(group);
  if (head_dim <= 128) return choose_variant<16>(group);
  return choose_variant<32>(group);
}

// Pieces that a context is cut into at most, for this model on this GPU.
int64_t max_splits(const Gpu& gpu, const Variant& v, int64_t n_head, int64_t n_head_kv) {
  int resident = 1;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, v.kernel, v.threads, 0));
  return attention_max_splits(n_head_kv * ceil_div(n_head / n_head_kv, v.heads),
                              std::max(1, resident) * gpu.multiprocessors);
}

}  // namespace

AttentionScratch attention_scratch(const Gpu& gpu, int64_t n_head, int64_t n_head_kv, int64_t head_dim,
                                   int64_t max_tokens) {
  const Variant v = choose_variant(n_head / n_head_kv, head_dim);
  const int64_t pieces = max_tokens * n_head * max_splits(gpu, v, n_head, n_head_kv);
  return {static_cast<size_t>(pieces * (head_dim + 2)) * sizeof(float),
          static_cast<size_t>(max_tokens * n_head) * sizeof(unsigned)};
}

void attention_decode(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* partial, unsigned* counters,
                      Act out) {
  AttentionArgs a = args;
  if (a.q_stride == 0) a.q_stride = a.n_head * a.head_dim;
  const int64_t group = a.n_head / a.n_head_kv;
  const Variant v = choose_variant(group, a.head_dim);
  const int64_t splits = max_splits(gpu, v, a.n_head, a.n_head_kv), blocks_q = ceil_div(group, v.heads);
  const int64_t pieces = T * a.n_head * splits;
  const bool whole_blocks = a.head_dim % 32 == 0;
  const DecodeArgs d{a,
                     static_cast<int>(group),
                     static_cast<int>(blocks_q),
                     static_cast<int>(splits),
                     partial + 2 * pieces,
                     reinterpret_cast<float2*>(partial),
                     counters,
                     Act{out.x, whole_blocks ? out.q8 : nullptr}};
  const int64_t longest = a.window > 0 ? std::min(a.window, a.max_kv) : a.max_kv;
  const dim3 grid(grid_size(attention_grid_splits(longest, splits)), grid_size(a.n_head_kv * blocks_q), grid_size(T));
  launch(gpu, v.kernel, grid, v.threads, 0, d);
  if (out.q8 != nullptr && !whole_blocks) quantize_rows(gpu, out.x, T, a.n_head * a.head_dim, out.q8);
}

}  // namespace hearth::cuda
