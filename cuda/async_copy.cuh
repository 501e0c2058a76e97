#pragma once
// Copies from global to shared memory that need no registers and do not wait (cp.async, sm_80 and later; sm_75 waits).
// A thread may read what it copied itself after async_wait(), without a barrier.
#include <cuda_runtime.h>

namespace hearth::cuda {

__device__ __forceinline__ void async_copy16(uint4* shared, const uint4* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *shared = __ldg(global);
#endif
}
__device__ __forceinline__ void async_copy4(unsigned* shared, const unsigned* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
#else
  *shared = __ldg(global);
#endif
}
// Closes the group of copies since the last one.
__device__ __forceinline__ void async_commit() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending groups of this thread are under way.
template <int kPending>
__device__ __forceinline__ void async_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace hearth::cuda
