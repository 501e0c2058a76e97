// Attention of one or a few new tokens over a long cache: the context is split over blocks (flash decoding), and every
// key and value is read once for all query heads that share it. The block that finishes a head last merges its pieces.
//
// A lane has 8 dimensions of a head; kLanes lanes share a key. Each such group walks its keys with its own online
// softmax (Milakov and Gimelshein 2018) in base 2; groups, warps and blocks are merged at the end, always in the same
// order.
//
// The rotary embedding of a single token can be done on the way: each block rotates its own query heads, and the block
// that has the newest key rotates that.
#include <cuda_fp16.h>

#include "cuda/copy_async.cuh"
#include "cuda/exchange.cuh"
#include "cuda/format.cuh"
#include "cuda/kernels.cuh"
#include "cuda/rope.cuh"

namespace hearth::cuda {
namespace {

constexpr int kDims = 8;         // a lane's, one 16-byte load
constexpr int kBatch = 4;        // keys in flight per group
constexpr float kNone = -1e30f;  // below every score; finite, so that differences stay numbers

struct DecodeArgs {
  AttentionArgs a;
  RopeKvArgs rope;  // of the one token, to be done on the way; rope.q null: q is rotated and the cache complete
  int group;        // query heads of a kv head
  int n_blocks_q;   // blocks that share a kv head's query heads
  int max_splits;
  float* acc;          // [T][n_head][max_splits][head_dim], not normalised
  float2* max_sum;     // [T][n_head][max_splits]
  unsigned* finished;  // [T][n_head_kv * n_blocks_q] blocks that have written their piece; zero before and after
  Act out;             // [T][n_head][head_dim]; q8 only when heads are whole blocks of 32
};

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
constexpr int kWarps = kHeads <= 2 ? 16 : 32 / kHeads;

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

// The rotated query heads of a block and the key and value of the new token, when the attention does the rotary
// embedding on the way. Called by the whole block, with barriers between.
template <int kLanes, int kHeads>
struct NewToken {
  float2 rotation[kLanes * kDims / 2];
  alignas(16) float head[kHeads + 1][kLanes * kDims];  // the last is the key
  alignas(16) f16_t k[kLanes * kDims], v[kLanes * kDims];

  // Asks for query heads [first, first + n_heads), and for the key and the value of kv_head; the latter comes into
  // value [head_dim], shared memory, too.
  __device__ __forceinline__ void request(const RopeKvArgs& a, int64_t first, int n_heads, int64_t kv_head,
                                          float* value) {
    const int quads = static_cast<int>(a.head_dim) / 4;
    for (int i = threadIdx.x; i < (kHeads + 2) * quads; i += blockDim.x) {
      const int h = i / quads, at = i % quads * 4;
      if (h >= n_heads && h < kHeads) continue;
      const float* from = h < kHeads    ? a.q + (first + h) * a.head_dim
                          : h == kHeads ? a.k + kv_head * a.head_dim
                                        : a.v + kv_head * a.head_dim;
      copy_async<16>((h <= kHeads ? head[h] : value) + at, from + at);
    }
    end_copy_group();
  }

  __device__ __forceinline__ void find_rotations(const RopeKvArgs& a, int pos) {
    if (a.rope == RopeKind::none) return;
    for (int pair = threadIdx.x; pair < a.n_rot / 2; pair += blockDim.x) rotation[pair] = cuda::rotation(a, pair, pos);
  }
  // The query heads, and with has_key the new key and value, when they have arrived.
  __device__ __forceinline__ void rotate(const RopeKvArgs& a, int n_heads, bool has_key, const float* value) {
    const int lane = threadIdx.x % kWarp, n = static_cast<int>(a.head_dim);
    for (int h = threadIdx.x / kWarp; h <= kHeads; h += static_cast<int>(blockDim.x) / kWarp) {
      const bool is_key = h == kHeads;
      if (is_key ? !has_key : h >= n_heads) continue;
      const Vector& weight = is_key ? a.k_norm : a.q_norm;
      if (weight.data != nullptr) norm_head(head[h], n, weight.data, a.norm_eps);
      if (a.rope != RopeKind::none) rotate_head(head[h], a, [&](int pair) { return rotation[pair]; });
      if (!is_key) continue;
      for (int i = lane; i < n; i += kWarp) {
        k[i] = __half_as_ushort(__float2half_rn(head[h][i])), v[i] = __half_as_ushort(__float2half_rn(value[i]));
      }
    }
  }
};

// Keys and values in flight: a lane's dimensions of kBatch keys.
struct KvBatch {
  uint4 k[kBatch], v[kBatch];
  int count;
};

// What a block has to do. Grid: (splits, n_head_kv * n_blocks_q, T).
template <int kLanes, int kHeads>
struct Piece {
  static constexpr int kThreads = kWarps<kHeads> * kWarp;
  static constexpr int kGroups = kThreads / kLanes;  // keys that the block handles at once

  const DecodeArgs& d;
  int64_t t, kv_head, head;  // head: the first of n_heads query heads
  int n_heads;
  int pos, splits;        // of the token; pieces of its context
  int first, last;        // keys
  bool rotates, has_pos;  // does the rotary embedding; has the newest key
  int key_in_step, dim;   // of the thread
  bool has_dims;

  __device__ __forceinline__ explicit Piece(const DecodeArgs& args) : d(args) {
    t = blockIdx.z, kv_head = blockIdx.y / d.n_blocks_q;
    const int head_in_group = static_cast<int>(blockIdx.y) % d.n_blocks_q * kHeads;
    head = kv_head * d.group + head_in_group, n_heads = min(kHeads, d.group - head_in_group);
    rotates = d.rope.q != nullptr;
    key_in_step = static_cast<int>(threadIdx.x) / kLanes, dim = static_cast<int>(threadIdx.x) % kLanes * kDims;
    has_dims = dim < d.a.head_dim;
  }
  // The token is at position `at`.
  __device__ __forceinline__ void place(int at) {
    const int begin = d.a.window > 0 ? max(0, at + 1 - static_cast<int>(d.a.window)) : 0, n = at + 1 - begin;
    const int keys = static_cast<int>(attention_split_keys(n, d.max_splits));
    pos = at, splits = (n + keys - 1) / keys;
    first = begin + static_cast<int>(blockIdx.x) * keys, last = min(first + keys, at + 1);
    has_pos = first < last && last > pos;
  }
  __device__ __forceinline__ int key(int base, int b) const { return base + key_in_step + b * kGroups; }

  // The first keys and values come into L2 while the kernel before still runs. Only that: they may be written yet.
  __device__ __forceinline__ void prefetch() const {
    constexpr int kBytes = 2048;
    const int64_t at = (kv_head * d.a.n_ctx + first) * d.a.head_dim;
    const int n = min(last - first, kGroups * kBatch) * static_cast<int>(d.a.head_dim * sizeof(f16_t));
    for (int i = static_cast<int>(threadIdx.x) * kBytes; i < n; i += kThreads * kBytes) {
      prefetch_l2(reinterpret_cast<const std::byte*>(d.a.k_cache + at) + i, min(kBytes, n - i));
      prefetch_l2(reinterpret_cast<const std::byte*>(d.a.v_cache + at) + i, min(kBytes, n - i));
    }
  }
  __device__ __forceinline__ void load(KvBatch& batch, int base) const {
    batch.count = 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      batch.k[b] = batch.v[b] = make_uint4(0, 0, 0, 0);
      if (key(base, b) < last) batch.count = b + 1;
      if (key(base, b) >= last || !has_dims || (rotates && key(base, b) == pos)) continue;
      const int64_t at = (kv_head * d.a.n_ctx + key(base, b)) * d.a.head_dim + dim;
      batch.k[b] = __ldcg(reinterpret_cast<const uint4*>(d.a.k_cache + at));
      batch.v[b] = __ldcg(reinterpret_cast<const uint4*>(d.a.v_cache + at));
    }
  }
  // Puts the newest key and value where load() left them out.
  __device__ __forceinline__ void insert(KvBatch& batch, int base, const NewToken<kLanes, kHeads>& token) const {
    if (!rotates || !has_pos || !has_dims) return;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (key(base, b) != pos) continue;
      batch.k[b] = *reinterpret_cast<const uint4*>(&token.k[dim]);
      batch.v[b] = *reinterpret_cast<const uint4*>(&token.v[dim]);
    }
  }
  // The thread's dimensions of the query heads, scaled for a softmax in base 2.
  __device__ __forceinline__ void load_q(const NewToken<kLanes, kHeads>& token, float (&q)[kHeads][kDims]) const {
    const float scale = d.a.scale * 1.44269504f;
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      const float* from = d.a.q + t * d.a.q_stride + (head + g) * d.a.head_dim + dim;
#pragma unroll
      for (int i = 0; i < kDims; i += 4) {
        float4 v = make_float4(0, 0, 0, 0);
        if (has_dims && g < n_heads) {
          v = rotates ? *reinterpret_cast<const float4*>(&token.head[g][dim + i])
                      : __ldcg(reinterpret_cast<const float4*>(from + i));
        }
        q[g][i] = v.x * scale, q[g][i + 1] = v.y * scale, q[g][i + 2] = v.z * scale, q[g][i + 3] = v.w * scale;
      }
    }
  }
  __device__ __forceinline__ void store_kv(const NewToken<kLanes, kHeads>& token) const {
    const int64_t at = (kv_head * d.a.n_ctx + pos) * d.a.head_dim;
    for (int i = static_cast<int>(threadIdx.x) * kDims; i < d.a.head_dim; i += kThreads * kDims) {
      *reinterpret_cast<uint4*>(d.rope.k_cache + at + i) = *reinterpret_cast<const uint4*>(&token.k[i]);
      *reinterpret_cast<uint4*>(d.rope.v_cache + at + i) = *reinterpret_cast<const uint4*>(&token.v[i]);
    }
  }
  // q is rotated in place, by the block that is the last to need it.
  __device__ __forceinline__ void store_q(const NewToken<kLanes, kHeads>& token) const {
    const int n = static_cast<int>(d.a.head_dim);
    for (int i = threadIdx.x; i < n_heads * n; i += kThreads) d.rope.q[head * n + i] = token.head[i / n][i % n];
  }
};

// The states of a block's warps.
template <int kLanes, int kHeads>
struct WarpStates {
  alignas(16) float acc[kWarps<kHeads>][kHeads][kLanes * kDims];
  float2 max_sum[kWarps<kHeads>][kHeads];

  __device__ __forceinline__ void store(const Running<kLanes, kHeads>& state) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane >= kLanes) return;
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
#pragma unroll
      for (int i = 0; i < kDims; ++i) acc[warp][g][lane * kDims + i] = state.acc[g][i];
      if (lane == 0) max_sum[warp][g] = {state.m[g], state.sum[g]};
    }
  }
  // Merges them into the piece's output, which is the result where there is no other piece.
  __device__ __forceinline__ void merge(const Piece<kLanes, kHeads>& p) const {
    const DecodeArgs& d = p.d;
    const int n = static_cast<int>(d.a.head_dim), column_blocks = (n + kWarp - 1) / kWarp;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (int block = warp; block < p.n_heads * column_blocks; block += kWarps<kHeads>) {
      const int g = block / column_blocks, c = block % column_blocks * kWarp + lane;
      const float2 own = lane < kWarps<kHeads> ? max_sum[lane][g] : make_float2(kNone, 0.0f);  // of warp `lane`
      const float top = warp_max(own.x), scale = exp2f(own.x - top), sum = group_sum(scale * own.y);
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps<kHeads>; ++w) total = fmaf(__shfl_sync(kAllLanes, scale, w), acc[w][g][c], total);
      if (c >= n) continue;
      if (p.splits == 1) {
        store_output(d, p.t, p.head, g * n + c, (1.0f / sum) * total);
        continue;
      }
      const int64_t at = (p.t * d.a.n_head + p.head + g) * d.max_splits + blockIdx.x;
      d.acc[at * n + c] = total;
      if (c == 0) d.max_sum[at] = {top, sum};
    }
  }
};

// Whether this block is the last of the token's pieces of these heads to have written its output.
__device__ __forceinline__ bool is_last(const DecodeArgs& d, int64_t t, int splits) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* finished = d.finished + t * gridDim.y + blockIdx.y;
    last = count_arrival(finished) == static_cast<unsigned>(splits) - 1;
    if (last) *finished = 0;  // for the next launch
  }
  __syncthreads();
  return last;
}

template <int kLanes, int kHeads>
__global__ void __launch_bounds__(kWarps<kHeads>* kWarp, kHeads == 2 ? 1 : 2)
    decode_kernel(const __grid_constant__ DecodeArgs d) {
  using Work = Piece<kLanes, kHeads>;
  constexpr int kStep = Work::kGroups * kBatch;
  __shared__ WarpStates<kLanes, kHeads> states;
  float* const new_value = states.acc[0][0];  // not needed before the first warp is done
  __shared__ NewToken<kLanes, kHeads> token;
  grid_trigger();
  Work p(d);
  // A guess, as good as certain: the position is there already unless it was uploaded just now.
  p.place(max(0, min(__ldcg(d.a.pos + p.t), static_cast<int>(d.a.n_ctx) - 1)));
  if (p.rotates) token.find_rotations(d.rope, p.pos);
  p.prefetch();
  grid_wait();
  const int pos = __ldcg(d.a.pos + p.t);
  if (p.rotates) token.request(d.rope, p.head, p.n_heads, p.kv_head, new_value);
  KvBatch batch;
  p.load(batch, p.first);
  wait_copy_groups<0>();
  if (pos != p.pos) {
    p.place(pos);
    if (p.rotates) token.find_rotations(d.rope, pos);
    p.load(batch, p.first);
  }
  if (p.first >= p.last) return;
  if (p.rotates) {
    __syncthreads();
    token.rotate(d.rope, p.n_heads, p.has_pos, new_value);
    __syncthreads();
    if (p.has_pos && p.head == p.kv_head * d.group) p.store_kv(token);
  }
  float q[kHeads][kDims];
  p.load_q(token, q);
  Running<kLanes, kHeads> state;
  for (int base = p.first; base < p.last; base += kStep) {
    p.insert(batch, base, token);
    state.add(q, batch.k, batch.v, batch.count);
    if (base + kStep < p.last) p.load(batch, base + kStep);
  }
  state.merge_warp();
  states.store(state);
  __syncthreads();
  states.merge(p);
  if (p.splits > 1) {
    if (!is_last(d, p.t, p.splits)) return;
    merge_pieces<Work::kThreads, kHeads>(d, p.t, p.head, p.n_heads, p.splits);
  }
  if (p.rotates) p.store_q(token);
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

void attention_decode(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* partial, unsigned* counters, Act out,
                      const RopeKvArgs* rope) {
  HEARTH_CHECK(rope == nullptr || T == 1);
  AttentionArgs a = args;
  if (a.q_stride == 0) a.q_stride = a.n_head * a.head_dim;
  const int64_t group = a.n_head / a.n_head_kv;
  const Variant v = choose_variant(group, a.head_dim);
  const int64_t splits = max_splits(gpu, v, a.n_head, a.n_head_kv), blocks_q = ceil_div(group, v.heads);
  const int64_t pieces = T * a.n_head * splits;
  const bool whole_blocks = a.head_dim % 32 == 0;
  const DecodeArgs d{a,
                     rope != nullptr ? *rope : RopeKvArgs{},
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
