#include "engine/place.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "core/every_core.h"

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

DeviceBuffer copy_from_file(const model::Model& model, Device& device, std::span<const std::byte> own,
                            model::Weights& weights) {
  constexpr size_t kAlignment = 64, kPiece = size_t{8} << 20;
  HEARTH_CHECK(device.is_host());
  const bool tied = weights.output.data == weights.tok_embd.data;
  struct Piece {
    const std::byte* from;
    size_t to, bytes;  // `to`: from the beginning of the memory to come
  };
  std::vector<Piece> pieces;
  std::map<const void*, size_t> places;  // of each matrix there
  size_t size = 0;
  weights.for_each_matrix([&](const Matrix& m) {
    const auto* const data = static_cast<const std::byte*>(m.data);
    const bool row_by_row = (data == weights.tok_embd.data && !tied) || data == weights.pos_embd.data;
    const bool is_own = model.owns(m) || (data >= own.data() && data < own.data() + own.size());
    if (row_by_row || is_own || !places.emplace(data, size).second) return;
    for (size_t at = 0; at < m.bytes(); at += kPiece) {
      pieces.push_back({data + at, size + at, std::min(kPiece, m.bytes() - at)});
    }
    size += (m.bytes() + kAlignment - 1) / kAlignment * kAlignment;
  });
  DeviceBuffer memory = device.allocate(size, Purpose::weights);
  auto* const base = memory.as<std::byte>();
  on_every_core(pieces.size(), [&](size_t i) {
    const Piece& p = pieces[i];
    std::memcpy(base + p.to, p.from, p.bytes);
  });
  weights.for_each_matrix([&](Matrix& m) {
    if (const auto place = places.find(m.data); place != places.end()) m.data = base + place->second;
  });
  model.release_file();
  return memory;
}

}  // namespace hearth::engine
