// Multi-head latent attention (core/latent_attention.h): attention over keys that all heads share and whose ends are the
// values, and each head's own products before and after it.
//
// A block has eight heads of one token, a warp each, and stages 32 keys at a time for all of them. Up to kFewTokens
// tokens' contexts are cut into pieces of whole pages as in attention_decode.cu, so that a token's result has the same
// bits whatever the other tokens are.
#include "cuda/attention.cuh"
#include "cuda/exchange.cuh"
#include "cuda/format.cuh"
#include "cuda/running_softmax.cuh"

namespace hearth::cuda {
namespace {

constexpr int kHeads = 8, kKeys = kWarp, kThreads = kHeads * kWarp;
constexpr int kMaxLatent = 512, kColumns = kDims * kWarp, kLaneParts = kMaxLatent / kColumns;
constexpr int kPad = 8;  // elements behind a staged key, so that eight lanes' 16 bytes lie in different banks
static_assert(kPage % kKeys == 0, "staged keys are of one page");

struct LatentArgs {
  AttentionArgs a;
  int max_splits;
  float* acc;          // [T][n_head][max_splits][value_dim], not normalised
  float2* max_sum;     // [T][n_head][max_splits]
  unsigned* finished;  // [T][groups of heads] blocks that have written their piece; zero before and after
  float* out;          // [T][n_head][value_dim]
};

constexpr size_t shared_bytes(int64_t head_dim) {
  return static_cast<size_t>(kHeads * head_dim + kHeads * kKeys) * sizeof(float) +
         static_cast<size_t>(kKeys * (head_dim + kPad)) * sizeof(f16_t);
}

// A warp's running softmax of one head. Lane l has the columns from 8 l on of every kColumns.
struct HeadState {
  float top = kNone, sum = 0.0f, acc[kLaneParts][kDims] = {};

  __device__ __forceinline__ static int column(int part) {
    return part * kColumns + static_cast<int>(threadIdx.x % kWarp) * kDims;
  }
  // weights [kKeys]: of the keys, whose values [kKeys][stride] begin at `values` and have n columns.
  __device__ __forceinline__ void add(const float* weights, const f16_t* values, int stride, int n) {
    for (int k = 0; k < kKeys; ++k) {
      const float w = weights[k];
#pragma unroll
      for (int p = 0; p < kLaneParts; ++p) {
        if (column(p) >= n) continue;
        float v[kDims];
        unpack(*reinterpret_cast<const uint4*>(values + k * stride + column(p)), v);
#pragma unroll
        for (int i = 0; i < kDims; ++i) acc[p][i] = fmaf(w, v[i], acc[p][i]);
      }
    }
  }
  __device__ __forceinline__ void rescale(float factor) {
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kLaneParts * kDims; ++i) acc[i / kDims][i % kDims] *= factor;
  }
  // to [n] = acc times factor.
  __device__ __forceinline__ void store(float* to, int n, float factor) const {
#pragma unroll
    for (int p = 0; p < kLaneParts; ++p) {
      if (column(p) >= n) continue;
#pragma unroll
      for (int i = 0; i < kDims; ++i) to[column(p) + i] = acc[p][i] * factor;
    }
  }
};

// Merges a head's pieces and writes its output. Called by a warp.
__device__ void merge_pieces(const LatentArgs& d, int64_t t, int64_t head, int splits, int n) {
  const int64_t first = (t * d.a.n_head + head) * d.max_splits;
  HeadState state;
  for (int s = 0; s < splits; ++s) state.top = fmaxf(state.top, __ldcg(d.max_sum + first + s).x);
  for (int s = 0; s < splits; ++s) {
    const float2 piece = __ldcg(d.max_sum + first + s);
    const float factor = exp2f(piece.x - state.top);
    state.sum = fmaf(factor, piece.y, state.sum);
#pragma unroll
    for (int p = 0; p < kLaneParts; ++p) {
      if (HeadState::column(p) >= n) continue;
      const float* acc = d.acc + (first + s) * n + HeadState::column(p);
#pragma unroll
      for (int i = 0; i < kDims; ++i) state.acc[p][i] = fmaf(factor, __ldcg(acc + i), state.acc[p][i]);
    }
  }
  state.store(d.out + (t * d.a.n_head + head) * n, n, 1.0f / (state.sum + sink_share(d.a, head, state.top)));
}

// Grid: (T, groups of kHeads heads, splits).
__global__ void __launch_bounds__(kThreads) latent_kernel(const __grid_constant__ LatentArgs d) {
  extern __shared__ float4 memory[];
  grid_trigger();
  grid_wait();
  const AttentionArgs& a = d.a;
  const int dim = static_cast<int>(a.head_dim), n = static_cast<int>(a.latent_norm.n), stride = dim + kPad;
  auto* const queries = reinterpret_cast<float*>(memory);               // [kHeads][dim]
  float* const all_weights = queries + kHeads * dim;                    // [kHeads][kKeys]
  auto* const keys = reinterpret_cast<f16_t*>(all_weights + kThreads);  // [kKeys][stride]
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, first_head = static_cast<int>(blockIdx.y) * kHeads;
  const int64_t t = blockIdx.x, head = first_head + warp;
  const int pos = __ldcg(a.rows.pos + t);
  const int32_t* const table = page_table(a.rows, __ldcg(a.rows.slot + t));

  const Split split(a, pos, d.max_splits, static_cast<int>(blockIdx.z));
  const int from = split.from, last = split.last, splits = split.count;
  if (from >= last) return;

  const float scale = a.scale * kLog2E;
  for (int i = threadIdx.x; i < kHeads * dim; i += kThreads) {
    const int64_t h = first_head + i / dim;
    queries[i] = h < a.n_head ? __ldcg(a.q + (t * a.n_head + h) * dim + i % dim) * scale : 0.0f;
  }
  const float* const query = queries + warp * dim;
  float* const weights = all_weights + warp * kKeys;
  HeadState state;
  for (int first = from / kKeys * kKeys; first < last; first += kKeys) {
    const f16_t* const cached = a.cache.k + cache_offset(a, __ldcg(table + page_index(first)), 0, first);
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * dim / kDims; i += kThreads) {
      const int key = i / (dim / kDims), at = i % (dim / kDims) * kDims;
      const bool is_seen = first + key >= from && first + key < last;  // others may hold anything
      *reinterpret_cast<uint4*>(keys + key * stride + at) =
          is_seen ? __ldcg(reinterpret_cast<const uint4*>(cached + key * dim + at)) : make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    float score = 0.0f;
    for (int i = 0; i < dim; i += kDims) {
      float k[kDims];
      unpack(*reinterpret_cast<const uint4*>(keys + lane * stride + i), k);
      const float4 low = *reinterpret_cast<const float4*>(query + i),
                   high = *reinterpret_cast<const float4*>(query + i + 4);
      const float q[kDims] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < kDims; ++j) score = fmaf(q[j], k[j], score);
    }
    const bool is_seen = first + lane >= from && first + lane < last;
    score = is_seen ? capped(a, score) : kNone;
    const float top = fmaxf(state.top, warp_max(score));
    state.rescale(exp2f(state.top - top));
    state.top = top;
    const float weight = is_seen ? exp2f(score - top) : 0.0f;
    state.sum += group_sum(weight);
    weights[lane] = weight;
    __syncwarp();
    state.add(weights, keys + dim - n, stride, n);
  }

  if (splits == 1) {
    if (head < a.n_head) {
      state.store(d.out + (t * a.n_head + head) * n, n, 1.0f / (state.sum + sink_share(a, head, state.top)));
    }
    return;
  }
  if (head < a.n_head) {
    const int64_t piece = (t * a.n_head + head) * d.max_splits + blockIdx.z;
    state.store(d.acc + piece * n, n, 1.0f);
    if (lane == 0) d.max_sum[piece] = {state.top, state.sum};
  }
  const bool is_last = is_last_piece(d.finished + t * gridDim.y + blockIdx.y, splits);
  if (is_last && head < a.n_head) merge_pieces(d, t, head, splits, n);
}

// --- each head's products ---

constexpr int kProductRows = 64, kProductWarps = 8;  // of a block

// Grid: (tokens / kTokens, heads, rows / kProductRows). A row's chunks are spread over `lanes` lanes, a power of 2. Each
// token's sums have one order, whatever kTokens is.
template <DType D, int kTokens>
__global__ void __launch_bounds__(kProductWarps* kWarp)
    head_products_kernel(const __grid_constant__ HeadProducts p, int T, int lanes) {
  using F = Format<D>;
  constexpr int kWeights = F::kWeights, kStride = kWeights + 4;  // of a staged chunk: in other banks than its neighbour
  extern __shared__ float4 memory[];
  auto* const inputs = reinterpret_cast<float*>(memory);  // [kTokens][n_chunks][kStride]
  grid_trigger();
  grid_wait();
  const int cols = static_cast<int>(p.w.cols), rows = static_cast<int>(p.rows()), n_chunks = cols / kWeights;
  const int first_token = static_cast<int>(blockIdx.x) * kTokens, n_tokens = min(kTokens, T - first_token);
  const int64_t head = blockIdx.y;
  for (int t = 0; t < n_tokens; ++t) {
    const int64_t row = (first_token + t) * p.n_head + head;
    const float* const x = p.x + row * p.x_stride();
    float* const to = inputs + t * n_chunks * kStride;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) to[i / kWeights * kStride + i % kWeights] = __ldcg(x + i);
    if (blockIdx.z > 0) continue;
    for (int i = threadIdx.x; i < p.n_tail; i += blockDim.x) p.y[row * p.y_stride() + i] = __ldcg(x + cols + i);
  }
  __syncthreads();
  const RowFields<D> fields(p.w.cols);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, own = lane % lanes;
  const int at_once = kWarp / lanes, first = static_cast<int>(blockIdx.z) * kProductRows;
  const int end = min(first + kProductRows, rows);
  for (int base = first + warp * at_once; base < end; base += kProductWarps * at_once) {
    const int r = base + lane / lanes;
    const bool live = r < end;
    float sum[kTokens] = {};
    for (int c = own; live && c < n_chunks; c += lanes) {
      const Chunk w = fields.load(row_of<D>(p.w, fields, head * rows + r), 0, static_cast<unsigned>(c));
      float values[kWeights];
      F::decode(w, values);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= n_tokens) break;
        const auto* const x = reinterpret_cast<const float4*>(inputs + (t * n_chunks + c) * kStride);
#pragma unroll
        for (int i = 0; i < kWeights; i += 4) {
          const float4 v = x[i / 4];
          sum[t] = fmaf(values[i], v.x, sum[t]), sum[t] = fmaf(values[i + 1], v.y, sum[t]);
          sum[t] = fmaf(values[i + 2], v.z, sum[t]), sum[t] = fmaf(values[i + 3], v.w, sum[t]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      for (int o = 1; o < lanes; o *= 2) sum[t] += __shfl_xor_sync(kAllLanes, sum[t], o);
      if (live && own == 0 && t < n_tokens) {
        p.y[((first_token + t) * p.n_head + head) * p.y_stride() + p.n_tail + r] = sum[t];
      }
    }
  }
}

}  // namespace

int64_t latent_splits(const Gpu& gpu, int64_t n_head) {
  return attention_max_splits(ceil_div(n_head, kHeads), 2 * gpu.multiprocessors);
}

void attention_latent(const Gpu& gpu, const AttentionArgs& a, int64_t T, float* partial, unsigned* counters, Act out) {
  const int64_t n = a.latent_norm.n;
  if (a.head_dim % kDims != 0 || n % kDims != 0 || n > kMaxLatent || shared_bytes(a.head_dim) > gpu.shared_per_block) {
    fail(
        "latents of {} elements beside {} rotated ones are not supported on the GPU, expected multiples of {}, and at "
        "most {}; use --device cpu",
        n, a.head_dim - n, kDims, kMaxLatent);
  }
  HEARTH_CHECK(a.n_head_kv == 1);
  rope_kv(gpu, a, T);
  const int64_t splits = T <= kFewTokens ? latent_splits(gpu, a.n_head) : 1;
  LatentArgs d{a, static_cast<int>(splits), nullptr, nullptr, counters, out.x};
  if (splits > 1) {
    const int64_t pieces = T * a.n_head * splits;
    d.max_sum = reinterpret_cast<float2*>(partial), d.acc = partial + 2 * pieces;
  }
  const dim3 grid(grid_size(T), grid_size(ceil_div(a.n_head, kHeads)),
                  grid_size(splits > 1 ? attention_grid_splits(a.max_kv, a.window, splits) : 1));
  launch(gpu, latent_kernel, grid, kThreads, shared_bytes(a.head_dim), d);
  if (out.q8 != nullptr) quantize_rows(gpu, out.x, T, a.n_head * n, out.q8);
}

void head_products(const Gpu& gpu, const HeadProducts& p, int64_t T) {
  with_format(p.w.type, [&]<DType D>() {
    constexpr int kWeights = Format<D>::kWeights;
    if (p.w.cols % kWeights != 0) {
      fail("products by head on the GPU need rows of a multiple of {} elements, found {}; use --device cpu", kWeights,
           p.w.cols);
    }
    const int64_t n_chunks = p.w.cols / kWeights;
    int lanes = 1;
    while (lanes < n_chunks && lanes < kWarp) lanes *= 2;
    const auto run = [&]<int kTokens>() {
      const dim3 grid(grid_size(ceil_div(T, kTokens)), grid_size(p.n_head),
                      grid_size(ceil_div(p.rows(), kProductRows)));
      launch(gpu, head_products_kernel<D, kTokens>, grid, kProductWarps * kWarp,
             static_cast<size_t>(kTokens * n_chunks * (kWeights + 4)) * sizeof(float), p, static_cast<int>(T), lanes);
    };
    if (T <= kFewTokens) return run.template operator()<1>();
    run.template operator()<8>();
  });
}

}  // namespace hearth::cuda
