#pragma once
// From a kernel that says of each neuron whether it is named (a bit mask in device memory) to lists of ids, without a
// kernel of its own: those that read them find their shares in the mask, or the block that finishes last makes the
// lists. The CPU gets the vector first; its neurons as marks, from each block as soon as it knows them; with values, as
// a list.
#include "cuda/exchange.cuh"
#include "cuda/mailbox.cuh"
#include "cuda/reduce.cuh"
#include "cuda/staged_input.cuh"

namespace hearth::cuda {

constexpr int64_t kMaxMaskWords = 2048;
constexpr int64_t kMaxMaskNeurons = kMaxMaskWords * 32;     // of a layer
constexpr size_t kListSharedBytes = 2 * kMaxMaskWords * 4;  // dynamic shared memory of the kernels that make lists

// Where the named neurons are listed: [0, n_first) in `first`; [n_first, n), numbered from 0 again, the first n_linked
// of them in `linked`, the others in `rest` or in the hand-off. A list whose ids are null is not wanted.
struct NeuronLists {
  int n = 0, n_first = 0, n_linked = 0;
  uint32_t* mask = nullptr;     // [ceil(n / 32)] scratch: bit k % 32 of word k / 32
  unsigned* arrived = nullptr;  // scratch: blocks that are done; zero between kernels
  NeuronList first;
  int32_t* first_ids_copy = nullptr;  // optional
  NeuronList linked;                  // wanted if and only if n_linked > 0
  NeuronList rest;
  // With a hand-off:
  PostTarget post;           // posted null: none
  const float* x = nullptr;  // [n_x]
  int64_t n_x = 0;
  const float* values = nullptr;  // [n] what goes along with the ids of `rest`, or null
  bool deferred = false;          // only the mask is made: the lists by whoever reads them (FfnListArgs::made_of)
  constexpr bool posts() const { return post.posted != nullptr; }
  // Only marks are wanted, of a hand-off to come (CudaMailbox::hint_target()).
  constexpr bool hints() const { return !posts() && post.marks != nullptr; }
  // Whether the lists on this device, if they are for its FFN alone, can be deferred. (The CPU has marks.)
  constexpr bool can_defer() const {
    const bool has_own = first.ids != nullptr || (posts() && values == nullptr);
    return has_own && !hints() && first_ids_copy == nullptr && rest.ids == nullptr && values == nullptr;
  }
  // What is left to be made of deferred ones: the CPU has been told.
  constexpr NeuronLists on_device() const {
    NeuronLists lists = *this;
    lists.post = {}, lists.x = nullptr, lists.n_x = 0;
    return lists;
  }
  // Whether they go there; a list that is not wanted is null.
  constexpr bool go_to(const int32_t* first_ids, const int32_t* linked_ids) const {
    return first.ids == first_ids && linked.ids == linked_ids;
  }
  constexpr bool marks() const { return (posts() || hints()) && values == nullptr; }
  constexpr int first_marked_word() const { return (n_first + n_linked) / 32; }
  // Of the mask's words, the first that is wanted: a hint tells of the CPU's neurons alone.
  constexpr int first_word() const { return hints() ? first_marked_word() : 0; }
  constexpr int n_words() const { return (n + 31) / 32 - first_word(); }
};

#ifdef __CUDACC__
// True in all threads of the block that comes last to a counter of all blocks; that block then sees what every thread
// of the others wrote before.
__device__ __forceinline__ bool arrive_last(unsigned* arrived) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = count_arrival(arrived) == gridDim.x - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  return last;
}

// A launch with a hand-off has one block more, the first, which only writes the vector.
__device__ __forceinline__ bool is_messenger(const NeuronLists& a) {
  return a.posts() && blockIdx.x == 0;
}
// The block's number among those that are no messengers.
__device__ __forceinline__ int worker(const NeuronLists& a) {
  return static_cast<int>(blockIdx.x) - (a.posts() ? 1 : 0);
}

// Tells the CPU that the vector is there, after a barrier with those that wrote it. Called by the whole block.
__device__ __forceinline__ void announce_input(const NeuronLists& a, uint32_t number) {
  if (threadIdx.x > 0) return;
  const MailboxMarks marks = MailboxMarks::of(a.n, a.n_first, a.n_first + a.n_linked);
  raise_flag(a.post, number, a.marks() ? marks.packed() : MailboxMemory::kListFollows);
}
// The messenger's work: what is known before the neurons are, so its time is hidden.
__device__ __forceinline__ void post_input(const NeuronLists& a) {
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
  const NeuronLists& lists;
  const bool norms, posts_result;
  NormWriter<kThreads> writer;

  __device__ __forceinline__ Messenger(const NeuronLists& a, const InputNorm& norm)
      : lists(a), norms(norm.x != nullptr), posts_result(norms && a.x == norm.out.x && a.n_x == norm.n), writer(norm) {}
  __device__ __forceinline__ void start() {
    if (norms) writer.start();
  }
  __device__ __forceinline__ void run() {
    const uint32_t number = threadIdx.x == 0 ? next_number(lists.post) : 0;
    if (norms) writer.run(posts_result ? lists.post.x : nullptr);
    if (!posts_result) return post_input(lists);
    announce_input(lists, number);
  }
};

// The number that put_mask() needs; asked for early by the thread that will call it.
__device__ __forceinline__ uint32_t mask_number(const NeuronLists& a) {
  return a.marks() ? next_number(a.post) : 0;
}
// Writes a word of the mask, which a hint has none of, and tells the CPU which of its neurons are named in it. Called
// by one thread for each word.
__device__ __forceinline__ void put_mask(const NeuronLists& a, int word, uint32_t named, uint32_t number) {
  const int first = a.first_marked_word();
  if (!a.hints()) a.mask[word] = named;
  if (!a.marks() || word < first) return;
  const uint32_t others = word == first ? (1u << ((a.n_first + a.n_linked) % 32)) - 1u : 0u;
  put_mark(a.post, number, word - first, named & ~others);
}

// Exclusive sums of a thread's pair over the block; `total` is the block's.
__device__ __forceinline__ int2 block_exclusive_sum(int2 v, int2* shared, int2& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int2 sum = v;
#pragma unroll
  for (int o = 1; o < kWarp; o *= 2) {
    const int x = __shfl_up_sync(kAllLanes, sum.x, o), y = __shfl_up_sync(kAllLanes, sum.y, o);
    if (lane >= o) sum.x += x, sum.y += y;
  }
  if (lane == kWarp - 1) shared[warp] = sum;
  __syncthreads();
  int2 before{0, 0};
  total = {0, 0};
  for (int w = 0; w < warps; ++w) {
    const int2 s = shared[w];
    if (w < warp) before.x += s.x, before.y += s.y;
    total.x += s.x, total.y += s.y;
  }
  return {before.x + sum.x - v.x, before.y + sum.y - v.y};
}

// Makes the lists from the mask. Called by all threads of one block, kThreads of them; shared: kListSharedBytes. Code
// that runs once runs at the speed of fetching it, so it is short rather than unrolled.
template <int kThreads>
__device__ __forceinline__ void write_lists(const NeuronLists& a, void* shared) {
  auto* words = static_cast<uint32_t*>(shared);                  // [kMaxMaskWords]
  auto* before = reinterpret_cast<int*>(words + kMaxMaskWords);  // [kMaxMaskWords] named neurons of the list before
  __shared__ int2 sums[kThreads / kWarp];
  const int n_words = (a.n + 31) / 32, share = (n_words + kThreads - 1) / kThreads, boundary = a.n_first / 32;
  const auto first_bits = [&](int w) {  // those of word w that belong to the first list
    if (w != boundary) return w < boundary ? words[w] : 0u;
    return words[w] & ((1u << (a.n_first % 32)) - 1u);
  };
  const uint32_t number = a.posts() && threadIdx.x == 0 ? next_number(a.post) : 0;
  __syncthreads();  // nobody needs what was there any more
  for (int w = threadIdx.x; w < n_words; w += kThreads) words[w] = __ldcg(a.mask + w);
  __syncthreads();
  const int begin = threadIdx.x * share, end = min(begin + share, n_words);
  int2 mine{0, 0}, total;
  for (int w = begin; w < end; ++w) {
    const uint32_t first = first_bits(w);
    mine.x += __popc(first), mine.y += __popc(words[w] & ~first);
  }
  int2 at = block_exclusive_sum(mine, sums, total);
  for (int w = begin; w < end; ++w) {  // the boundary's word is in both lists, with nothing of `rest` before it
    const uint32_t first = first_bits(w);
    before[w] = w <= boundary ? at.x : at.y;
    at.x += __popc(first), at.y += __popc(words[w] & ~first);
  }
  __syncthreads();
  // A thread takes eight neurons at a time: to(k) is where neuron k goes in its list.
  int32_t* const rest_ids = a.marks() ? nullptr : a.posts() ? a.post.ids : a.rest.ids;
  const auto each_named = [&](int first_word, int end_word, bool of_first, auto&& store) {
    for (int u = first_word * 4 + static_cast<int>(threadIdx.x); u < end_word * 4; u += kThreads) {
      const int w = u / 4, shift = u % 4 * 8;
      const uint32_t bits = of_first ? first_bits(w) : words[w] & ~first_bits(w);
      int to = (!of_first && w == boundary ? 0 : before[w]) + __popc(bits & ((1u << shift) - 1u));
      for (uint32_t byte = bits >> shift & 255u; byte != 0; byte &= byte - 1, ++to) {
        store(to, w * 32 + shift + __ffs(static_cast<int>(byte)) - 1);
      }
    }
  };
  const int linked_end = a.n_first + a.n_linked;
  int n_linked = 0;  // named ones among the linked
  if (a.n_linked > 0) {
    const int w = linked_end / 32;
    if (w >= n_words) {
      n_linked = total.y;
    } else {
      n_linked = (w == boundary ? 0 : before[w]) + __popc(words[w] & ~first_bits(w) & ((1u << (linked_end % 32)) - 1u));
    }
  }
  if (rest_ids != nullptr || a.n_linked > 0) {
    each_named(boundary, n_words, false, [&](int to, int k) {
      if (to < n_linked) {
        a.linked.ids[to] = k - a.n_first;
      } else if (rest_ids != nullptr) {
        rest_ids[to - n_linked] = k - a.n_first;
        if (a.values != nullptr) a.post.values[to - n_linked] = __ldcg(a.values + k);
      }
    });
  }
  if (a.marks()) {
    if (threadIdx.x == 0) *a.post.number = number;
  } else if (a.posts()) {
    __syncthreads();
    if (threadIdx.x == 0) raise_posted(a.post, number, total.y - n_linked);
  } else if (threadIdx.x == 0 && rest_ids != nullptr) {
    *a.rest.count = total.y - n_linked;
  }
  if (threadIdx.x == 0 && a.n_linked > 0) *a.linked.count = n_linked;
  if (a.first.ids == nullptr) return;
  each_named(0, min(boundary + 1, n_words), true, [&](int to, int k) {
    a.first.ids[to] = k;
    if (a.first_ids_copy != nullptr) a.first_ids_copy[to] = k;
  });
  if (threadIdx.x == 0) *a.first.count = total.x;
}

// The same, where the lists are wanted at once, at the end of a kernel that has made the mask.
template <int kThreads>
__device__ __forceinline__ void finish_lists(const NeuronLists& a, void* shared) {
  if (a.hints() || (a.deferred && !a.posts()) || !arrive_last(a.arrived)) return;
  if (!a.deferred) return write_lists<kThreads>(a, shared);
  if (threadIdx.x == 0) *a.post.number = next_number(a.post);
}

// The list of the neurons that bits [from, from + n) of a mask name, numbered from 0, as one of many blocks reads it:
// calls f(i, neuron) for those at positions first + i * step of the list, i in [0, most), and returns the length of the
// list. Called by the whole block. Short, as write_lists() is.
template <typename F>
__device__ __forceinline__ int each_masked(const uint32_t* mask, int from, int n, int first, int step, int most,
                                           F&& f) {
  __shared__ int sums[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int skip = from % 32, n_words = (skip + n + 31) / 32;
  int length = 0;
#pragma unroll 1
  for (int base = 0; base < n_words; base += static_cast<int>(blockDim.x)) {
    const int w = base + static_cast<int>(threadIdx.x);
    uint32_t left = 0;
    if (w < n_words) {
      const int end = skip + n - w * 32;  // bits from there on are not the list's
      left = __ldcg(mask + from / 32 + w);
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

// The lists of a mask, by a kernel of its own: where they were deferred, but nobody makes them on the way.
void make_lists(const Gpu& gpu, const NeuronLists& lists);

}  // namespace hearth::cuda
