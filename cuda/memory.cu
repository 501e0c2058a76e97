#include "cuda/memory.cuh"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>

#include "cuda/layout.h"

namespace hearth::cuda {
namespace {

// The few entry points of libnvidia-ml that tell free memory without a context.
class Nvml {
 public:
  static const Nvml& get() {
    static const Nvml nvml;
    return nvml;
  }
  bool memory(int gpu, GpuMemory* out) const {
    char bus_id[32];
    if (by_bus_id_ == nullptr || cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, gpu) != cudaSuccess) return false;
    void* device = nullptr;
    struct {
      unsigned long long total, free, used;
    } info{};
    if (by_bus_id_(bus_id, &device) != 0 || memory_info_(device, &info) != 0) return false;
    *out = {static_cast<size_t>(info.free), static_cast<size_t>(info.total)};
    return true;
  }

 private:
  Nvml() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);  // stays loaded: the process uses it to its end
    if (library == nullptr) return;
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto by_bus_id = reinterpret_cast<ByBusId>(dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    memory_info_ = reinterpret_cast<MemoryInfo>(dlsym(library, "nvmlDeviceGetMemoryInfo"));
    if (init != nullptr && by_bus_id != nullptr && memory_info_ != nullptr && init() == 0) by_bus_id_ = by_bus_id;
  }
  using ByBusId = int (*)(const char*, void**);
  using MemoryInfo = int (*)(void*, void*);
  ByBusId by_bus_id_ = nullptr;
  MemoryInfo memory_info_ = nullptr;
};

double gib(size_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(size_t{1} << 30);
}

template <typename F>
F driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    fail("the NVIDIA driver has no {}; a driver for CUDA 12 or later is needed", name);
  }
  return reinterpret_cast<F>(function);
}

void check_driver(CUresult code, const char* call) {
  if (code != CUDA_SUCCESS) fail("{} failed with code {}", call, static_cast<int>(code));
}

}  // namespace

GpuMemory query_memory(int gpu) {
  GpuMemory m;
  if (Nvml::get().memory(gpu, &m)) return m;
  const CurrentDevice current(gpu);
  CUDA_CHECK(cudaMemGetInfo(&m.free, &m.total));
  return m;
}

std::vector<MemoryUse> Account::uses() const {
  std::vector<MemoryUse> uses;
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (bytes_[i] > 0) uses.push_back({static_cast<Purpose>(i), bytes_[i]});
  }
  return uses;
}
size_t Account::total() const {
  return std::accumulate(bytes_.begin(), bytes_.end(), size_t{0});
}

void fail_out_of_memory(int gpu, size_t bytes, Purpose purpose) {
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  fail(
      "GPU {} has no room for {:.2f} GiB of {}: {:.2f} of {:.2f} GiB are free; use a smaller model or context, or keep "
      "more of it on the CPU",
      gpu, gib(bytes), to_string(purpose), gib(free), gib(total));
}

// --- Heap ---

size_t Heap::rounded(size_t bytes) {
  // cudaMalloc takes whole 2 MiB pages for large pieces; small ones share a page.
  constexpr size_t kPage = size_t{2} << 20, kSmall = 512;
  const size_t unit = bytes >= kPage / 2 ? kPage : kSmall;
  return (bytes + unit - 1) / unit * unit;
}

void* Heap::allocate(size_t bytes, Purpose purpose) {
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  const cudaError_t code = cudaMalloc(&data, bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the context is as it was
    fail_out_of_memory(gpu_, bytes, purpose);
  }
  check(code, "cudaMalloc");
  account_.add(purpose, rounded(bytes));
  return data;
}
void Heap::release(void* data, size_t bytes, Purpose purpose) {
  if (data == nullptr) return;
  cudaFree(data);
  account_.subtract(purpose, rounded(bytes));
}

// --- WeightArena ---

// Looked up at run time: the program must start on machines without a driver.
struct WeightArena::Driver {
#define HEARTH_DRIVER(name) decltype(&::name) name = driver_function<decltype(&::name)>(#name)
  HEARTH_DRIVER(cuMemGetAllocationGranularity);
  HEARTH_DRIVER(cuMemAddressReserve);
  HEARTH_DRIVER(cuMemAddressFree);
  HEARTH_DRIVER(cuMemCreate);
  HEARTH_DRIVER(cuMemRelease);
  HEARTH_DRIVER(cuMemMap);
  HEARTH_DRIVER(cuMemUnmap);
  HEARTH_DRIVER(cuMemSetAccess);
#undef HEARTH_DRIVER
  CUmemAllocationProp properties{};
};

WeightArena::WeightArena(int gpu, Account& account)
    : gpu_(gpu), account_(account), driver_(std::make_unique<Driver>()) {
  driver_->properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  driver_->properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  driver_->properties.location.id = gpu;
  check_driver(
      driver_->cuMemGetAllocationGranularity(&granularity_, &driver_->properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      "cuMemGetAllocationGranularity");
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  reserved_ = (total + granularity_ - 1) / granularity_ * granularity_;
  CUdeviceptr base = 0;
  check_driver(driver_->cuMemAddressReserve(&base, reserved_, 0, 0, 0), "cuMemAddressReserve");
  base_ = base;
}

WeightArena::~WeightArena() {
  if (mapped_ > 0) driver_->cuMemUnmap(base_, mapped_);
  for (const auto& piece : pieces_) driver_->cuMemRelease(piece.first);
  driver_->cuMemAddressFree(base_, reserved_);
}

void WeightArena::grow(size_t bytes) {
  constexpr size_t kStep = size_t{16} << 20;  // mapping costs time; this much may stay unused at the end
  const size_t unit = std::max(granularity_, kStep);
  const size_t size = (bytes + unit - 1) / unit * unit;
  if (mapped_ + size > reserved_) fail_out_of_memory(gpu_, bytes, Purpose::weights);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult code = driver_->cuMemCreate(&handle, size, &driver_->properties, 0);
  if (code == CUDA_ERROR_OUT_OF_MEMORY) fail_out_of_memory(gpu_, bytes, Purpose::weights);
  check_driver(code, "cuMemCreate");
  check_driver(driver_->cuMemMap(base_ + mapped_, size, 0, handle, 0), "cuMemMap");
  pieces_.emplace_back(handle, size);
  CUmemAccessDesc access{};
  access.location = driver_->properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(driver_->cuMemSetAccess(base_ + mapped_, size, &access, 1), "cuMemSetAccess");
  mapped_ += size;
  account_.add(Purpose::weights, size);
}

void* WeightArena::allocate(size_t bytes) {
  const size_t size = aligned(bytes);
  if (used_ + size > mapped_) grow(used_ + size - mapped_);
  void* data = reinterpret_cast<void*>(base_ + used_);
  used_ += size;
  return data;
}

// --- Uploader ---

Uploader::Uploader() : stream_(make_stream()), done_(make_event()) {
  for (Buffer& b : buffers_) b = {make_pinned(kBufferBytes), make_event()};
  team_ = std::make_unique<ThreadTeam>(std::min(8, cpu_topology().physical));
}
Uploader::~Uploader() {
  cudaStreamSynchronize(stream_);
}

std::byte* Uploader::next_buffer() {
  CUDA_CHECK(cudaEventSynchronize(buffers_[current_].free));
  return static_cast<std::byte*>(static_cast<void*>(buffers_[current_].memory));
}
void Uploader::send(void* device, const std::byte* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(device, from, bytes, cudaMemcpyHostToDevice, stream_));
}
void Uploader::finish_buffer() {
  CUDA_CHECK(cudaEventRecord(buffers_[current_].free, stream_));
  current_ = (current_ + 1) % kBuffers;
}
void Uploader::wait_for(cudaStream_t stream) {
  CUDA_CHECK(cudaEventRecord(done_, stream));
  CUDA_CHECK(cudaStreamWaitEvent(stream_, done_, 0));
}
void Uploader::order_after(cudaStream_t stream) {
  CUDA_CHECK(cudaEventRecord(done_, stream_));
  CUDA_CHECK(cudaStreamWaitEvent(stream, done_, 0));
}

void Uploader::copy(void* device, const void* host, size_t bytes, cudaStream_t stream) {
  wait_for(stream);
  const auto* from = static_cast<const std::byte*>(host);
  for (size_t at = 0; at < bytes; at += kBufferBytes) {
    const size_t n = std::min(kBufferBytes, bytes - at);
    std::byte* buffer = next_buffer();
    team_->for_chunks(static_cast<int64_t>(n), 256 << 10, [&](int64_t begin, int64_t end, int) {
      std::memcpy(buffer + begin, from + at + begin, static_cast<size_t>(end - begin));
    });
    send(static_cast<std::byte*>(device) + at, buffer, n);
    finish_buffer();
  }
  order_after(stream);
}

void Uploader::copy_packed(const Matrix& w, void* device, cudaStream_t stream) {
  wait_for(stream);
  const int64_t stride = device_row_bytes(w.type, w.cols);
  const int64_t per_buffer = static_cast<int64_t>(kBufferBytes) / stride;
  HEARTH_CHECK(per_buffer > 0, "rows of {} bytes", stride);
  for (int64_t first = 0; first < w.rows; first += per_buffer) {
    const int64_t count = std::min(per_buffer, w.rows - first);
    std::byte* buffer = next_buffer();
    pack(w, first, count, buffer);
    send(static_cast<std::byte*>(device) + first * stride, buffer, static_cast<size_t>(count * stride));
    finish_buffer();
  }
  order_after(stream);
}

void Uploader::pack(const Matrix& w, int64_t first, int64_t n, std::byte* to) {
  const int64_t stride = device_row_bytes(w.type, w.cols);
  team_->for_chunks(n, std::max<int64_t>(1, (256 << 10) / w.cols), [&](int64_t begin, int64_t end, int) {
    pack_rows(w.type, w.cols, w.data, first + begin, end - begin, to + begin * stride);
  });
}

}  // namespace hearth::cuda
