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

Matrix Device::pack(const Matrix& /*host*/, std::byte* /*memory*/) {
  fail("{} has no layout of its own", name());
}

}  // namespace hearth
