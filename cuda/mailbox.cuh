#pragma once
// Hand-offs to the CPU through mapped host memory: kernels write, raise a flag, and spin on another (core/mailbox.h).
#include <memory>

#include "core/device.h"
#include "core/mailbox.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"

namespace hearth::cuda {

// Where a kernel writes a hand-off. Everything but `number` is mapped host memory.
struct PostTarget {
  float* x = nullptr;
  int32_t* ids = nullptr;
  float* values = nullptr;
  uint64_t* marks = nullptr;
  uint64_t* posted = nullptr;
  uint32_t* number =
      nullptr;  // of the last hand-off; in the device's memory, so that a recorded graph goes on counting
};
// Where a kernel finds the answer to the last hand-off.
struct AnswerSource {
  const float* answer = nullptr;
  const uint64_t* words = nullptr;  // what of it is published
  const uint32_t* answered = nullptr;
  uint32_t* failed = nullptr;
  const uint32_t* number = nullptr;
  uint32_t* seen = nullptr;  // of the last answer that a block has seen, in the device's memory
  unsigned long long patience_ns = 0;
};

#ifdef __CUDACC__
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_system(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

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
__device__ __forceinline__ void raise_posted(const PostTarget& post, uint32_t number, int n_ids) {
  *post.number = number;
  raise_flag(post, number, static_cast<uint32_t>(n_ids));
}
// A word of marks (core/mailbox.h). No fence: it carries its own number.
__device__ __forceinline__ void put_mark(const PostTarget& post, uint32_t number, int word, uint32_t bits) {
  const uint64_t mark = static_cast<uint64_t>(bits) << 32 | number;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(post.marks + word), "l"(mark) : "memory");
}

// What a wait for the CPU looks at now and then: false when it stays silent, or says that it failed. Then the flag
// `failed` tells the host, and the answer is not to be used.
__device__ __forceinline__ bool goes_on_waiting(const AnswerSource& a, unsigned long long start) {
  if (load_acquire_system(a.failed) != 0) return false;
  if (nanoseconds() - start <= a.patience_ns) return true;
  store_release_system(a.failed, 1);
  return false;
}

// Waits for the answer to the last hand-off. What is read afterwards must bypass the caches (__ldcv): the host has
// rewritten that memory since the last hand-off.
__device__ __forceinline__ void wait_answered(const AnswerSource& a) {
  const uint32_t number = __ldcg(a.number);
  const unsigned long long start = nanoseconds();
  for (unsigned spins = 1; static_cast<int32_t>(load_acquire_system(a.answered) - number) < 0; ++spins) {
    if ((spins & 1023u) == 0 && !goes_on_waiting(a, start)) break;
  }
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
  uint32_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(a.seen) : "memory");
  } while (static_cast<int32_t>(seen - number) < 0);
}

// Waits for element `at` of the answer to the last hand-off, which is published: one trip over the link from when the
// CPU has it. Called by whole warps, lane by lane for elements side by side; a lane that is not `wanted` gets 0.
__device__ __forceinline__ float wait_published(const AnswerSource& a, int at, bool wanted) {
  const uint32_t number = __ldcg(a.number);
  const unsigned long long start = nanoseconds();
  uint64_t word = number;
  for (unsigned spins = 1;; ++spins) {
    if (wanted) asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(a.words + at) : "memory");
    if (__all_sync(kAllLanes, static_cast<uint32_t>(word) == number)) break;
    if ((spins & 1023u) == 0 && !__all_sync(kAllLanes, goes_on_waiting(a, start))) break;
  }
  return __uint_as_float(static_cast<uint32_t>(word >> 32));
}
#endif

class CudaMailbox final : public Mailbox {
 public:
  static std::unique_ptr<CudaMailbox> open(const Gpu& gpu, int64_t capacity, int64_t max_ids);

  // x [n], and the neurons of a list with their gates' activations (`values` may be null).
  void post(const Gpu& gpu, const float* x, int64_t n, NeuronList list = {}, const float* values = nullptr);
  void collect(const Gpu& gpu, float* x, int64_t n);

  // For kernels that post or collect beside other work. At most n floats and n_ids neurons.
  PostTarget post_target(int64_t n, int64_t n_ids);
  // For marks alone, of the hand-off after the last one posted.
  PostTarget hint_target(int64_t n_ids);
  AnswerSource answer_source() const;

 private:
  struct Memory;
  CudaMailbox(std::shared_ptr<Memory> memory, std::byte* host, int64_t capacity, int64_t max_ids);
  std::shared_ptr<Memory> memory_;
};

}  // namespace hearth::cuda
