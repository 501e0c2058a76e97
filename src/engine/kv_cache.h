#pragma once
// Keys and values in pages of kPagePositions positions, f16. A page holds its positions for all of a device's layers:
// [page][layer][k or v][n_head_kv][kPagePositions][head_dim]; of latent attention keys alone, whose ends are the values.
// Who holds which page is PagePool's business.
#include <cstdint>
#include <vector>

#include "core/device.h"
#include "model/config.h"

namespace hearth::engine {

class KvCache {
 public:
  KvCache() = default;
  // Holds the layers whose entry in `here` is true.
  KvCache(Device& device, const model::Config& c, int64_t n_pages, const std::vector<bool>& here);

  KvPages layer(int64_t layer) const;
  void copy_page(int32_t from, int32_t to) const;

  // Bytes of a layer in one page.
  static size_t layer_page_bytes(const model::Config& c) {
    return static_cast<size_t>(kPagePositions * c.n_cached()) * sizeof(f16_t);
  }

 private:
  Device* device_ = nullptr;
  int64_t layer_elements_ = 0;  // of a layer in a page
  int64_t to_v_ = 0;            // elements from k to v
  int64_t n_here_ = 0;
  std::vector<int64_t> index_;  // of a layer in a page; -1 = another device holds it
  DeviceBuffer storage_;
};

}  // namespace hearth::engine
