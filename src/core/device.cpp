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
void Device::post(Mailbox& /*mailbox*/, const float* /*x*/, int64_t /*n*/) {
  HEARTH_CHECK(false, "{}", name());
}
void Device::collect(Mailbox& /*mailbox*/, float* /*x*/, int64_t /*n*/) {
  HEARTH_CHECK(false, "{}", name());
}

}  // namespace hearth
