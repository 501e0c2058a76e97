#include "engine/place.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "core/thread_team.h"

namespace hearth::engine {

model::Weights place(model::Model& model, Device& device, bool with_predictors) {
  model::Weights w = model.weights();
  if (!with_predictors) {
    for (model::LayerWeights& layer : w.layers) layer.predictor = {};
  }
  const bool tied = model.tied_head();
  if (tied) w.output = {};
  w.for_each([&](auto& tensor) {
    if (tensor) tensor = device.adopt(tensor);
  });
  if (tied) w.output = w.tok_embd;
  if (device.is_host()) return w;
  device.synchronize();
  for (int64_t l = 0; l < model.config().n_layer; ++l) model.release_attention(l), model.release_ffn(l);
  return w;
}

namespace {

struct Piece {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
};

void copy_on_every_core(const std::vector<Piece>& pieces) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) {
      std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
    }
  };
  std::vector<std::jthread> threads;
  for (int t = 1; t < cpu_topology().physical; ++t) threads.emplace_back(work);
  work();
}

// Calls f on every matrix.
template <typename F>
void for_each_matrix(model::Weights& weights, F&& f) {
  weights.for_each([&](auto& tensor) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(tensor)>, Matrix>) f(tensor);
  });
}

}  // namespace

DeviceBuffer copy_from_file(const model::Model& model, Device& device, std::span<const std::byte> own,
                            model::Weights& weights) {
  constexpr size_t kAlignment = 64, kPiece = size_t{8} << 20;
  HEARTH_CHECK(device.is_host());
  const bool tied = weights.output.data == weights.tok_embd.data;
  std::map<const void*, size_t> places;  // of each matrix to be copied, in the memory to come
  size_t size = 0;
  for_each_matrix(weights, [&](const Matrix& m) {
    const bool is_embedding = m.data == weights.tok_embd.data || m.data == weights.pos_embd.data;
    const auto* const data = static_cast<const std::byte*>(m.data);
    const bool is_own = model.owns(m) || (data >= own.data() && data < own.data() + own.size());
    if (!m || is_own || (is_embedding && !(tied && m.data == weights.output.data))) return;
    if (places.emplace(m.data, size).second) size += (m.bytes() + kAlignment - 1) / kAlignment * kAlignment;
  });
  DeviceBuffer memory = device.allocate(size, Purpose::weights);
  std::vector<Piece> pieces;
  size_t copied = 0;  // places are taken in the same order
  for_each_matrix(weights, [&](Matrix& m) {
    const auto place = m ? places.find(m.data) : places.end();
    if (place == places.end()) return;
    const auto* const from = static_cast<const std::byte*>(m.data);
    std::byte* const to = memory.as<std::byte>() + place->second;
    m.data = to;
    if (place->second < copied) return;  // a tied head
    for (size_t at = 0; at < m.bytes(); at += kPiece) {
      pieces.push_back({to + at, from + at, std::min(kPiece, m.bytes() - at)});
    }
    copied = place->second + m.bytes();
  });
  copy_on_every_core(pieces);
  model.release_file();
  return memory;
}

}  // namespace hearth::engine
