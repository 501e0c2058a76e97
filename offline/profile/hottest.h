#pragma once
// Which neurons, or experts, were counted most often, and what part of the counts is theirs.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace hearth::offline {

// Ids by falling count; of equal ones the lower id first.
inline std::vector<size_t> hottest_first(const std::vector<uint64_t>& counts) {
  std::vector<size_t> order(counts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return counts[a] > counts[b]; });
  return order;
}

// Share of `counts` that falls on the first n ids of `order`; 0 where nothing was counted.
inline double share_of_first(const std::vector<uint64_t>& counts, const std::vector<size_t>& order, size_t n) {
  uint64_t first = 0, all = 0;
  for (size_t k = 0; k < order.size(); ++k) {
    all += counts[order[k]];
    if (k < n) first += counts[order[k]];
  }
  return all > 0 ? static_cast<double>(first) / static_cast<double>(all) : 0;
}

}  // namespace hearth::offline
