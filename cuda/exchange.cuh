#pragma once
// What the blocks of one kernel hand each other. Every value travels with the launch's number in one 8-byte word, so
// that whoever reads it knows whether it has come. That takes about as long as one trip to the second-level cache,
// where the end of a kernel and the start of the next take several, and what else the blocks have asked for keeps
// coming meanwhile.
//
// Blocks wait for each other then, so all of them must be resident: such kernels have one block a multiprocessor.
#include "cuda/launch.cuh"

namespace hearth::cuda {

struct Exchange {
  uint64_t* words = nullptr;    // zero at first
  uint32_t* numbers = nullptr;  // [gridDim.x], the same for all launches on it; zero at first
};

#ifdef __CUDACC__
// Counts one more block; returns how many did before. Called by one thread of the block, behind a barrier: what the
// block wrote before that, later callers see.
__device__ __forceinline__ unsigned count_arrival(unsigned* arrived) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
  return before;
}
// The same for one that need not know how many did.
__device__ __forceinline__ void add_arrival(unsigned* arrived) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}
// Waits until n did, and sets the counter to zero again. Called by one thread of all.
__device__ __forceinline__ void wait_arrivals(unsigned* arrived, unsigned n) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
  } while (now != n);
  *arrived = 0;
}
// The launch's number: each block counts its launches. One thread of every block calls the first after grid_wait(), and
// some time later the second.
__device__ __forceinline__ uint32_t launch_number(const Exchange& e) {
  return __ldcg(e.numbers + blockIdx.x) + 1;
}
__device__ __forceinline__ void count_launch(const Exchange& e, uint32_t number) {
  e.numbers[blockIdx.x] = number;
}
__device__ __forceinline__ void put_word(uint64_t* to, uint32_t value, uint32_t number) {
  const uint64_t word = static_cast<uint64_t>(value) << 32 | number;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ uint32_t wait_word(const uint64_t* from, uint32_t number) {
  uint64_t word;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  } while (static_cast<uint32_t>(word) != number);
  return static_cast<uint32_t>(word >> 32);
}
// Two values at once, 16 bytes aligned.
__device__ __forceinline__ uint2 wait_words(const uint64_t* from, uint32_t number) {
  uint64_t first, second;
  do {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
  } while (static_cast<uint32_t>(first) != number || static_cast<uint32_t>(second) != number);
  return {static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second >> 32)};
}
#endif

}  // namespace hearth::cuda
