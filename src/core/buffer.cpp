#include "core/buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace hearth {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;

size_t mapped_bytes(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return (bytes + unit - 1) / unit * unit;
}
}  // namespace

HostBuffer::HostBuffer(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  if (bytes > (SIZE_MAX >> 1)) fail("cannot allocate {} bytes of memory: the size is not sensible", bytes);
  const size_t size = mapped_bytes(bytes);
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    fail("cannot allocate {:.1f} MiB of memory: {}", static_cast<double>(bytes) / (1 << 20), std::strerror(errno));
  }
  if (size >= kHugePage) madvise(p, size, MADV_HUGEPAGE);  // best effort: without huge pages it is only slower
  data_ = p;
}

HostBuffer::~HostBuffer() {
  if (data_ != nullptr) munmap(data_, mapped_bytes(bytes_));
}

}  // namespace hearth
