#include "offline/plan/streaming.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/ops.h"

namespace hearth::offline {
namespace {

constexpr int64_t kFewest = kFewTokens + 1;  // fewer tokens are computed where experts are
constexpr int64_t kNever = 1'000'000'000;

}  // namespace

Streaming::Streaming(const ModelShape& shape, const Frequencies& frequencies, const engine::Placement& placement,
                     const CostModel& cost)
    : rates_(cost.share_rates()), cpu_alone_(rates_) {
  cpu_alone_.first_visit = std::numeric_limits<double>::infinity();
  cpu_alone_.cpu_byte = cost.cpu_dense(1);
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
  // What is gained grows with T.
  int64_t low = kFewest - 1, high = kNever;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (seconds(middle) < cpu_seconds(middle) ? high : low) = middle;
  }
  tokens_ = high;
}

std::vector<engine::ExpertWork> Streaming::Layer::work(int64_t T) const {
  std::vector<engine::ExpertWork> work;
  for (const double once : p) {
    const auto tokens = static_cast<double>(T);
    const double chosen = once < 1 ? -std::expm1(tokens * std::log1p(-once)) : 1;
    work.push_back({tokens * once, chosen * expert_bytes, expert_weights});
  }
  return work;
}

double Streaming::bytes(int64_t T) const {
  double sum = dense_bytes_;
  for (const Layer& l : mixtures_) {
    const std::vector<engine::ExpertWork> work = l.work(T);
    const engine::Shares shares = engine::share_out(work, rates_);
    for (size_t i = 0; i < work.size(); ++i) sum += shares.visits[i] ? work[i].bytes : 0;
  }
  return sum;
}

double Streaming::seconds(int64_t T) const {
  double sum = dense_bytes_ * rates_.link_byte;
  for (const Layer& l : mixtures_) sum += engine::share_out(l.work(T), rates_).seconds();
  return sum;
}

double Streaming::cpu_seconds(int64_t T) const {
  double sum = 0;
  for (const Layer& l : mixtures_) sum += engine::share_out(l.work(T), cpu_alone_).seconds();
  return sum;
}

}  // namespace hearth::offline
