#pragma once
// The blocks of one kernel hand each other values. Every value travels with the launch's number in one 8-byte word, so
// that whoever reads it knows whether it has come. That takes about as long as one trip to the second-level cache,
// where the end of a kernel and the start of the next take several, and what else the blocks have asked for keeps
// coming meanwhile.
//
// Blocks wait for each other then, so all of them must be resident together. They are: fits_at_once() has said that
// the empty GPU holds the whole grid, and nothing that can run beside it keeps room for good. Kernels before it on the
// stream, and hints on the side stream, end without it; blocks of the kernel after it begin when all blocks of this one
// run (grid_trigger()). Should another process hold multiprocessors, the waits end all the same (patience.cuh).
#include "cuda/launch.cuh"
#include "cuda/patience.cuh"

namespace hearth::cuda {

struct Exchange {
  uint64_t* words = nullptr;    // zero at first
  uint32_t* numbers = nullptr;  // [gridDim.x], the same for all launches on it; zero at first
  Patience patience;
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
__device__ __forceinline__ void wait_arrivals(unsigned* arrived, unsigned n, const Patience& patience) {
  wait_until(patience, [&] {
    unsigned now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
    return now == n;
  });
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
// Two values at once, 16 bytes aligned.
__device__ __forceinline__ uint2 wait_words(const Exchange& e, int first, uint32_t number) {
  uint64_t a, b;
  wait_until(e.patience, [&] {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(e.words + first) : "memory");
    return static_cast<uint32_t>(a) == number && static_cast<uint32_t>(b) == number;
  });
  return {static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b >> 32)};
}
#endif

}  // namespace hearth::cuda
