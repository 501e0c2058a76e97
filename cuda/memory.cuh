#pragma once
// GPU memory by purpose, exact to the byte that the driver hands out, and the way weights get there.
#include <array>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "cuda/handles.cuh"

namespace hearth::cuda {

// Bytes of GPU memory that are free, asked of the driver's management library, which needs no context (a context takes
// hundreds of megabytes). Where that library is absent: asked of CUDA, which makes one.
struct GpuMemory {
  size_t free = 0, total = 0;
};
GpuMemory query_memory(int gpu);

// Who uses how much.
class Account {
 public:
  void add(Purpose purpose, size_t bytes) { bytes_[static_cast<size_t>(purpose)] += bytes; }
  void subtract(Purpose purpose, size_t bytes) { bytes_[static_cast<size_t>(purpose)] -= bytes; }
  std::vector<MemoryUse> uses() const;
  size_t total() const;

 private:
  std::array<size_t, 6> bytes_{};
};

// "GPU 0 has no room for 12.3 GiB of weights: ..." from what was asked and what is free.
[[noreturn]] void fail_out_of_memory(int gpu, size_t bytes, Purpose purpose);

// cudaMalloc, accounted as the driver rounds it.
class Heap {
 public:
  Heap(int gpu, Account& account) : gpu_(gpu), account_(account) {}
  void* allocate(size_t bytes, Purpose purpose);
  void release(void* data, size_t bytes, Purpose purpose);
  static size_t rounded(size_t bytes);

 private:
  int gpu_;
  Account& account_;
};

// Weights, one after the other without gaps: a range of addresses as large as the GPU's memory, to which physical
// memory is mapped as it fills. Freed as a whole.
class WeightArena {
 public:
  WeightArena(int gpu, Account& account);
  ~WeightArena();
  WeightArena(const WeightArena&) = delete;
  WeightArena& operator=(const WeightArena&) = delete;
  void* allocate(size_t bytes);  // aligned to kAlignment; contents undefined

 private:
  void grow(size_t bytes);
  struct Driver;

  int gpu_;
  Account& account_;
  std::unique_ptr<Driver> driver_;
  size_t granularity_ = 0;
  size_t reserved_ = 0, mapped_ = 0, used_ = 0;
  unsigned long long base_ = 0;
  std::vector<std::pair<unsigned long long, size_t>> pieces_;  // physical memory: handle, bytes
};

// Moves host memory to the GPU through page-locked buffers: several threads fill one while the others are in flight.
class Uploader {
 public:
  Uploader();
  ~Uploader();
  // The host memory may be reused on return; work enqueued on `stream` afterwards sees the data.
  void copy(void* device, const void* host, size_t bytes, cudaStream_t stream);
  // Rows of a quantised type in the file's layout, packed on the way (cuda/packing.h).
  void copy_packed(const Matrix& host, void* device, cudaStream_t stream);
  // The same of rows [first, first + n) within host memory.
  void pack(const Matrix& host, int64_t first, int64_t n, std::byte* to);

 private:
  static constexpr size_t kBufferBytes = size_t{8} << 20;
  static constexpr int kBuffers = 4;
  struct Buffer {
    PinnedMemory memory;
    Event free;
  };
  std::byte* next_buffer();  // waits until the oldest one is free
  void send(void* device, const std::byte* from, size_t bytes);
  void finish_buffer();
  void wait_for(cudaStream_t stream);     // what it was told before may still read the target
  void order_after(cudaStream_t stream);  // makes it wait for the copies

  Stream stream_;
  std::array<Buffer, kBuffers> buffers_;
  Event done_;
  int current_ = 0;
  std::unique_ptr<ThreadTeam> team_;
};

}  // namespace hearth::cuda
