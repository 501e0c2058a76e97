#include "engine/kv_cache.h"

#include "core/error.h"

namespace hearth::engine {

KvCache::KvCache(Device& device, const model::Config& c, int64_t n_pages, const std::vector<bool>& here)
    : device_(&device),
      layer_elements_(kPagePositions * c.n_cached()),
      to_v_(kPagePositions * c.n_head_kv * c.head_dim) {
  for (const bool is_here : here) index_.push_back(is_here ? n_here_++ : -1);
  storage_ = device.allocate(static_cast<size_t>(n_pages * n_here_) * layer_page_bytes(c), Purpose::kv_cache);
}

KvPages KvCache::layer(int64_t layer) const {
  const int64_t index = index_[static_cast<size_t>(layer)];
  HEARTH_CHECK(index >= 0, "layer {} has its cache on the other device", layer);
  f16_t* const k = storage_.as<f16_t>() + index * layer_elements_;
  return {k, to_v_ < layer_elements_ ? k + to_v_ : nullptr, n_here_ * layer_elements_};
}

void KvCache::copy_page(int32_t from, int32_t to) const {
  const auto elements = static_cast<size_t>(n_here_ * layer_elements_);
  if (elements == 0) return;
  f16_t* const pages = storage_.as<f16_t>();
  device_->copy(pages + static_cast<size_t>(to) * elements, pages + static_cast<size_t>(from) * elements,
                elements * sizeof(f16_t));
}

}  // namespace hearth::engine
