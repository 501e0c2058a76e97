#include "serve/prefix_cache.h"

#include <algorithm>
#include <unordered_set>

namespace hearth::serve {
namespace {

// Tokens in the whole pages that two texts have in common.
int64_t common(std::span<const int32_t> a, std::span<const int32_t> b) {
  const size_t n = std::min(a.size(), b.size());
  const auto same = std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first - a.begin();
  return same / kPagePositions * kPagePositions;
}

}  // namespace

std::optional<engine::Sequence> PrefixCache::find(std::span<const int32_t> ids, const std::string& name) {
  const auto rest = ids.first(ids.size() - 1);
  auto best = kept_.end();
  int64_t longest = 0;
  for (auto k = kept_.begin(); k != kept_.end(); ++k) {
    if (const int64_t n = common(rest, k->ids); n > longest) best = k, longest = n;
  }
  if (best == kept_.end()) return std::nullopt;
  kept_.splice(kept_.begin(), kept_, best);
  engine::Sequence sequence = best->sequence.fork(name);
  sequence.truncate(longest);
  return sequence;
}

void PrefixCache::keep(std::span<const int32_t> ids, const engine::Sequence& sequence) {
  const int64_t n = sequence.n_past() / kPagePositions * kPagePositions;
  if (n == 0) return;
  const auto whole = ids.first(static_cast<size_t>(n));
  for (auto k = kept_.begin(); k != kept_.end(); ++k) {
    const int64_t same = common(whole, k->ids);
    if (same == n) return kept_.splice(kept_.begin(), kept_, k);  // it is there, or the beginning of what is there
    if (same == std::ssize(k->ids)) {                             // it goes on
      kept_.erase(k);
      break;
    }
  }
  engine::Sequence pages = sequence.fork("kept beginning of a prompt");
  pages.truncate(n);
  kept_.push_front({{whole.begin(), whole.end()}, std::move(pages)});
  count_pages();
}

bool PrefixCache::drop_oldest() {
  if (kept_.empty()) return false;
  kept_.pop_back();
  count_pages();
  return true;
}

void PrefixCache::count_pages() {
  std::unordered_set<int32_t> pages;
  for (const Kept& k : kept_) pages.insert(k.sequence.pages().begin(), k.sequence.pages().end());
  n_pages_ = std::ssize(pages);
}

}  // namespace hearth::serve
