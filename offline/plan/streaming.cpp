#include "offline/plan/streaming.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/ops.h"

namespace hearth::offline {
namespace {

constexpr int64_t kFewest = kFewTokens + 1;  // fewer tokens are computed where experts are
constexpr int64_t kNever = 1'000'000'000;

}  // namespace

Streaming::Streaming(const ModelShape& shape, const Frequencies& frequencies, const engine::Placement& placement,
                     const CostModel& cost) {
  const bool mixture = std::ranges::any_of(shape.layers, &LayerShape::experts);
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    const LayerShape& s = shape.layers[l];
    const engine::LayerPlacement& place = placement.layers[l];
    if (!mixture) {
      dense_bytes_ += static_cast<double>(s.neuron_bytes()) *
                      static_cast<double>(s.n_ff - static_cast<int64_t>(place.gpu_bucket.size()));
    }
    const bool gpu_routes = !place.gpu_experts.empty() || place.attention == engine::Where::gpu;
    if (!s.can_stream || !gpu_routes) continue;
    Layer layer{static_cast<double>(s.up_down_bytes), static_cast<double>(s.expert_weights), {}};
    for (int32_t id = 0; id < s.n_ff; ++id) {
      const bool hot = std::ranges::binary_search(place.gpu_experts, id);
      if (const double p = frequencies.p[l][static_cast<size_t>(id)]; !hot && p > 0) layer.p.push_back(p);
    }
    if (!layer.p.empty()) mixtures_.push_back(std::move(layer));
  }
  if (!mixture) {
    const LayerShape& l = shape.layers.front();
    tokens_ = cost.stream_tokens(static_cast<double>(l.gate_bytes) / static_cast<double>(shape.config.n_embd));
  }
  if (mixtures_.empty()) return;
  // The CPU's time grows faster with T than the link's.
  int64_t low = kFewest - 1, high = kNever;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (pays(middle, cost) ? high : low) = middle;
  }
  tokens_ = high;
}

double Streaming::Layer::chosen(int64_t T) const {
  const auto some = [T](double sum, double once) {
    return sum + (once < 1 ? -std::expm1(static_cast<double>(T) * std::log1p(-once)) : 1);
  };
  return expert_bytes * std::accumulate(p.begin(), p.end(), 0.0, some);
}

bool Streaming::pays(int64_t T, const CostModel& cost) const {
  double link = 0, cpu = 0;
  for (const Layer& l : mixtures_) {
    const double bytes = l.chosen(T), uses = static_cast<double>(T) * std::accumulate(l.p.begin(), l.p.end(), 0.0);
    link += cost.fetch_seconds + bytes / cost.pcie_bandwidth;
    cpu += std::max(cost.cpu_dense(bytes), 2 * uses * l.expert_weights / cost.cpu_flops);
  }
  return link <= cpu;
}

double Streaming::bytes(int64_t T) const {
  return std::accumulate(mixtures_.begin(), mixtures_.end(), dense_bytes_,
                         [T](double sum, const Layer& l) { return sum + l.chosen(T); });
}

}  // namespace hearth::offline
