#pragma once
// Owners of what the CUDA runtime hands out. Move-only, released on destruction; every call's code is checked and
// named.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdlib>
#include <utility>

#include "core/error.h"
#include "cuda/cublas.cuh"

namespace hearth::cuda {

inline void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) {
    fail("{} failed: {} ({})", call, cudaGetErrorString(code), cudaGetErrorName(code));
  }
}
inline void check(cublasStatus_t code, const char* call) {
  if (code != CUBLAS_STATUS_SUCCESS) fail("{} failed: {}", call, cublas().status_string(code));
}

// Throws Error that names the call and the reason.
#define CUDA_CHECK(call) ::hearth::cuda::check((call), #call)

// A handle with a destroying function; T{} means "none".
template <typename T, auto Destroy>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T value) : value_(value) {}
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, T{})) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Handle() {
    if (value_ != T{}) Destroy(value_);  // a failure here has nobody to tell: the context is going away
  }
  operator T() const { return value_; }

 private:
  T value_{};
};

using Stream = Handle<cudaStream_t, cudaStreamDestroy>;
using Event = Handle<cudaEvent_t, cudaEventDestroy>;
using GraphExec = Handle<cudaGraphExec_t, cudaGraphExecDestroy>;
using Graph = Handle<cudaGraph_t, cudaGraphDestroy>;
inline void destroy_cublas(cublasHandle_t handle) {
  cublas().destroy(handle);
}
using Cublas = Handle<cublasHandle_t, destroy_cublas>;
using DeviceMemory = Handle<void*, cudaFree>;
using PinnedMemory = Handle<void*, cudaFreeHost>;

// priority: the lower, the sooner blocks begin where there is not room for all.
inline Stream make_stream(int priority = 0) {
  cudaStream_t s = nullptr;
  CUDA_CHECK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, priority));
  return Stream(s);
}
inline Event make_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t e = nullptr;
  CUDA_CHECK(cudaEventCreateWithFlags(&e, flags));
  return Event(e);
}
// Without a workspace, which whoever has the handle sets: cuBLAS's own would be memory (64 MiB on an H200) that nobody
// has planned.
inline Cublas make_cublas(cudaStream_t stream) {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0", 0);
  cublasHandle_t h = nullptr;
  CUDA_CHECK(cublas().create(&h));
  Cublas owner(h);
  CUDA_CHECK(cublas().set_stream(h, stream));
  return owner;
}
// Page-locked host memory, also visible to the device at the same address.
inline PinnedMemory make_pinned(size_t bytes) {
  void* p = nullptr;
  CUDA_CHECK(cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  return PinnedMemory(p);
}

// Makes `gpu` current on this thread for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int gpu) {
    CUDA_CHECK(cudaGetDevice(&previous_));
    if (previous_ != gpu) CUDA_CHECK(cudaSetDevice(gpu));
  }
  ~CurrentDevice() { cudaSetDevice(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace hearth::cuda
