#include "cuda/mailbox.cuh"

#include <algorithm>
#include <new>

namespace hearth::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int64_t kFloatsPerBlock = int64_t{kThreads} * 8;

// The device remembers this between hand-offs, in its own memory.
struct Counters {
  uint32_t number;   // of the last hand-off posted
  uint32_t seen;     // of the last answer that a kernel of many blocks has waited for
  unsigned arrived;  // blocks of the running launch that are done with their part
};

struct PostArgs {
  const float* x;
  int64_t n;
  PostTarget target;
};

// Copies x into the mailbox; the block that finishes last raises the flag.
__global__ void __launch_bounds__(kThreads) post_kernel(const __grid_constant__ PostArgs a) {
  grid_trigger();
  grid_wait();
  const uint32_t number = threadIdx.x == 0 ? next_number(a.target) : 0;
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x, step = gridDim.x * int64_t{kThreads};
#pragma unroll 8
  for (int64_t i = first; i < a.n; i += step) a.target.x[i] = __ldcg(a.x + i);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    __threadfence_system();
    if (atomicAdd(a.target.arrived, 1u) != gridDim.x - 1) return;
    *a.target.arrived = 0;
    __threadfence_system();
  }
  raise_posted(a.target, number);
}

// Waits for the answer, then x += answer.
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const __grid_constant__ AnswerSource source, float* x, int64_t n) {
  grid_trigger();
  grid_wait();
  if (threadIdx.x == 0) wait_answered_by_one(source);
  __syncthreads();
  const int64_t begin = blockIdx.x * kFloatsPerBlock;
  const int64_t end = min(n, begin + kFloatsPerBlock);
#pragma unroll 8
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) x[i] = __ldcg(x + i) + __ldcv(source.answer + i);
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
  CUDA_CHECK(cudaStreamSynchronize(nullptr));  // where it runs, which the devices' streams do not wait for
  return std::unique_ptr<CudaMailbox>(new CudaMailbox(std::move(m), host, capacity, max_ids));
}

CudaMailbox::CudaMailbox(std::shared_ptr<Memory> memory, std::byte* host, int64_t capacity, int64_t max_ids)
    : Mailbox(std::shared_ptr<std::byte>(memory, host), capacity, max_ids), memory_(memory) {}

PostTarget CudaMailbox::post_target(int64_t t, int64_t n, int64_t n_ids) {
  HEARTH_CHECK((t + 1) * n <= capacity(), "{} floats in a mailbox of {}", (t + 1) * n, capacity());
  HEARTH_CHECK(n_ids <= max_ids(), "{} neurons in a mailbox of {}", n_ids, max_ids());
  HEARTH_CHECK(t >= 0 && t < kFewTokens, "token {}", t);
  auto* counters = static_cast<Counters*>(static_cast<void*>(memory_->counters));
  auto* marks = reinterpret_cast<uint64_t*>(marks_) + t * MailboxLayout::mark_words(max_ids());
  return {request_ + t * n, marks, reinterpret_cast<uint64_t*>(&flags_->posted.value), &counters->number,
          &counters->arrived};
}

PostTarget CudaMailbox::hint_target(int64_t n_ids) {
  PostTarget target = post_target(0, 0, n_ids);
  target.x = nullptr, target.posted = nullptr;
  target.marks = reinterpret_cast<uint64_t*>(hints_);
  return target;
}

AnswerSource CudaMailbox::answer_source() const {
  auto* counters = static_cast<Counters*>(static_cast<void*>(memory_->counters));
  const auto patience_ns = std::chrono::nanoseconds(patience()).count();
  return {answer_,
          reinterpret_cast<const uint64_t*>(words_),
          reinterpret_cast<const uint32_t*>(&flags_->answered.value),
          &counters->number,
          &counters->seen,
          {reinterpret_cast<uint32_t*>(&flags_->failed.value), static_cast<unsigned long long>(patience_ns)}};
}

void CudaMailbox::post(const Gpu& gpu, const float* x, int64_t n) {
  const unsigned blocks = grid_size((n + kFloatsPerBlock - 1) / kFloatsPerBlock);
  launch(gpu, post_kernel, dim3(blocks), kThreads, 0, PostArgs{x, n, post_target(0, n, 0)});
}

void CudaMailbox::collect(const Gpu& gpu, float* x, int64_t n) {
  const unsigned blocks = grid_size((n + kFloatsPerBlock - 1) / kFloatsPerBlock);
  launch(gpu, collect_kernel, dim3(blocks), kThreads, 0, answer_source(), x, n);
}

}  // namespace hearth::cuda
