#pragma once
// Which pages of the KV cache are free, shared or held, and by whom. Bookkeeping alone: the memory is KvCache's.
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/ops.h"

namespace hearth::engine {

// Pages that n positions take.
constexpr int64_t pages_of(int64_t n_positions) {
  return (n_positions + kPagePositions - 1) / kPagePositions;
}

class PagePool {
 public:
  using Holder = int64_t;

  explicit PagePool(int64_t n_pages);

  int64_t n_pages() const { return static_cast<int64_t>(uses_.size()); }
  int64_t n_free() const { return static_cast<int64_t>(free_.size()); }
  // By how many holders a page is held; 0: it is free.
  int32_t uses(int32_t page) const { return uses_[static_cast<size_t>(page)]; }

  Holder add_holder(std::string name);
  void remove_holder(Holder holder);  // which holds no page any more
  int32_t take(Holder holder);        // there must be a free one
  void share(Holder holder, int32_t page);
  void release(Holder holder, int32_t page);

  // Throws Error that says who holds what when fewer than `wanted` pages are free.
  void require(int64_t wanted) const;

 private:
  struct Held {
    std::string name;
    int64_t n_pages = 0;
  };
  std::vector<int32_t> uses_, free_;
  std::map<Holder, Held> holders_;
  Holder next_holder_ = 0;
};

}  // namespace hearth::engine
