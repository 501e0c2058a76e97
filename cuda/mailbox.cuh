#pragma once
// Hand-offs to the CPU through mapped host memory: kernels write, raise a flag, and spin on another (core/mailbox.h).
#include <memory>

#include "core/mailbox.h"
#include "cuda/launch.cuh"
#include "cuda/patience.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {

// Where a kernel writes a hand-off, or one token's part of it: the first three in mapped host memory, the others in the
// device's, so that a recorded graph goes on counting.
struct PostTarget {
  float* x = nullptr;
  uint64_t* marks = nullptr;
  uint64_t* posted = nullptr;
  uint32_t* number = nullptr;   // of the last hand-off
  unsigned* arrived = nullptr;  // blocks of a launch that are done; zero between launches
};
// Where a kernel finds the answer to the last hand-off.
struct AnswerSource {
  const float* answer = nullptr;
  const uint64_t* words = nullptr;  // what of it is published
  const uint32_t* answered = nullptr;
  const uint32_t* number = nullptr;
  uint32_t* seen = nullptr;  // of the last answer that a block has seen, in the device's memory
  Patience patience;         // when it is over, `failed` tells the host, and the answer is not to be used
};

#ifdef __CUDACC__
// The number of the coming hand-off. Asked for early: it takes a while.
__device__ __forceinline__ uint32_t next_number(const PostTarget& post) {
  return __ldcg(post.number) + 1;
}
// Tells the CPU that a hand-off's vector is there, and what of its neurons (MailboxMemory::posted). Called by one
// thread, after a barrier with those that wrote the hand-off's parts. Somebody stores the number in *post.number.
__device__ __forceinline__ void raise_flag(const PostTarget& post, uint32_t number, uint32_t neurons) {
  const uint64_t flag = static_cast<uint64_t>(neurons) << 32 | number;
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(post.posted), "l"(flag) : "memory");
}
__device__ __forceinline__ void raise_posted(const PostTarget& post, uint32_t number) {
  *post.number = number;
  raise_flag(post, number, 0);
}
// A word of marks (core/mailbox.h). No fence: it carries its own number.
__device__ __forceinline__ void put_mark(const PostTarget& post, uint32_t number, int word, uint32_t bits) {
  const uint64_t mark = static_cast<uint64_t>(bits) << 32 | number;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(post.marks + word), "l"(mark) : "memory");
}

// Waits for the answer to the last hand-off. What is read afterwards must bypass the caches (__ldcv): the host has
// rewritten that memory since the last hand-off.
__device__ __forceinline__ void wait_answered(const AnswerSource& a) {
  const uint32_t number = __ldcg(a.number);
  wait_until(a.patience, [&] { return static_cast<int32_t>(load_acquire_system(a.answered) - number) >= 0; });
}

// The same for kernels of many blocks, called by one thread of each: the first block watches the host's memory, and the
// others watch it do so. Many watchers of one flag would slow each other, and the CPU's write, down to several times as
// long.
__device__ __forceinline__ void wait_answered_by_one(const AnswerSource& a) {
  const uint32_t number = __ldcg(a.number);
  if (blockIdx.x == 0) {
    wait_answered(a);
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.seen), "r"(number) : "memory");
    return;
  }
  wait_until(a.patience, [&] {
    uint32_t seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(a.seen) : "memory");
    return static_cast<int32_t>(seen - number) >= 0;
  });
}

// Waits for element `at` of the answer to the last hand-off, which is published: one trip over the link from when the
// CPU has it. Called by whole warps, lane by lane for elements side by side; a lane that is not `wanted` gets 0.
__device__ __forceinline__ float wait_published(const AnswerSource& a, int at, bool wanted) {
  const uint32_t number = __ldcg(a.number);
  const unsigned long long start = nanoseconds();
  uint64_t word = number;
  for (unsigned looks = 1;; ++looks) {
    if (wanted) asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(a.words + at) : "memory");
    if (__all_sync(kAllLanes, static_cast<uint32_t>(word) == number)) break;
    if ((looks & 1023u) == 0 && !__all_sync(kAllLanes, goes_on_waiting(a.patience, start))) break;
  }
  return __uint_as_float(static_cast<uint32_t>(word >> 32));
}
#endif

class CudaMailbox final : public Mailbox {
 public:
  static std::unique_ptr<CudaMailbox> open(const Gpu& gpu, int64_t capacity, int64_t max_ids);

  void post(const Gpu& gpu, const float* x, int64_t n);
  void collect(const Gpu& gpu, float* x, int64_t n);

  // For kernels that post or collect beside other work: row t of a vector [T][n], and at most n_ids neurons of it.
  PostTarget post_target(int64_t t, int64_t n, int64_t n_ids);
  // For marks alone, of the hand-off after the last one posted.
  PostTarget hint_target(int64_t n_ids);
  AnswerSource answer_source() const;

 private:
  struct Memory;
  CudaMailbox(std::shared_ptr<Memory> memory, std::byte* host, int64_t capacity, int64_t max_ids);
  std::shared_ptr<Memory> memory_;
};

}  // namespace hearth::cuda
