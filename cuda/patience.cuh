#pragma once
// Waits inside kernels, for the CPU or for other blocks, end: whoever has waited for too long raises a flag that the
// host sees, and goes on with whatever is there.
#include <cuda_runtime.h>

#include <cstdint>

namespace hearth::cuda {

struct Patience {
  uint32_t* failed = nullptr;  // in mapped host memory: not 0 when a side has given up
  unsigned long long ns = 0;
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

// A wait asks this now and then: false when it has lasted too long, or another one has.
__device__ __forceinline__ bool goes_on_waiting(const Patience& patience, unsigned long long start) {
  if (load_acquire_system(patience.failed) != 0) return false;
  if (nanoseconds() - start <= patience.ns) return true;
  store_release_system(patience.failed, 1);
  return false;
}
// Looks until `reached`, or gives up. The clock and the flag are not looked at in the first half of a millisecond.
template <typename Reached>
__device__ __forceinline__ void wait_until(const Patience& patience, Reached reached) {
  unsigned long long start = 0;
  for (unsigned looks = 1; !reached(); ++looks) {
    if ((looks & 1023u) != 0) continue;
    if (start == 0) start = nanoseconds();
    if (!goes_on_waiting(patience, start)) return;
  }
}
#endif

}  // namespace hearth::cuda
