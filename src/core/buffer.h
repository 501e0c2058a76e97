#pragma once
// Owning host memory, aligned to cache lines (and to huge pages when large).
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace hearth {

// Move-only. Zero-filled by the kernel (fresh anonymous pages), so nothing is touched before it is used.
class HostBuffer {
 public:
  HostBuffer() = default;
  // Throws Error when the memory cannot be had. Large buffers ask for transparent huge pages.
  explicit HostBuffer(size_t bytes);
  HostBuffer(HostBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HostBuffer& operator=(HostBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~HostBuffer();

  std::byte* data() { return static_cast<std::byte*>(data_); }
  const std::byte* data() const { return static_cast<const std::byte*>(data_); }
  template <typename T>
  T* as() {
    return static_cast<T*>(data_);
  }
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace hearth
