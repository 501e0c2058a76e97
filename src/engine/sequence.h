#pragma once
// One text: its positions and its pages of the KV cache. Sequences that begin alike share pages (fork()); a page that
// several hold is copied by the engine before one of them writes to it.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/page_pool.h"

namespace hearth::engine {

class Sequence {
 public:
  // `name` is what errors call it.
  explicit Sequence(std::shared_ptr<PagePool> pool, std::string name = "text");
  ~Sequence();
  Sequence(Sequence&& other) noexcept;
  Sequence& operator=(Sequence&& other) noexcept;

  // Positions that are in the cache.
  int64_t n_past() const { return n_past_; }
  std::span<const int32_t> pages() const { return pages_; }
  const std::string& name() const { return name_; }

  // Another sequence with the same positions. Shares every page.
  Sequence fork(std::string name) const;
  // Forgets everything after the first n positions; gives back the pages that only those were in.
  void truncate(int64_t n);

 private:
  friend class PagedBatch;
  std::shared_ptr<PagePool> pool_;  // null: moved from
  PagePool::Holder holder_ = 0;
  std::string name_;
  std::vector<int32_t> pages_;
  int64_t n_past_ = 0;
};

}  // namespace hearth::engine
