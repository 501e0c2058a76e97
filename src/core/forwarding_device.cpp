#include "core/forwarding_device.h"

#include "core/error.h"

namespace hearth {

void* ForwardingDevice::allocate_bytes(size_t bytes, Purpose purpose) {
  DeviceBuffer buffer = inner_.allocate(bytes, purpose);
  void* data = buffer.as<void>();
  if (data != nullptr) buffers_.emplace(data, std::move(buffer));
  return data;
}

void ForwardingDevice::release_bytes(void* data, size_t /*bytes*/, Purpose /*purpose*/) {
  if (data != nullptr) HEARTH_CHECK(buffers_.erase(data) == 1);
}

}  // namespace hearth
