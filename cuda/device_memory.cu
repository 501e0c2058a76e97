// The CUDA device's memory: its own, weights, host memory that it reads, and scratch.
#include <algorithm>
#include <cstring>

#include "cuda/device.cuh"

namespace hearth::cuda {

// How long blocks of a kernel wait for each other: far longer than any kernel keeps multiprocessors from them.
constexpr unsigned long long kBlockPatienceNs = 10'000'000'000;

void* CudaDevice::allocate_bytes(size_t bytes, Purpose purpose) {
  void* data = heap_->allocate(bytes, purpose);
  fill_zero(data, bytes);
  return data;
}
void CudaDevice::release_bytes(void* data, size_t bytes, Purpose purpose) {
  finish_hints();
  cudaStreamSynchronize(stream_);
  heap_->release(data, bytes, purpose);
}

void CudaDevice::upload(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  left_ = {};
  if (bytes > kStagingBytes) {
    if (!uploader_) uploader_.emplace();
    return uploader_->copy(device, host, bytes, stream_);
  }
  // Through a ring of page-locked memory: the caller may reuse its own at once, and nothing waits until the ring is
  // full.
  const size_t size = (bytes + 63) / 64 * 64;
  if (staging_at_ + size > kStagingBytes) {
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    staging_at_ = 0;
  }
  std::byte* slot = static_cast<std::byte*>(static_cast<void*>(staging_)) + staging_at_;
  std::memcpy(slot, host, bytes);
  CUDA_CHECK(cudaMemcpyAsync(device, slot, bytes, cudaMemcpyHostToDevice, stream_));
  staging_at_ += size;
}

void CudaDevice::download(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return synchronize();
  finish_hints();
  auto* buffer = static_cast<std::byte*>(static_cast<void*>(staging_)) + kStagingBytes;  // behind the ring
  for (size_t at = 0; at < bytes; at += kStagingBytes) {
    const size_t n = std::min(kStagingBytes, bytes - at);
    CUDA_CHECK(cudaMemcpyAsync(buffer, static_cast<const std::byte*>(device) + at, n, cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::memcpy(static_cast<std::byte*>(host) + at, buffer, n);
  }
  staging_at_ = 0;  // nothing is on its way any more
  check_blocks();
}

void CudaDevice::copy(void* to, const void* from, size_t bytes) {
  left_ = {};
  if (bytes > 0) CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
}

void CudaDevice::fill_zero(void* device, size_t bytes) {
  left_ = {};
  if (bytes > 0) CUDA_CHECK(cudaMemsetAsync(device, 0, bytes, stream_));
}
void CudaDevice::synchronize() {
  finish_hints();
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  check_blocks();
}

void CudaDevice::check_blocks() const {
  if (static_cast<const volatile uint32_t*>(static_cast<void*>(gave_up_))[0] == 0) return;
  fail("blocks of a kernel have waited {} s for others that did not run; does another program hold the GPU?",
       kBlockPatienceNs / 1'000'000'000);
}

Matrix CudaDevice::adopt(const Matrix& host) {
  if (!host) return host;
  const DTypeTraits& t = traits(host.type);
  HEARTH_CHECK(host.layout == Layout::rows && host.cols % t.block_size == 0, "{} columns of type {}", host.cols, t.name);
  Matrix m = host;
  void* const data = weights_->allocate(cuda::adopted_bytes(host.type, host.rows, host.cols));
  m.data = data;
  if (!t.quantized()) {
    upload(data, host.data, host.bytes());
  } else {
    m.layout = Layout::planes;
    if (!uploader_) uploader_.emplace();
    uploader_->copy_packed(host, data, stream_);
  }
  return m;
}

Vector CudaDevice::adopt(const Vector& host) {
  if (!host) return host;
  const size_t bytes = static_cast<size_t>(host.n) * sizeof(float);
  void* data = weights_->allocate(bytes);
  upload(data, host.data, bytes);
  return {static_cast<const float*>(data), host.n};
}

namespace {

// Where this device sees pinned host memory.
template <typename T>
T* seen_by_device(T* host) {
  if (host == nullptr) return nullptr;
  cudaPointerAttributes at{};
  CUDA_CHECK(cudaPointerGetAttributes(&at, host));
  if (at.devicePointer == nullptr)
    fail("the GPU cannot read the host memory that neurons were placed in; use --link-share 0");
  return static_cast<T*>(at.devicePointer);
}

}  // namespace

size_t CudaDevice::adopted_bytes(const Matrix& host) const {
  return host ? cuda::adopted_bytes(host.type, host.rows, host.cols) : 0;
}

// --- rows of host memory ---

void CudaDevice::pin(void* host, size_t bytes) {
  CUDA_CHECK(cudaHostRegister(host, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}
void CudaDevice::unpin(void* host) {
  cudaHostUnregister(host);
}

bool CudaDevice::can_link(const FfnShard& host) const {
  return host.gate && host.down_t && ffn_list_fits(gpu_, host, true);
}

size_t CudaDevice::link_bytes(const FfnShard& host) const {
  size_t bytes = 0;
  for (const Matrix* m : {&host.gate, &host.up, &host.down_t}) {
    if (*m && is_quantized(m->type)) bytes += adopted_bytes(*m);
  }
  return bytes;
}

FfnShard CudaDevice::link(const FfnShard& host, std::byte* memory) {
  FfnShard s = host;
  for (Matrix* m : {&s.gate, &s.up, &s.down_t}) {
    if (!*m || !is_quantized(m->type)) {
      m->data = seen_by_device(m->data);
      continue;
    }
    if (!uploader_) uploader_.emplace();
    uploader_->pack(*m, 0, m->rows, memory);
    m->data = seen_by_device(memory), m->layout = Layout::planes;
    memory += adopted_bytes(*m);
  }
  for (Vector* v : {&s.gate_bias, &s.up_bias}) v->data = seen_by_device(v->data);
  return s;
}

void CudaDevice::open_staging(int n_slots, size_t bytes) {
  HEARTH_CHECK(!staging_slots_, "open_staging() is called once");
  staging_memory_ = allocate(static_cast<size_t>(n_slots) * bytes, Purpose::scratch);
  staging_slots_.emplace(gpu_, staging_memory_.as<void>(), n_slots, bytes);
}

void CudaDevice::reserve(const Limits& l) {
  HEARTH_CHECK(storage_.bytes() == 0, "reserve() is called once");
  storage_ = allocate(scratch_.place(gpu_, l, nullptr), Purpose::scratch);
  scratch_.place(gpu_, l, storage_.as<std::byte>());
  scratch_.exchange.patience = {static_cast<uint32_t*>(static_cast<void*>(gave_up_)), kBlockPatienceNs};
  if (l.max_tokens > kFewTokens) {
    gemm_->set_scratch(scratch_.gemm_workspace, scratch_.gemm_input, scratch_.gemm_slab);
  }
  limits_ = l;
}

}  // namespace hearth::cuda
