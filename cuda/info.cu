// The GPUs of this machine, and how fast their memory is.
#include "cuda/info.cuh"

#include <algorithm>
#include <map>
#include <mutex>

#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda/format.cuh"
#include "cuda/launch.cuh"
#include "cuda/memory.cuh"

namespace hearth::cuda {
namespace {

// Sums all bytes as 16-byte units; the sum is written so that the loads cannot be left out.
__global__ void __launch_bounds__(512) read_kernel(const uint4* data, int64_t n, unsigned* out) {
  constexpr int kInFlight = 8;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride * kInFlight) {
    uint4 v[kInFlight] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * stride < n) v[k] = load_weights(data + i + k * stride);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x9E3779B9u) *out = sum;
}

// Compiled as every kernel is, so that its attributes tell what the build has.
__global__ void probe_kernel() {
  grid_wait();
}

// Best rate in bytes/s of `repeats` runs of `work`, which moves `bytes`.
template <typename F>
double best_rate(cudaStream_t stream, size_t bytes, int repeats, F&& work) {
  const Event begin = make_event(cudaEventDefault), end = make_event(cudaEventDefault);
  float best = INFINITY;
  work();  // warm-up
  for (int i = 0; i < repeats; ++i) {
    CUDA_CHECK(cudaEventRecord(begin, stream));
    work();
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms);
  }
  return static_cast<double>(bytes) / (best * 1e-3);
}

}  // namespace

std::vector<GpuInfo> list_gpus(std::string* why) {
  int n = 0;
  const cudaError_t code = cudaGetDeviceCount(&n);
  if (code != cudaSuccess || n == 0) {
    cudaGetLastError();
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
    const bool none = code == cudaSuccess || code == cudaErrorNoDevice;
    if (why != nullptr) *why = why_no_gpu(driver, CUDART_VERSION, none ? "" : cudaGetErrorString(code));
    return {};
  }
  std::vector<GpuInfo> gpus;
  for (int i = 0; i < n; ++i) {
    cudaDeviceProp p{};
    CUDA_CHECK(cudaGetDeviceProperties(&p, i));
    const GpuMemory memory = query_memory(i);
    gpus.push_back({i, p.name, p.major, p.minor, p.multiProcessorCount, memory.total, memory.free,
                    static_cast<size_t>(p.l2CacheSize)});
  }
  return gpus;
}

void require_gpu(int gpu) {
  std::string why;
  const std::vector<GpuInfo> gpus = list_gpus(&why);
  if (gpus.empty()) fail("no GPU to run on: {}; use --device cpu", why);
  if (gpu < 0 || static_cast<size_t>(gpu) >= gpus.size()) {
    fail("there is no GPU {}; this machine has GPUs 0 to {}", gpu, gpus.size() - 1);
  }
}

size_t activate(int gpu) {
  static std::mutex mutex;
  static std::map<int, size_t> context_bytes;
  const std::lock_guard lock(mutex);
  if (const auto it = context_bytes.find(gpu); it != context_bytes.end()) {
    CUDA_CHECK(cudaSetDevice(gpu));
    return it->second;
  }
  const size_t before = query_memory(gpu).free;
  CUDA_CHECK(cudaSetDevice(gpu));
  CUDA_CHECK(cudaFree(nullptr));  // creates the context
  // Room for a stack is kept for every thread that fits on the GPU: 260 MiB on an H200 at the default of 1 KiB. These
  // kernels have none, and one that had would get it when it is first launched.
  CUDA_CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 0));
  {  // cuBLAS's code stays loaded for later handles to share; a handle's own memory is counted by whoever has it
    const Stream stream = make_stream();
    const Cublas cublas = make_cublas(stream);
  }
  const size_t after = query_memory(gpu).free;
  return context_bytes[gpu] = before > after ? before - after : 0;
}

bool supports_overlap(int gpu) {
  int major = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu));
  cudaFuncAttributes attributes{};
  const cudaError_t code = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidDeviceFunction) {
    fail(
        "this hearth has no code for GPU {} (compute capability {}.x); build it with -DCMAKE_CUDA_ARCHITECTURES=native",
        gpu, major);
  }
  check(code, "cudaFuncGetAttributes");
  return major >= 9 && attributes.ptxVersion >= 90;
}

Bandwidth measure_bandwidth(int gpu) {
  activate(gpu);
  const Stream stream = make_stream();
  int multiprocessors = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, gpu));
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  // Far larger than the second-level cache, and no more than half of what is free.
  const size_t bytes = std::min(size_t{2} << 30, free / 2 / 4096 * 4096);
  if (bytes < (size_t{64} << 20))
    fail("GPU {} has only {} MiB free; too little to measure its bandwidth", gpu, free >> 20);
  void* data = nullptr;
  CUDA_CHECK(cudaMalloc(&data, bytes));
  const DeviceMemory owner(data);
  CUDA_CHECK(cudaMemsetAsync(data, 1, bytes, stream));
  Bandwidth b;
  const auto n = static_cast<int64_t>(bytes / sizeof(uint4));
  b.memory_read = best_rate(stream, bytes, 5, [&] {
    read_kernel<<<static_cast<unsigned>(multiprocessors * 4), 512, 0, stream>>>(static_cast<const uint4*>(data), n,
                                                                                static_cast<unsigned*>(data));
    CUDA_CHECK(cudaGetLastError());
  });
  const size_t host_bytes = size_t{64} << 20;
  const PinnedMemory host = make_pinned(host_bytes);
  b.host_to_device = best_rate(stream, host_bytes, 5, [&] {
    CUDA_CHECK(cudaMemcpyAsync(data, host, host_bytes, cudaMemcpyHostToDevice, stream));
  });
  b.device_to_host = best_rate(stream, host_bytes, 5, [&] {
    CUDA_CHECK(cudaMemcpyAsync(host, data, host_bytes, cudaMemcpyDeviceToHost, stream));
  });
  return b;
}

}  // namespace hearth::cuda
