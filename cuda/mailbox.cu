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

struct PostArgs {
  const float* x;
  int64_t n;
  NeuronList list;      // ids null: none
  const float* values;  // or null
  float* request;       // the mailbox's memory, from here on
  int32_t* n_ids;
  int32_t* ids;
  float* ids_values;
  uint32_t* posted;
  Counters* counters;
};

// Copies x and the list into the mailbox, then posted = ++number, by the block that finishes last.
__global__ void __launch_bounds__(kThreads) post_kernel(const __grid_constant__ PostArgs a) {
  grid_trigger();
  grid_wait();
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x, step = gridDim.x * int64_t{kThreads};
  for (int64_t i = first; i < a.n; i += step) a.request[i] = __ldcg(a.x + i);
  const int count = a.list.ids != nullptr ? __ldcg(a.list.count) : 0;
  for (int64_t i = first; i < count; i += step) {
    a.ids[i] = __ldcg(a.list.ids + i);
    if (a.values != nullptr) a.ids_values[i] = __ldcg(a.values + i);
  }
  if (first == 0) *a.n_ids = count;
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(&a.counters->arrived, 1u) != gridDim.x - 1) return;
  a.counters->arrived = 0;
  __threadfence_system();
  store_release_system(a.posted, ++a.counters->number);
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

}  // namespace

struct CudaMailbox::Memory {
  PinnedMemory host;
  DeviceMemory counters;
};

std::unique_ptr<CudaMailbox> CudaMailbox::open(const Gpu& gpu, int64_t capacity, int64_t max_ids) {
  const CurrentDevice current(gpu.index);
  auto m = std::make_shared<Memory>();
  m->host = make_pinned(MailboxLayout(capacity, max_ids).total);
  auto* host = static_cast<std::byte*>(static_cast<void*>(m->host));
  void* counters = nullptr;
  CUDA_CHECK(cudaMalloc(&counters, sizeof(Counters)));
  m->counters = DeviceMemory(counters);
  CUDA_CHECK(cudaMemset(counters, 0, sizeof(Counters)));
  return std::unique_ptr<CudaMailbox>(new CudaMailbox(std::move(m), host, capacity, max_ids));
}

CudaMailbox::CudaMailbox(std::shared_ptr<Memory> memory, std::byte* host, int64_t capacity, int64_t max_ids)
    : Mailbox(std::shared_ptr<std::byte>(memory, host), capacity, max_ids), memory_(memory) {}

void CudaMailbox::post(const Gpu& gpu, const float* x, int64_t n, NeuronList list, const float* values) {
  HEARTH_CHECK(n <= capacity(), "{} floats in a mailbox of {}", n, capacity());
  const unsigned blocks = grid_size((n + kFloatsPerBlock - 1) / kFloatsPerBlock);
  auto* counters = static_cast<Counters*>(static_cast<void*>(memory_->counters));
  auto* posted = reinterpret_cast<uint32_t*>(&flags_->posted.value);
  launch(gpu, post_kernel, dim3(blocks), kThreads, 0,
         PostArgs{x, n, list, values, request_, n_ids_, ids_, values_, posted, counters});
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
