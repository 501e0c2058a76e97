#pragma once
// Which neurons a token needs, as this device keeps it: a bit mask. The memory of core/sparse_ffn.h's NeuronLists holds
// masks here. Kernels write them word by word, as soon as 32 neurons are known, and those that read one find their
// shares of the list that it stands for by themselves, so that no kernel makes lists in between. The CPU gets the same
// words as marks (core/mailbox.h), and before them the vector, from a block of its own.
#include "cuda/exchange.cuh"
#include "cuda/mailbox.cuh"
#include "cuda/reduce.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

// Token t's mask in the memory of lists: bit k % 32 of word k / 32 is neuron k. The mask of linked neurons begins with
// the word that the first of them has in the predictor's mask: with bit n_own % 32.
inline uint32_t* token_mask(const NeuronLists& lists, int64_t t) {
  return reinterpret_cast<uint32_t*>(lists.ids) + t * lists.stride;
}

// Where the neurons that a predictor names for one token go: of its n rows the first n_own are this device's, the next
// n_linked are read over the link, the others are the CPU's.
struct NameTarget {
  int n = 0, n_own = 0, n_linked = 0;
  uint32_t* own = nullptr;     // mask, or null: not wanted
  uint32_t* linked = nullptr;  // the same
  // With a hand-off:
  PostTarget post;           // posted null: none
  const float* x = nullptr;  // [n_x] the token's row of the vector
  int64_t n_x = 0;
  bool is_last = false;  // token of the hand-off: the vector is complete, and the hand-off is counted
  constexpr bool posts() const { return post.posted != nullptr; }
  // Only marks are wanted, of a hand-off to come (CudaMailbox::hint_target()).
  constexpr bool hints() const { return !posts() && post.marks != nullptr; }
  constexpr int first_marked_word() const { return (n_own + n_linked) / 32; }
  // Words of 32 rows, the first that is wanted and how many: a hint tells of the CPU's neurons alone.
  constexpr int first_word() const { return hints() ? first_marked_word() : 0; }
  constexpr int n_words() const { return (n + 31) / 32 - first_word(); }
};

#ifdef __CUDACC__
// A launch with a hand-off has one block more, the first, which only writes the token's row of the vector.
__device__ __forceinline__ bool is_messenger(const NameTarget& a) {
  return a.posts() && blockIdx.x == 0;
}
// The block's number among those that are no messengers.
__device__ __forceinline__ int worker(const NameTarget& a) {
  return static_cast<int>(blockIdx.x) - (a.posts() ? 1 : 0);
}

// Tells the CPU that the vector is there, after a barrier with those that wrote its last row. The rows before are of
// launches before. Called by the whole block.
__device__ __forceinline__ void announce_input(const NameTarget& a, uint32_t number) {
  if (threadIdx.x > 0 || !a.is_last) return;
  raise_flag(a.post, number, MailboxMarks::of(a.n, a.n_own, a.n_own + a.n_linked).packed());
}
// The messenger's work: what is known before the neurons are, so its time is hidden.
__device__ __forceinline__ void post_input(const NameTarget& a) {
  const uint32_t number = threadIdx.x == 0 ? next_number(a.post) : 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < a.n_x; i += blockDim.x) a.post.x[i] = __ldcg(a.x + i);
  __syncthreads();
  announce_input(a, number);
}
// The same where a norm may have to be done first: its result, which is what is handed over, mostly, is not written yet
// where readers do the norm on the way. start() before grid_wait().
template <int kThreads>
struct Messenger {
  const NameTarget& target;
  const bool norms, posts_result;
  NormWriter<kThreads> writer;

  __device__ __forceinline__ Messenger(const NameTarget& a, const InputNorm& norm)
      : target(a),
        norms(norm.x != nullptr),
        posts_result(norms && a.x == norm.out.x && a.n_x == norm.n),
        writer(norm) {}
  __device__ __forceinline__ void start() {
    if (norms) writer.start();
  }
  __device__ __forceinline__ void run() {
    const uint32_t number = threadIdx.x == 0 ? next_number(target.post) : 0;
    if (norms) writer.run(posts_result ? target.post.x : nullptr);
    if (!posts_result) return post_input(target);
    announce_input(target, number);
  }
};

// The number that put_names() needs; asked for early by the thread that will call it.
__device__ __forceinline__ uint32_t mark_number(const NameTarget& a) {
  return a.post.marks != nullptr ? next_number(a.post) : 0;
}
// Writes a word of 32 neurons, and tells the CPU which of its own are named in it. Called by one thread for each word.
__device__ __forceinline__ void put_names(const NameTarget& a, int word, uint32_t named, uint32_t number) {
  if (a.own != nullptr && word * 32 < a.n_own) a.own[word] = named;
  if (a.linked != nullptr && word >= a.n_own / 32 && word * 32 < a.n_own + a.n_linked) {
    a.linked[word - a.n_own / 32] = named;
  }
  const int first = a.first_marked_word();
  if (a.post.marks == nullptr || word < first) return;
  const uint32_t others = word == first ? (1u << ((a.n_own + a.n_linked) % 32)) - 1u : 0u;
  put_mark(a.post, number, word - first, named & ~others);
}
// Counts the hand-off when every block has read the number before. Called by every block, at its end.
__device__ __forceinline__ void count_hand_off(const NameTarget& a) {
  if (!a.posts() || !a.is_last) return;
  __syncthreads();
  if (threadIdx.x != 0 || count_arrival(a.post.arrived) != gridDim.x - 1) return;
  *a.post.arrived = 0;
  *a.post.number = next_number(a.post);
}

// The list of the neurons that bits [skip, skip + n) of a mask name, numbered from 0, as one of many blocks reads it:
// calls f(i, neuron) for those at positions first + i * step of the list, i in [0, most), and returns the length of the
// list. Called by the whole block. Code that runs once runs at the speed of fetching it, so it is short rather than
// unrolled.
template <typename F>
__device__ __forceinline__ int each_masked(const uint32_t* mask, int skip, int n, int first, int step, int most,
                                           F&& f) {
  __shared__ int sums[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int n_words = (skip + n + 31) / 32;
  int length = 0;
#pragma unroll 1
  for (int base = 0; base < n_words; base += static_cast<int>(blockDim.x)) {
    const int w = base + static_cast<int>(threadIdx.x);
    uint32_t left = 0;
    if (w < n_words) {
      const int end = skip + n - w * 32;  // bits from there on are not the list's
      left = __ldcg(mask + w);
      if (w == 0) left &= ~0u << skip;
      if (end < 32) left &= (1u << end) - 1u;
    }
    const int own = __popc(left);
    int at = own;
#pragma unroll
    for (int o = 1; o < kWarp; o *= 2) {
      const int v = __shfl_up_sync(kAllLanes, at, o);
      if (lane >= o) at += v;
    }
    if (base > 0) __syncthreads();
    if (lane == kWarp - 1) sums[warp] = at;
    __syncthreads();
    const int of_warp = lane < warps ? sums[lane] : 0;
    const int end = length + warp_sum(lane < warp ? of_warp : 0) + at;
    length += warp_sum(of_warp);
    at = end - own;  // of the word's first neuron
    int i = at > first ? (at - first + step - 1) / step : 0;
#pragma unroll 1
    for (; i < most && first + i * step < end; ++i) {
#pragma unroll 1
      for (; at < first + i * step; ++at) left &= left - 1;
      f(i, w * 32 + __ffs(static_cast<int>(left)) - 1 - skip);
    }
  }
  return length;
}
#endif

}  // namespace hearth::cuda
