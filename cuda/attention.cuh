#pragma once
// The steps of attention() (kernels.cuh), and where a position lies in the paged cache.
#include "cuda/exchange.cuh"
#include "cuda/kernels.cuh"

namespace hearth::cuda {

// rope_kv.cu: q is normed and rotated in place; k likewise goes into the cache, and v as it is.
void rope_kv(const Gpu& gpu, const AttentionArgs& args, int64_t T);
// attention_decode.cu: up to kFewTokens tokens. rotates: q, k and v are raw, of one token; otherwise rope_kv() has run.
void attention_decode(const Gpu& gpu, const AttentionArgs& args, int64_t T, bool rotates, float* partial,
                      unsigned* counters, Act out);
// attention_latent.cu: any number of tokens, with the rotation and the write to the cache; splits: of few tokens' contexts.
void attention_latent(const Gpu& gpu, const AttentionArgs& args, int64_t T, float* partial, unsigned* counters,
                      Act out);
int64_t latent_splits(const Gpu& gpu, int64_t n_head);
// attention_prefill.cu: the tokens of args.rows.runs, on tensor cores, after rope_kv().
void attention_prefill(const Gpu& gpu, const AttentionArgs& args, float* out);

#ifdef __CUDACC__
constexpr int kPage = static_cast<int>(kPagePositions);

// The pages of one sequence.
__device__ __forceinline__ const int32_t* page_table(const BatchRows& rows, int slot) {
  return rows.pages + slot * rows.pages_stride;
}
// Index in a sequence's table of the page that has a position.
__device__ __forceinline__ int page_index(int position) {
  return static_cast<int>(static_cast<unsigned>(position) / kPage);
}
// Offset in elements of a position's key (and value) of one kv head, from the layer's first page.
__device__ __forceinline__ int64_t cache_offset(const AttentionArgs& a, int page, int64_t kv_head, int position) {
  const int64_t in_page = kv_head * kPage + static_cast<unsigned>(position) % kPage;
  return page * a.cache.stride + in_page * a.head_dim;
}

// A token's context is cut into `count` pieces of whole pages, which depend on its own position alone.
struct Split {
  int count;
  int page, from, last;  // of piece `index`: its first page, its positions [from, last), none where from >= last
  __device__ __forceinline__ Split(const AttentionArgs& a, int pos, int max_splits, int index) {
    const int begin = a.window > 0 ? max(0, pos + 1 - static_cast<int>(a.window)) : 0;
    const int n_pages = page_index(pos) + 1 - page_index(begin);
    const int pages = static_cast<int>(attention_split_pages(n_pages, max_splits));
    count = (n_pages + pages - 1) / pages, page = page_index(begin) + index * pages;
    from = max(page * kPage, begin), last = min((page + pages) * kPage, pos + 1);
  }
};
// Whether this block is the last of `count` to have written its piece. *finished is zero before the first and after the
// last of them. Called by the whole block.
__device__ __forceinline__ bool is_last_piece(unsigned* finished, int count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = count_arrival(finished) == static_cast<unsigned>(count) - 1;
    if (last) *finished = 0;  // for the next launch
  }
  __syncthreads();
  return last;
}

// Scores are in units of ln 2, for softmaxes in base 2.
constexpr float kLog2E = 1.44269504f;
__device__ __forceinline__ float capped(const AttentionArgs& a, float score) {
  const float cap = a.soft_cap * kLog2E;
  return cap > 0.0f ? cap * tanhf(score / cap) : score;
}
// A head's sink adds this to the sum of a softmax relative to `top`.
__device__ __forceinline__ float sink_share(const AttentionArgs& a, int64_t head, float top) {
  return a.sinks.data != nullptr ? exp2f(a.sinks.data[head] * kLog2E - top) : 0.0f;
}
#endif

}  // namespace hearth::cuda
