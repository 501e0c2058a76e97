#include "core/device.h"

#include "core/error.h"

namespace hearth {

const char* to_string(Purpose purpose) {
  switch (purpose) {
    case Purpose::weights:
      return "weights";
    case Purpose::kv_cache:
      return "KV cache";
    case Purpose::activations:
      return "activations";
    case Purpose::scratch:
      return "scratch";
    case Purpose::predictor:
      return "predictors";
    case Purpose::context:
      return "device context";
  }
  return "?";
}

std::unique_ptr<Mailbox> Device::open_mailbox(int64_t /*capacity*/, int64_t /*max_ids*/) {
  fail("{} cannot hand work to the CPU", name());
}
// Staging where the host's memory is the device's: nothing moves.
void Device::open_staging(int /*n_slots*/, size_t /*bytes*/) {
  HEARTH_CHECK(is_host(), "{}", name());
}
size_t Device::staged_bytes(const FfnShard& /*host*/) const {
  HEARTH_CHECK(is_host(), "{}", name());
  return 0;
}
FfnShard Device::stage(int /*slot*/, const FfnShard& host) {
  HEARTH_CHECK(is_host(), "{}", name());
  return host;
}
void Device::acquire(int /*slot*/) {
  HEARTH_CHECK(is_host(), "{}", name());
}
void Device::release(int /*slot*/) {
  HEARTH_CHECK(is_host(), "{}", name());
}
FfnShard Device::link(const FfnShard& /*host*/, std::byte* /*memory*/) {
  fail("{} cannot read neurons from host memory", name());
}
void Device::post(Mailbox& /*mailbox*/, const float* /*x*/, int64_t /*n*/) {
  HEARTH_CHECK(false, "{}", name());
}
void Device::collect(Mailbox& /*mailbox*/, float* /*x*/, int64_t /*n*/) {
  HEARTH_CHECK(false, "{}", name());
}

}  // namespace hearth
