#include "engine/cold_stream.h"

#include <algorithm>

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

ColdStream::ColdStream(Device& main, const model::Weights& host)
    : main_(main), slots_(*main.cold_rows()), host_(host), neurons_(host.layers.size()) {
  size_t largest = 0;
  for (size_t l = 0; l < neurons_.size(); ++l) {
    const FfnShard& shard = host.layers[l].ffn;
    if (!shard.down_t) continue;
    // Alignment makes a few neurons take more than their share, so the share is taken of many.
    const int64_t sample = std::min<int64_t>(shard.n(), 1024);
    const size_t bytes = std::max<size_t>(slots_.staged_bytes(slice_neurons(shard, 0, sample)), 1);
    neurons_[l] = std::clamp<int64_t>(static_cast<int64_t>(kSlotBytes) * sample / static_cast<int64_t>(bytes) / 8 * 8,
                                      1, shard.n());
    largest = std::max(largest, slots_.staged_bytes(slice_neurons(shard, 0, neurons_[l])));
  }
  if (largest > 0 || main.is_host()) slots_.open_staging(kSlots, largest);
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

}  // namespace hearth::engine
