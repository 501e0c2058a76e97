#pragma once
// Keys and values of all positions so far, f16, per layer [n_head_kv][n_ctx][head_dim].
#include <cstdint>

#include "core/device.h"
#include "model/config.h"

namespace hearth::engine {

class KvCache {
 public:
  KvCache() = default;
  KvCache(Device& device, const model::Config& c, int64_t n_ctx)
      : layer_elements_(c.n_head_kv * n_ctx * c.head_dim),
        storage_(device.allocate(bytes(c, n_ctx), Purpose::kv_cache)) {}

  f16_t* k(int64_t layer) const { return storage_.as<f16_t>() + 2 * layer * layer_elements_; }
  f16_t* v(int64_t layer) const { return k(layer) + layer_elements_; }

  static size_t bytes(const model::Config& c, int64_t n_ctx) {
    return static_cast<size_t>(2 * c.n_layer * c.n_head_kv * n_ctx * c.head_dim) * sizeof(f16_t);
  }

 private:
  int64_t layer_elements_ = 0;
  DeviceBuffer storage_;
};

}  // namespace hearth::engine
