#include "engine/page_pool.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace hearth::engine {

PagePool::PagePool(int64_t n_pages) : uses_(static_cast<size_t>(n_pages), 0) {
  for (int64_t page = n_pages; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

PagePool::Holder PagePool::add_holder(std::string name) {
  holders_.emplace(next_holder_, Held{std::move(name)});
  return next_holder_++;
}

void PagePool::remove_holder(Holder holder) {
  HEARTH_CHECK(holders_.at(holder).n_pages == 0, "a holder of {} pages goes", holders_.at(holder).n_pages);
  holders_.erase(holder);
}

int32_t PagePool::take(Holder holder) {
  HEARTH_CHECK(!free_.empty(), "no page is free");
  const int32_t page = free_.back();
  free_.pop_back();
  share(holder, page);
  return page;
}

void PagePool::share(Holder holder, int32_t page) {
  ++uses_[static_cast<size_t>(page)];
  ++holders_.at(holder).n_pages;
}

void PagePool::release(Holder holder, int32_t page) {
  int32_t& uses = uses_[static_cast<size_t>(page)];
  HEARTH_CHECK(uses > 0, "page {} is released and nobody holds it", page);
  if (--uses == 0) free_.push_back(page);
  --holders_.at(holder).n_pages;
}

void PagePool::require(int64_t wanted) const {
  if (wanted <= n_free()) return;
  constexpr size_t kNamed = 4;  // the largest holders
  std::vector<const Held*> held;
  for (const auto& [id, h] : holders_) {
    if (h.n_pages > 0) held.push_back(&h);
  }
  std::stable_sort(held.begin(), held.end(), [](const Held* a, const Held* b) { return a->n_pages > b->n_pages; });
  std::string who;
  for (size_t i = 0; i < std::min(held.size(), kNamed); ++i) {
    who += fmt::format("{}'{}' {}", i == 0 ? "" : ", ", held[i]->name, held[i]->n_pages);
  }
  if (held.size() > kNamed) who += fmt::format(", {} others fewer", held.size() - kNamed);
  fail(
      "the KV cache is full: {} of {} pages of {} positions are free and {} are needed; pages held: {}; end a "
      "sequence, "
      "or use a larger -c",
      n_free(), n_pages(), kPagePositions, wanted, who.empty() ? "none" : who);
}

}  // namespace hearth::engine
