#include "cuda/mailbox.cuh"

#include <algorithm>
#include <new>

namespace hearth::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kFloatsPerBlock = int64_t{kThreads} * 8;

// What the device remembers between hand-offs, in its own memory, so that a recorded graph goes on counting.
struct Counters {
  uint32_t number;   // of the last hand-off posted
  unsigned arrived;  // blocks of the running post that have written their part
};

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

// request[0..n) = x, then posted = ++number, by the block that finishes last.
__global__ void __launch_bounds__(kThreads)
    post_kernel(const float* x, float* request, int64_t n, Counters* c, uint32_t* posted) {
  grid_trigger();
  grid_wait();
  const int64_t begin = blockIdx.x * kFloatsPerBlock;
  const int64_t end = min(n, begin + kFloatsPerBlock);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) request[i] = x[i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(&c->arrived, 1u) != gridDim.x - 1) return;
  c->arrived = 0;
  __threadfence();
  store_release_system(posted, ++c->number);
}

// Waits until answered has reached number, then x += answer. A CPU that stays silent, or that says it failed, is not
// waited for: the flag `failed` tells the host, and x is not to be used.
__global__ void __launch_bounds__(kThreads)
    collect_kernel(float* x, const float* answer, int64_t n, const Counters* c, const uint32_t* answered,
                   uint32_t* failed, unsigned long long patience_ns) {
  grid_trigger();
  grid_wait();
  if (threadIdx.x == 0) {
    const uint32_t number = c->number;
    const unsigned long long start = nanoseconds();
    for (unsigned spins = 1; static_cast<int32_t>(load_acquire_system(answered) - number) < 0; ++spins) {
      if ((spins & 1023u) != 0) continue;
      if (load_acquire_system(failed) != 0) break;
      if (nanoseconds() - start > patience_ns) {
        store_release_system(failed, 1);
        break;
      }
    }
  }
  __syncthreads();
  const int64_t begin = blockIdx.x * kFloatsPerBlock;
  const int64_t end = min(n, begin + kFloatsPerBlock);
  // Read past the caches: the host has rewritten this memory since the last hand-off.
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) x[i] += __ldcv(answer + i);
}

size_t floats_offset() {
  return sizeof(MailboxMemory);
}
size_t floats_bytes(int64_t capacity) {
  return (static_cast<size_t>(capacity) * sizeof(float) + 255) / 256 * 256;
}

}  // namespace

struct CudaMailbox::Memory {
  PinnedMemory host;
  DeviceMemory counters;
  MailboxMemory* flags = nullptr;
  float* request = nullptr;
  float* answer = nullptr;
};

std::unique_ptr<CudaMailbox> CudaMailbox::open(const Gpu& gpu, int64_t capacity) {
  const CurrentDevice current(gpu.index);
  auto m = std::make_shared<Memory>();
  m->host = make_pinned(floats_offset() + 2 * floats_bytes(capacity));
  auto* base = static_cast<std::byte*>(static_cast<void*>(m->host));
  m->flags = new (base) MailboxMemory;
  m->request = reinterpret_cast<float*>(base + floats_offset());
  m->answer = reinterpret_cast<float*>(base + floats_offset() + floats_bytes(capacity));
  void* counters = nullptr;
  CUDA_CHECK(cudaMalloc(&counters, sizeof(Counters)));
  m->counters = DeviceMemory(counters);
  CUDA_CHECK(cudaMemset(counters, 0, sizeof(Counters)));
  return std::unique_ptr<CudaMailbox>(new CudaMailbox(std::move(m), capacity));
}

CudaMailbox::CudaMailbox(std::shared_ptr<Memory> memory, int64_t capacity)
    : Mailbox(memory->flags, memory->request, memory->answer, capacity, memory), memory_(memory) {}

void CudaMailbox::post(const Gpu& gpu, const float* x, int64_t n) {
  HEARTH_CHECK(n <= capacity(), "{} floats in a mailbox of {}", n, capacity());
  const unsigned blocks = grid_size((n + kFloatsPerBlock - 1) / kFloatsPerBlock);
  auto* counters = static_cast<Counters*>(static_cast<void*>(memory_->counters));
  launch(gpu, post_kernel, dim3(blocks), kThreads, 0, x, request_, n, counters,
         reinterpret_cast<uint32_t*>(&flags_->posted.value));
}

void CudaMailbox::collect(const Gpu& gpu, float* x, int64_t n) {
  const unsigned blocks = grid_size((n + kFloatsPerBlock - 1) / kFloatsPerBlock);
  const auto* counters = static_cast<const Counters*>(static_cast<void*>(memory_->counters));
  const auto patience = std::chrono::nanoseconds(kPatience).count();
  launch(gpu, collect_kernel, dim3(blocks), kThreads, 0, x, answer_, n, counters,
         reinterpret_cast<const uint32_t*>(&flags_->answered.value), reinterpret_cast<uint32_t*>(&flags_->failed.value),
         patience);
}

}  // namespace hearth::cuda
