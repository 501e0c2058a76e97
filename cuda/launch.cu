#include "cuda/launch.cuh"

#include <map>
#include <mutex>
#include <utility>

namespace hearth::cuda {

void prepare_kernel(const Gpu& gpu, const void* kernel, size_t shared_bytes) {
  if (shared_bytes > gpu.shared_per_block) {
    fail("a kernel needs {} bytes of shared memory and this GPU gives a block {}; use --device cpu", shared_bytes,
         gpu.shared_per_block);
  }
  static std::mutex mutex;
  // Bytes of dynamic shared memory, by GPU and kernel. Without opting in, 48 KiB are for it and the kernel's own.
  static std::map<std::pair<int, const void*>, size_t> allowed;
  const std::lock_guard lock(mutex);
  const auto [it, is_new] = allowed.try_emplace({gpu.index, kernel}, size_t{32} << 10);
  if (is_new) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  if (shared_bytes <= it->second) return;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  it->second = shared_bytes;
}

bool fits_at_once(const Gpu& gpu, const void* kernel, int64_t blocks, int threads, size_t shared_bytes) {
  prepare_kernel(gpu, kernel, shared_bytes);
  int each = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes));
  return blocks <= int64_t{each} * gpu.multiprocessors;
}

}  // namespace hearth::cuda
