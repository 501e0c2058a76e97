#include "engine/cold_stream.h"

#include <algorithm>

#include "core/experts.h"

namespace hearth::engine {

FfnShard slice_neurons(const FfnShard& shard, int64_t first, int64_t count) {
  FfnShard part = shard;
  const auto matrix = [&](Matrix& m) {
    if (m) m = m.slice_rows(first, count);
  };
  const auto vector = [&](Vector& v) {
    if (v) v = {v.data + first, count};
  };
  matrix(part.gate), matrix(part.up), matrix(part.down_t);
  vector(part.gate_bias), vector(part.up_bias);
  return part;
}

ColdStream::ColdStream(Device& main, const model::Weights& host, std::span<const LayerFacts> facts,
                       const ShareRates& rates)
    : main_(main), slots_(*main.cold_rows()), host_(host), rates_(rates), neurons_(host.layers.size()) {
  bool any = false;
  for (size_t l = 0; l < facts.size(); ++l) {
    if (!facts[l].streamable) continue;
    any = true;
    slot_bytes_ = std::max(slot_bytes_, facts[l].experts ? expert_bytes(l) : neuron_bytes(l));
  }
  if (any) slots_.open_staging(kSlots, slot_bytes_);
}

// Sets neurons_ of the layer; bytes of a slot for so many.
size_t ColdStream::neuron_bytes(size_t layer) {
  const FfnShard& shard = host_.layers[layer].ffn;
  // Alignment makes a few neurons take more than their share, so the share is taken of many.
  const int64_t sample = std::min<int64_t>(shard.n(), 1024);
  const size_t bytes = std::max<size_t>(slots_.staged_bytes(slice_neurons(shard, 0, sample)), 1);
  neurons_[layer] = std::clamp<int64_t>(static_cast<int64_t>(kSlotBytes) * sample / static_cast<int64_t>(bytes) / 8 * 8,
                                        1, shard.n());
  return slots_.staged_bytes(slice_neurons(shard, 0, neurons_[layer]));
}

ExpertSet ColdStream::experts(size_t layer) const {
  return {host_.layers[layer].experts, host_.layers[layer].router.shared};
}

// Of a slot: all of the CPU's experts, kSlotBytes, or the largest one.
size_t ColdStream::expert_bytes(size_t layer) const {
  const ExpertSet set = experts(layer);
  std::vector<int32_t> all;
  size_t largest = 0;
  for (int32_t id = 0; id < std::ssize(set.experts); ++id) {
    if (!set.experts[static_cast<size_t>(id)]) continue;
    all.push_back(id);
    largest = std::max(largest, slots_.staged_bytes(set, std::span(&id, 1)));
  }
  return std::max(largest, std::min(kSlotBytes, slots_.staged_bytes(set, all)));
}

void ColdStream::ffn(int64_t layer, const Input& in, int64_t T, Vector bias, float* y) {
  const FfnShard& shard = host_.layers[static_cast<size_t>(layer)].ffn;
  for (int64_t first = 0; first < shard.n(); first += neurons_[static_cast<size_t>(layer)]) {
    const int64_t count = std::min(neurons_[static_cast<size_t>(layer)], shard.n() - first);
    const FfnShard piece = slots_.stage(slot_, slice_neurons(shard, first, count));
    slots_.acquire(slot_);
    main_.ffn_dense(piece, first == 0 ? in : Input(in.act), T, first == 0 ? bias : Vector{}, y, nullptr);
    slots_.release(slot_);
    slot_ = (slot_ + 1) % kSlots;
  }
}

void ColdStream::fetch(int64_t layer, const ExpertChoice& choice, int64_t T) {
  layer_ = static_cast<size_t>(layer);
  const ExpertSet set = experts(layer_);
  std::vector<int32_t> ids(static_cast<size_t>(T * choice.n_named));
  main_.download(ids.data(), choice.ids, ids.size() * sizeof(int32_t));
  const std::vector<bool> visits = visitors(set.experts, ids, rates_);
  pieces_.clear(), staged_.clear();
  for (int32_t id = 0; id < std::ssize(visits); ++id) {
    if (!visits[static_cast<size_t>(id)]) continue;
    if (pieces_.empty()) pieces_.emplace_back();
    pieces_.back().push_back(id);
    if (pieces_.back().size() == 1 || slots_.staged_bytes(set, pieces_.back()) <= slot_bytes_) continue;
    pieces_.back().pop_back();
    pieces_.push_back({id});
  }
  for (int i = 0; i < kSlots; ++i) stage_next_experts();
}

// Pieces take slots in turn, from slot_ on.
void ColdStream::stage_next_experts() {
  const size_t i = staged_.size();
  if (i == pieces_.size()) return;
  const int slot = (slot_ + static_cast<int>(i)) % kSlots;
  staged_.push_back(slots_.stage(slot, experts(layer_), pieces_[i]));
}

void ColdStream::ffn_experts(const ExpertChoice& choice, const Input& in, int64_t T, float* y) {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const int slot = (slot_ + static_cast<int>(i)) % kSlots;
    slots_.acquire(slot);
    main_.expert_ffn()->ffn_experts(staged_[i], choice, i == 0 ? in : Input(in.act), T, y);
    slots_.release(slot);
    stage_next_experts();
  }
  slot_ = (slot_ + static_cast<int>(pieces_.size())) % kSlots;
}

}  // namespace hearth::engine
