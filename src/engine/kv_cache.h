#pragma once
// Keys and values of all positions so far, f16, per layer [n_head_kv][n_ctx][head_dim].
#include <cstdint>
#include <vector>

#include "core/device.h"
#include "model/config.h"

namespace hearth::engine {

class KvCache {
 public:
  KvCache() = default;
  // Holds the layers whose entry in `here` is true; an empty `here` means all.
  KvCache(Device& device, const model::Config& c, int64_t n_ctx, const std::vector<bool>& here = {})
      : layer_elements_(c.n_head_kv * n_ctx * c.head_dim) {
    int64_t n_here = 0;
    for (int64_t l = 0; l < c.n_layer; ++l) {
      index_.push_back(here.empty() || here[static_cast<size_t>(l)] ? n_here++ : -1);
    }
    storage_ = device.allocate(static_cast<size_t>(n_here) * layer_bytes(c, n_ctx), Purpose::kv_cache);
  }

  f16_t* k(int64_t layer) const {
    return storage_.as<f16_t>() + 2 * index_[static_cast<size_t>(layer)] * layer_elements_;
  }
  f16_t* v(int64_t layer) const { return k(layer) + layer_elements_; }

  static size_t layer_bytes(const model::Config& c, int64_t n_ctx) {
    return static_cast<size_t>(2 * c.n_head_kv * n_ctx * c.head_dim) * sizeof(f16_t);
  }
  static size_t bytes(const model::Config& c, int64_t n_ctx) {
    return static_cast<size_t>(c.n_layer) * layer_bytes(c, n_ctx);
  }

 private:
  int64_t layer_elements_ = 0;
  std::vector<int64_t> index_;  // of a layer in the storage; -1 = another device holds it
  DeviceBuffer storage_;
};

}  // namespace hearth::engine
