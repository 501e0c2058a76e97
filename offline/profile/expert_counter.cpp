#include "offline/profile/expert_counter.h"

#include <algorithm>

#include "core/error.h"

namespace hearth::offline {
namespace {

constexpr int64_t kNever = -(1 << 30);  // farther back than any window

}  // namespace

ExpertCounter::ExpertCounter(int64_t n_expert, int64_t n_used)
    : n_expert_(n_expert), n_used_(n_used), last_used_(static_cast<size_t>(n_expert), kNever) {}

void ExpertCounter::begin_sequence() {
  std::ranges::fill(last_used_, kNever);
  position_ = 0;
}

std::vector<int32_t> ExpertCounter::routed(std::span<const int32_t> ids, int64_t t, int64_t T) const {
  const size_t n_named = ids.size() / static_cast<size_t>(T);
  std::vector<int32_t> experts;
  for (const int32_t id : ids.subspan(static_cast<size_t>(t) * n_named, n_named)) {
    if (id < n_expert_) experts.push_back(id);
  }
  std::ranges::sort(experts);
  const bool distinct = std::ranges::adjacent_find(experts) == experts.end();
  if (std::ssize(experts) != n_used_ || !distinct || (!experts.empty() && experts.front() < 0)) {
    fail("a router chose the experts [{}] for a token, expected {} different ones of {}", fmt::join(experts, ", "),
         n_used_, n_expert_);
  }
  return experts;
}

void ExpertCounter::add(std::span<const int32_t> ids, std::span<const int32_t> foreseen, int64_t T, bool heldout,
                        model::LayerStatistics& stats) {
  HEARTH_CHECK(stats.n_ff() == n_expert_, "{} experts, expected {}", stats.n_ff(), n_expert_);
  if (heldout) stats.active_heldout.resize(last_used_.size());
  for (int64_t t = 0; t < T; ++t) {
    const std::vector<int32_t> experts = routed(ids, t, T);
    if (heldout) {
      for (const int32_t e : experts) ++stats.active_heldout[static_cast<size_t>(e)];
      continue;
    }
    add_token(experts, stats);
    if (foreseen.empty()) continue;
    std::vector<int32_t> both;
    std::ranges::set_intersection(experts, routed(foreseen, t, T), std::back_inserter(both));
    stats.foreseen.sum += static_cast<double>(both.size()) / static_cast<double>(n_used_);
    ++stats.foreseen.tokens;
  }
}

void ExpertCounter::add_token(const std::vector<int32_t>& experts, model::LayerStatistics& stats) {
  const auto share_since = [&](int64_t first) {
    const auto n = std::ranges::count_if(
        experts, [&](int32_t e) { return last_used_[static_cast<size_t>(e)] >= first; });
    return static_cast<double>(n) / static_cast<double>(n_used_);
  };
  if (position_ >= 1) stats.previous.sum += share_since(position_ - 1), ++stats.previous.tokens;
  if (position_ >= model::kRecentTokens) {  // only where all of the recent tokens exist
    stats.recent.sum += share_since(position_ - model::kRecentTokens), ++stats.recent.tokens;
  }
  for (const int32_t e : experts) {
    ++stats.active[static_cast<size_t>(e)];
    last_used_[static_cast<size_t>(e)] = position_;
  }
  ++position_;
  for (size_t k = 0; k < stats.unions.size(); ++k) {
    const int64_t first = position_ - model::kUnionTokens[k];
    if (first < 0) continue;  // the text has not that many tokens yet
    stats.unions[k].neurons +=
        static_cast<uint64_t>(std::ranges::count_if(last_used_, [&](int64_t p) { return p >= first; }));
    ++stats.unions[k].windows;
  }
}

}  // namespace hearth::offline
