#include "model/inside_counts.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace hearth::model {

std::optional<std::string> InsideCounts::fault(std::span<const uint64_t> chosen, int64_t n_used,
                                               uint64_t tokens) const {
  const auto width = static_cast<size_t>(n_ff), each = static_cast<size_t>(n_used);
  uint64_t sum = 0;
  for (size_t e = 0; e < used.size(); ++e) {
    const auto neurons = std::span(active).subspan(e * width, width);
    const uint64_t most = std::accumulate(neurons.begin(), neurons.end(), uint64_t{0},
                                          [](uint64_t a, uint64_t b) { return std::max(a, b); });
    if (used[e] > chosen[e] || most > used[e]) {
      return fmt::format("counts {} of {} tokens with expert {}, which {} tokens chose", most, used[e], e, chosen[e]);
    }
    sum += used[e];
  }
  if (each > 0 && sum % each == 0 && sum / each <= tokens) return std::nullopt;
  return fmt::format("is of {} experts, expected {} for each of {} tokens at most", sum, each, tokens);
}

std::vector<double> InsideCounts::frequencies(size_t expert) const {
  const auto width = static_cast<size_t>(n_ff);
  std::vector<double> p(width);
  const double n = static_cast<double>(used[expert]), of = static_cast<double>(n_ff);
  if (n == 0) {
    const double all = std::accumulate(active.begin(), active.end(), 0.0);
    const double seen = of * std::accumulate(used.begin(), used.end(), 0.0);
    std::ranges::fill(p, seen > 0 ? all / seen : 0);
    return p;
  }
  for (size_t i = 0; i < width; ++i) p[i] = static_cast<double>(active[expert * width + i]) / n;
  const double mean = std::accumulate(p.begin(), p.end(), 0.0) / of;
  double variance = 0, by_chance = 0;
  for (const double x : p) variance += (x - mean) * (x - mean), by_chance += x * (1 - x) / std::max(1.0, n - 1);
  const double kept = variance > 0 && n > 1 ? std::max(0.0, 1 - by_chance / variance) : 0;
  for (double& x : p) x = mean + kept * (x - mean);
  return p;
}

}  // namespace hearth::model
