#include "offline/tune/expert_gates.h"

#include <algorithm>
#include <array>
#include <span>

#include "core/error.h"

namespace hearth::offline {

ExpertGates::ExpertGates(Device& device, const model::Config& config, bool quantized)
    : device_(device),
      n_embd_(config.n_embd),
      n_(config.experts.routing.n_used * config.experts.n_ff + config.experts.n_ff_shared),
      quantized_(quantized) {}

void ExpertGates::reserve(const Limits& limits) {
  const auto floats = [&](int64_t n) {
    return device_.allocate(static_cast<size_t>(limits.max_tokens * n) * sizeof(float), Purpose::scratch);
  };
  in_ = floats(n_embd_), gate_ = floats(limits.n_ff_expert), up_ = floats(limits.n_ff_expert);
  if (!quantized_) return;
  in_q8_ = device_.allocate(static_cast<size_t>(limits.max_tokens) * device_.q8_bytes(n_embd_), Purpose::scratch);
}

void ExpertGates::evaluate(const ExpertSet& set, const ExpertChoice& choice, Act in, int64_t T, bool with_up) {
  const auto named = static_cast<size_t>(choice.n_named), tokens = static_cast<size_t>(T);
  ids.resize(tokens * named), weights.resize(ids.size());
  device_.download(ids.data(), choice.ids, ids.size() * sizeof(int32_t));
  device_.download(weights.data(), choice.weights, weights.size() * sizeof(float));
  rows_.resize(tokens * static_cast<size_t>(n_embd_));
  device_.download(rows_.data(), in.x, rows_.size() * sizeof(float));
  offsets.clear();
  for (int64_t slot = 0; slot < choice.n_named; ++slot) offsets.push_back(slot * set.experts[0].ffn.n());
  gate.resize(tokens * static_cast<size_t>(n_)), up.resize(with_up ? gate.size() : 0);
  std::vector<std::vector<Place>> places(set.experts.size());
  for (int64_t i = 0; i < T * choice.n_named; ++i) {
    places[static_cast<size_t>(ids[static_cast<size_t>(i)])].push_back({i / choice.n_named, i % choice.n_named});
  }
  for (size_t e = 0; e < places.size(); ++e) {
    if (!places[e].empty()) evaluate_expert(set.experts[e].ffn, places[e], with_up);
  }
}

void ExpertGates::evaluate_expert(const FfnShard& shard, const std::vector<Place>& places, bool with_up) {
  const int64_t T = std::ssize(places), n = shard.n();
  gathered_.clear();
  for (const Place& p : places) {
    const float* const row = rows_.data() + p.token * n_embd_;
    gathered_.insert(gathered_.end(), row, row + n_embd_);
  }
  device_.upload(in_.as<float>(), gathered_.data(), gathered_.size() * sizeof(float));
  const Act in{in_.as<float>(), quantized_ ? in_q8_.as<std::byte>() : nullptr};
  device_.quantize(in, T, n_embd_);
  const bool both = with_up && shard.up;
  const std::array parts = {MatmulPart{.w = shard.gate, .bias = shard.gate_bias, .y = gate_.as<float>()},
                            MatmulPart{.w = shard.up, .bias = shard.up_bias, .y = up_.as<float>()}};
  device_.matmul(std::span(parts).first(both ? 2 : 1), in, T);
  product_.resize(static_cast<size_t>(T * n));
  const auto bring = [&](const DeviceBuffer& from, std::vector<float>& to) {
    device_.download(product_.data(), from.as<float>(), product_.size() * sizeof(float));
    for (int64_t k = 0; k < T; ++k) {
      const Place& p = places[static_cast<size_t>(k)];
      const int64_t at = p.token * n_ + offsets[static_cast<size_t>(p.slot)];
      HEARTH_CHECK(at + n <= (p.token + 1) * n_, "a token's experts have more than {} neurons", n_);
      std::copy_n(product_.begin() + k * n, n, to.begin() + at);
    }
  };
  bring(gate_, gate);
  if (both) bring(up_, up);
}

}  // namespace hearth::offline
