// Attention of one or a few new tokens over a long cache: the context is split over blocks (flash decoding), and every
// key and value is read once for all query heads that share it. The block that finishes a head last merges its pieces.
//
// A lane has 8 dimensions of a head; kLanes lanes share a key. Each such group walks its keys with its own online
// softmax; groups, warps and blocks are merged at the end, always in the same order. A token's pieces depend on its own
// context alone, so that its result has the same bits whatever the other tokens are.
//
// The norm and the rotary embedding of a single token are done on the way: each block rotates its own query heads, and
// the block that has the newest key rotates that.
#include "cuda/attention.cuh"
#include "cuda/copy_async.cuh"
#include "cuda/exchange.cuh"
#include "cuda/rope.cuh"
#include "cuda/running_softmax.cuh"

namespace hearth::cuda {
namespace {

struct DecodeArgs {
  AttentionArgs a;
  bool rotates;    // q and k are raw and the cache lacks the one token; otherwise rope_kv() has run
  int group;       // query heads of a kv head
  int n_blocks_q;  // blocks that share a kv head's query heads
  int max_splits;
  float* acc;          // [T][n_head][max_splits][head_dim], not normalised
  float2* max_sum;     // [T][n_head][max_splits]
  unsigned* finished;  // [T][n_head_kv * n_blocks_q] blocks that have written their piece; zero before and after
  Act out;             // [T][n_head][head_dim]; q8 only when heads are whole blocks of 32
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
    sum = group_sum(sum) + sink_share(d.a, head + g, top);
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

// The rotated query heads of a block and the key and value of the one token, where they are rotated on the way. Called
// by the whole block, with barriers between.
template <int kLanes, int kHeads>
struct NewToken {
  float2 rotation[kLanes * kDims / 2];
  alignas(16) float head[kHeads + 1][kLanes * kDims];  // the last is the key
  alignas(16) f16_t k[kLanes * kDims], v[kLanes * kDims];

  // Asks for query heads [first, first + n_heads), and for the key and the value of kv_head; the latter comes into
  // value [head_dim], shared memory, too.
  __device__ __forceinline__ void request(const AttentionArgs& a, int64_t first, int n_heads, int64_t kv_head,
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

  __device__ __forceinline__ void find_rotations(const AttentionArgs& a, int pos) {
    if (a.rope == RopeKind::none) return;
    for (int pair = threadIdx.x; pair < a.n_rot / 2; pair += blockDim.x) rotation[pair] = cuda::rotation(a, pair, pos);
  }
  // The query heads, and with has_key the new key and value, when they have arrived.
  __device__ __forceinline__ void rotate(const AttentionArgs& a, int n_heads, bool has_key, const float* value) {
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
};

// A block's part of the work: whole pages of a token's context, except where that begins or ends inside one. Grid:
// (splits, n_head_kv * n_blocks_q, T).
template <int kLanes, int kHeads>
struct Piece {
  static constexpr int kThreads = kWarps<kHeads> * kWarp;
  static constexpr int kGroups = kThreads / kLanes;  // keys that the block handles at once
  static constexpr int kStep = kGroups * kBatch;     // keys in flight
  static constexpr int kStepPages = kStep > kPage ? kStep / kPage : 1;
  static_assert(kPage % kGroups == 0 && (kStep % kPage == 0 || kPage % kStep == 0));
  struct Pages {
    int id[kStepPages];
  };

  const DecodeArgs& d;
  int t, kv_head, head;  // head: the first of n_heads query heads
  int n_heads;
  int pos, splits;       // of the token; pieces of its context
  int base, from, last;  // keys [from, last); steps count from base, at or before from
  int cached;            // from here on they are not in the cache yet
  int key_in_step, dim;  // of the thread
  bool has_dims;

  __device__ __forceinline__ explicit Piece(const DecodeArgs& args) : d(args) {
    t = static_cast<int>(blockIdx.z), kv_head = static_cast<int>(blockIdx.y);
    const int head_in_group = kv_head % d.n_blocks_q * kHeads;
    kv_head /= d.n_blocks_q;
    head = kv_head * d.group + head_in_group, n_heads = min(kHeads, d.group - head_in_group);
    key_in_step = static_cast<int>(threadIdx.x) / kLanes, dim = static_cast<int>(threadIdx.x) % kLanes * kDims;
    has_dims = dim < d.a.head_dim;
  }
  // The token is at position `at`.
  __device__ __forceinline__ void place(int at) {
    const Split split(d.a, at, d.max_splits, static_cast<int>(blockIdx.x));
    pos = at, splits = split.count, from = split.from, last = split.last;
    base = kStep < kPage ? from / kStep * kStep : split.page * kPage;
    cached = d.rotates ? min(last, at) : last;
  }
  __device__ __forceinline__ bool has_keys() const { return from < last; }
  __device__ __forceinline__ bool has_pos() const { return has_keys() && last > pos; }
  // The pages of the step at `step`, of the sequence in row `slot` of the table; past the token's own page that page.
  // Not negative, also where slot and position are guessed and nothing uses that entry.
  __device__ __forceinline__ Pages read_pages(int slot, int step) const {
    Pages pages;
#pragma unroll
    for (int i = 0; i < kStepPages; ++i) {
      const int index = min(page_index(step) + i, page_index(last - 1));
      pages.id[i] = max(0, __ldcg(page_table(d.a.rows, slot) + index));
    }
    return pages;
  }
  __device__ __forceinline__ int key(int step, int b) const {
    return step + key_in_step + b * kGroups;
  }

  // The first keys and values come into L2 while the kernel before still runs. Only that: they may be written yet.
  __device__ __forceinline__ void prefetch(const Pages& pages) const {
    constexpr int kKeys = 8;  // of a thread
    static_assert(kStep / kKeys <= kThreads && kPage % kKeys == 0);
    const int offset = static_cast<int>(threadIdx.x) * kKeys;
    const int begin = max(from, base + offset), end = min(last, base + min(offset + kKeys, kStep));
    if (begin >= end) return;
    int page = pages.id[0];
#pragma unroll
    for (int i = 1; i < kStepPages; ++i) page = offset / kPage == i ? pages.id[i] : page;
    const int64_t at = cache_offset(d.a, page, kv_head, begin);
    const int bytes = (end - begin) * static_cast<int>(d.a.head_dim * sizeof(f16_t));
    prefetch_l2(d.a.cache.k + at, bytes), prefetch_l2(d.a.cache.v + at, bytes);
  }
  // Asks for the keys and values of the step at `step` that are in the cache.
  __device__ __forceinline__ void load(KvBatch& batch, int step, const Pages& pages) const {
    const bool is_whole = step >= from && step + kStep <= cached;
    const int64_t own = kv_head * kPage * d.a.head_dim + (has_dims ? dim : 0);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int in_page = static_cast<int>(static_cast<unsigned>(key(step, b)) % kPage);
      const int64_t at = pages.id[b * kGroups / kPage] * d.a.cache.stride + own + in_page * d.a.head_dim;
      if (!is_whole) {
        batch.k[b] = batch.v[b] = make_uint4(0, 0, 0, 0);
        if (key(step, b) < from || key(step, b) >= cached) continue;
      }
      batch.k[b] = __ldcg(reinterpret_cast<const uint4*>(d.a.cache.k + at));
      batch.v[b] = __ldcg(reinterpret_cast<const uint4*>(d.a.cache.v + at));
    }
  }
  // Puts the newest key and value where load() left them out.
  __device__ __forceinline__ void insert(KvBatch& batch, int step, const NewToken<kLanes, kHeads>& token) const {
    if (cached == last || step + kStep <= cached) return;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (key(step, b) != cached || !has_dims) continue;
      batch.k[b] = *reinterpret_cast<const uint4*>(&token.k[dim]);
      batch.v[b] = *reinterpret_cast<const uint4*>(&token.v[dim]);
    }
  }
  // Bit b: the thread's key b of a step is one of the piece's.
  __device__ __forceinline__ unsigned mask(int step) const {
    constexpr unsigned kAll = (1u << kBatch) - 1;
    if (step >= from && step + kStep <= last) return kAll;
    unsigned bits = 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) bits |= key(step, b) >= from && key(step, b) < last ? 1u << b : 0;
    return bits;
  }
  // The thread's dimensions of the query heads, scaled for a softmax in base 2.
  __device__ __forceinline__ void load_q(const NewToken<kLanes, kHeads>& token, float (&q)[kHeads][kDims]) const {
    const float scale = d.a.scale * kLog2E;
#pragma unroll
    for (int g = 0; g < kHeads; ++g) {
      const float* from = d.a.q + (t * d.a.n_head + head + g) * d.a.head_dim + dim;
#pragma unroll
      for (int i = 0; i < kDims; i += 4) {
        float4 v = make_float4(0, 0, 0, 0);
        if (has_dims && g < n_heads) {
          v = d.rotates ? *reinterpret_cast<const float4*>(&token.head[g][dim + i])
                        : __ldcg(reinterpret_cast<const float4*>(from + i));
        }
        q[g][i] = v.x * scale, q[g][i + 1] = v.y * scale, q[g][i + 2] = v.z * scale, q[g][i + 3] = v.w * scale;
      }
    }
  }
  // The page of the token's own position.
  __device__ __forceinline__ int read_own_page(int slot) const {
    return __ldcg(page_table(d.a.rows, slot) + page_index(pos));
  }
  __device__ __forceinline__ void store_kv(const NewToken<kLanes, kHeads>& token, int page) const {
    for (int i = static_cast<int>(threadIdx.x) * kDims; i < d.a.head_dim; i += kThreads * kDims) {
      const int64_t at = cache_offset(d.a, page, kv_head, pos) + i;
      *reinterpret_cast<uint4*>(d.a.cache.k + at) = *reinterpret_cast<const uint4*>(&token.k[i]);
      *reinterpret_cast<uint4*>(d.a.cache.v + at) = *reinterpret_cast<const uint4*>(&token.v[i]);
    }
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
      const float top = warp_max(own.x), scale = exp2f(own.x - top);
      float sum = group_sum(scale * own.y);
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps<kHeads>; ++w) total = fmaf(__shfl_sync(kAllLanes, scale, w), acc[w][g][c], total);
      if (c >= n) continue;
      if (p.splits == 1) {
        sum += sink_share(d.a, p.head + g, top);
        store_output(d, p.t, p.head, g * n + c, (1.0f / sum) * total);
        continue;
      }
      const int64_t at = (p.t * d.a.n_head + p.head + g) * d.max_splits + blockIdx.x;
      d.acc[at * n + c] = total;
      if (c == 0) d.max_sum[at] = {top, sum};
    }
  }
};

template <int kLanes, int kHeads>
__global__ void __launch_bounds__(kWarps<kHeads>* kWarp, kHeads == 2 ? 1 : 2)
    decode_kernel(const __grid_constant__ DecodeArgs d) {
  using Work = Piece<kLanes, kHeads>;
  __shared__ WarpStates<kLanes, kHeads> states;
  float* const new_value = states.acc[0][0];  // not needed before the first warp is done
  __shared__ NewToken<kLanes, kHeads> token;
  const BatchRows& rows = d.a.rows;
  grid_trigger();
  Work p(d);
  // A guess, as good as certain: position, slot and pages are there already unless they were uploaded just now.
  const int most = static_cast<int>(rows.pages_stride) * kPage - 1, guess = max(0, __ldcg(rows.slot + p.t));
  p.place(max(0, min(__ldcg(rows.pos + p.t), most)));
  typename Work::Pages pages = p.read_pages(guess, p.base);
  if (d.rotates) token.find_rotations(d.a, p.pos);
  p.prefetch(pages);
  grid_wait();
  const int pos = __ldcg(rows.pos + p.t), slot = __ldcg(rows.slot + p.t);
  const typename Work::Pages pages_now = p.read_pages(guess, p.base);
  int own_page = p.read_own_page(guess);  // asked for early: it is needed in the middle of the work
  if (d.rotates) token.request(d.a, p.head, p.n_heads, p.kv_head, new_value);
  KvBatch batch;
  p.load(batch, p.base, pages);
  wait_copy_groups<0>();
  bool is_wrong = pos != p.pos || slot != guess;
#pragma unroll
  for (int i = 0; i < Work::kStepPages; ++i) is_wrong = is_wrong || pages_now.id[i] != pages.id[i];
  if (is_wrong) {
    p.place(pos);
    own_page = p.read_own_page(slot);
    if (d.rotates) token.find_rotations(d.a, pos);
    p.load(batch, p.base, p.read_pages(slot, p.base));
  }
  if (!p.has_keys()) return;
  pages = p.read_pages(slot, p.base + Work::kStep);
  if (d.rotates) {
    __syncthreads();
    token.rotate(d.a, p.n_heads, p.has_pos(), new_value);
    __syncthreads();
    if (p.has_pos() && p.head == p.kv_head * d.group) p.store_kv(token, own_page);
  }
  float q[kHeads][kDims];
  p.load_q(token, q);
  Running<kLanes, kHeads> state;
  for (int step = p.base; step < p.last; step += Work::kStep) {
    p.insert(batch, step, token);
    state.add(q, batch.k, batch.v, p.mask(step), [&](float score) { return capped(d.a, score); });
    const int next = step + Work::kStep;
    if (next >= p.last) break;
    p.load(batch, next, pages);
    pages = p.read_pages(slot, next + Work::kStep);  // one step ahead
  }
  state.merge_warp();
  states.store(state);
  __syncthreads();
  states.merge(p);
  if (p.splits > 1 && is_last_piece(d.finished + p.t * gridDim.y + blockIdx.y, p.splits)) {
    merge_pieces<Work::kThreads, kHeads>(d, p.t, p.head, p.n_heads, p.splits);
  }
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
  // More share a key: in several blocks, since short contexts have few pieces (8 heads a block took 23 us for 32 heads
  // and 128 positions, 2 take 10; at 16384 positions 4 a block would be 4 % faster).
  return {decode_kernel<kLanes, 2>, 2, kWarps<2> * kWarp};
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
  int64_t splits = max_splits(gpu, v, n_head, n_head_kv);
  if (n_head_kv == 1) splits = std::max(splits, latent_splits(gpu, n_head));  // it may be a latent
  const int64_t pieces = max_tokens * n_head * splits;
  return {static_cast<size_t>(pieces * (head_dim + 2)) * sizeof(float),
          static_cast<size_t>(max_tokens * n_head) * sizeof(unsigned)};
}

void attention_decode(const Gpu& gpu, const AttentionArgs& a, int64_t T, bool rotates, float* partial,
                      unsigned* counters, Act out) {
  HEARTH_CHECK(T <= kFewTokens && (!rotates || T == 1));
  const int64_t group = a.n_head / a.n_head_kv;
  const Variant v = choose_variant(group, a.head_dim);
  const int64_t splits = max_splits(gpu, v, a.n_head, a.n_head_kv), blocks_q = ceil_div(group, v.heads);
  const int64_t pieces = T * a.n_head * splits;
  const bool whole_blocks = a.head_dim % 32 == 0;
  const DecodeArgs d{a,
                     rotates,
                     static_cast<int>(group),
                     static_cast<int>(blocks_q),
                     static_cast<int>(splits),
                     partial + 2 * pieces,
                     reinterpret_cast<float2*>(partial),
                     counters,
                     Act{out.x, whole_blocks ? out.q8 : nullptr}};
  const int64_t pieces_at_most = attention_grid_splits(a.max_kv, a.window, splits);
  const dim3 grid(grid_size(pieces_at_most), grid_size(a.n_head_kv * blocks_q), grid_size(T));
  launch(gpu, v.kernel, grid, v.threads, 0, d);
  if (out.q8 != nullptr && !whole_blocks) quantize_rows(gpu, out.x, T, a.n_head * a.head_dim, out.q8);
}

}  // namespace hearth::cuda
