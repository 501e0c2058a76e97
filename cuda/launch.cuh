#pragma once
// Kernel launches that may overlap the tail of the kernel before (programmatic dependent launch, compute
// capability 9.0+).
//
// Every kernel of this backend calls grid_wait() before it touches anything that an earlier operation wrote, in every
// thread, and grid_trigger(), mostly at its start. What comes before grid_wait() may read weights only: no operation
// writes those; or guess, and look again afterwards. Since each kernel waits for the one before it to be complete,
// completion is transitive.
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/handles.cuh"
#include "cuda/launch_shapes.h"

namespace hearth::cuda {

// Launches need to know this about the device.
struct Gpu {
  int index = 0;
  cudaStream_t stream = nullptr;
  int multiprocessors = 1;
  size_t shared_per_block = 48 << 10;  // after opting in
  size_t l2_bytes = 0;
  bool overlap = false;  // launches use programmatic dependent launch
};

#ifdef __CUDACC__
__device__ __forceinline__ void grid_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

// Allows a kernel its shared memory. All kernels ask for the same division between shared memory and L1: a
// multiprocessor can only change that while it is empty, which would keep a kernel from starting beside the one before.
void prepare_kernel(const Gpu& gpu, const void* kernel, size_t shared_bytes);

// Whether the empty GPU holds `blocks` blocks of the kernel at once: those that wait for each other must be.
bool fits_at_once(const Gpu& gpu, const void* kernel, int64_t blocks, int threads, size_t shared_bytes);

// Launches kernel(args...) on the GPU's stream.
template <typename... Params, typename... Args>
void launch(const Gpu& gpu, void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, Args... args) {
  prepare_kernel(gpu, reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = gpu.stream;
  config.attrs = &attribute;
  config.numAttrs = gpu.overlap ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

inline unsigned grid_size(int64_t n) {
  HEARTH_CHECK(n >= 0 && n <= 0x7FFFFFFF, "grid of {}", n);
  return static_cast<unsigned>(n);
}

// Kernels with a token dimension: block (t, b) does block b's work for token t. Blocks of one b start together, so that
// all but the first find the weights in the second-level cache. Nothing but addresses depends on T: a token's result
// has the same bits as alone.
inline dim3 token_grid(int64_t T, int64_t blocks) {
  HEARTH_CHECK(blocks <= 65535, "{} blocks a token", blocks);
  return {grid_size(T), grid_size(blocks)};
}

}  // namespace hearth::cuda
