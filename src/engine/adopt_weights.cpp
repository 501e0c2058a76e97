#include "engine/adopt_weights.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/every_core.h"

namespace hearth::engine {
namespace {

template <typename T>
void adopt(Device& device, T& tensor) {
  if (tensor) tensor = device.adopt(tensor);
}

}  // namespace

std::vector<Expert> adopt_experts(const model::Model& model, size_t layer,
                                  FunctionRef<Expert(size_t id, const Expert& whole)> part, Device& device,
                                  std::vector<HostBuffer>& memory) {
  const std::vector<Expert>& from = model.weights().layers[layer].experts;
  const bool takes_down_t = device.expert_ffn() == nullptr || device.expert_ffn()->takes_down_t();
  std::vector<Expert> to(from.size());
  std::vector<size_t> transposed;  // nobody has their standard form
  for (size_t id = 0; id < from.size(); ++id) {
    FfnShard& f = (to[id] = part(id, from[id])).ffn;
    if (!f.down_t || takes_down_t) continue;
    if (f.n() == from[id].ffn.n()) f.down = model.stored_down(layer, id);
    if (f.down) {
      f.down_t = {};
    } else {
      transposed.push_back(id);
    }
  }
  const size_t first = memory.size();
  for (const size_t id : transposed) {
    const Matrix& down_t = to[id].ffn.down_t;
    memory.emplace_back(model::transposed_bytes(down_t, model::standard_type(down_t)));
  }
  on_every_core(transposed.size(), [&](size_t i) {
    FfnShard& f = to[transposed[i]].ffn;
    model::RequantizationError rounding;
    HostBuffer& to_here = memory[first + i];
    f.down = model::transpose(f.down_t, model::standard_type(f.down_t), {to_here.data(), to_here.bytes()}, rounding);
    f.down_t = {};
  });
  for (Expert& e : to) {
    adopt(device, e.ffn.gate), adopt(device, e.ffn.up), adopt(device, e.ffn.down), adopt(device, e.ffn.down_t);
    adopt(device, e.ffn.gate_bias), adopt(device, e.ffn.up_bias), adopt(device, e.down_bias);
  }
  return to;
}

model::Weights adopt_weights(model::Model& model, Device& device, bool with_predictors) {
  model::Weights w = model.weights();
  if (!with_predictors) {
    for (model::LayerWeights& layer : w.layers) layer.predictor = {};
  }
  const bool tied = model.tied_head();
  if (tied) w.output = {};
  for (model::LayerWeights& layer : w.layers) layer.experts.clear();
  w.for_each([&](auto& tensor) { adopt(device, tensor); });
  if (tied) w.output = w.tok_embd;
  for (size_t l = 0; l < w.layers.size(); ++l) {
    std::vector<HostBuffer> memory;
    const auto whole = [](size_t, const Expert& e) { return e; };
    w.layers[l].experts = adopt_experts(model, l, whole, device, memory);
    if (memory.empty()) continue;
    HEARTH_CHECK(!device.is_host(), "experts transposed back for a host device");
    device.synchronize();  // before the memory goes
  }
  for (model::LayerWeights& layer : w.layers) {
    if (layer.router) layer.expert_table = device.expert_ffn()->adopt_experts({layer.experts, layer.router.shared});
  }
  if (device.is_host()) return w;
  device.synchronize();
  for (int64_t l = 0; l < model.config().n_layer; ++l) model.release_attention(l), model.release_ffn(l);
  return w;
}

namespace {

// The matrices of which an operation reads single rows, or may.
std::set<const void*> read_by_rows(SingleRows rows, model::Weights& weights) {
  std::set<const void*> data;
  for (model::LayerWeights& layer : weights.layers) {
    const FfnShard& ffn = layer.ffn;
    data.insert(ffn.down_t.data);
    if (rows != SingleRows::none && ffn.down_t) data.insert(ffn.up.data);
    if (rows == SingleRows::named && ffn.down_t) data.insert(ffn.gate.data);
    data.insert({layer.latent.k_b.data, layer.latent.v_b.data});
    for (const Expert& e : layer.experts) {
      data.insert(e.ffn.down_t.data);
      if (rows != SingleRows::none && e.ffn.down_t) data.insert(e.ffn.up.data);
    }
    layer.predictor.for_each([&](const auto& tensor) { data.insert(tensor.data); });
  }
  return data;
}

}  // namespace

DeviceBuffer copy_from_file(const model::Model& model, Device& device, std::span<const std::byte> own, SingleRows rows,
                            model::Weights& weights) {
  constexpr size_t kAlignment = 64, kPiece = size_t{8} << 20;
  HEARTH_CHECK(device.is_host());
  const bool tied = weights.output.data == weights.tok_embd.data;
  const std::set<const void*> by_rows = read_by_rows(rows, weights);
  struct Place {
    size_t at;  // from the beginning of the memory to come
    bool packed;
  };
  std::map<const void*, Place> places;  // of each matrix there
  struct Piece {
    const std::byte* from;
    size_t to, bytes;
  };
  std::vector<Piece> pieces;
  size_t size = 0;
  weights.for_each_matrix([&](const Matrix& m) {
    const auto* const data = static_cast<const std::byte*>(m.data);
    const bool embeds_only = (data == weights.tok_embd.data && !tied) || data == weights.pos_embd.data;
    const bool is_own = model.owns(m) || (data >= own.data() && data < own.data() + own.size());
    const size_t packed_bytes = by_rows.contains(data) ? 0 : device.packed_bytes(m);
    if (embeds_only || is_own || !places.emplace(data, Place{size, packed_bytes > 0}).second) return;
    for (size_t at = 0; packed_bytes == 0 && at < m.bytes(); at += kPiece) {
      pieces.push_back({data + at, size + at, std::min(kPiece, m.bytes() - at)});
    }
    size += (std::max(packed_bytes, m.bytes()) + kAlignment - 1) / kAlignment * kAlignment;
  });
  DeviceBuffer memory = device.allocate(size, Purpose::weights);
  auto* const base = memory.as<std::byte>();
  on_every_core(pieces.size(), [&](size_t i) {
    const Piece& p = pieces[i];
    std::memcpy(base + p.to, p.from, p.bytes);
  });
  std::map<const void*, Matrix> packed;  // a tied head once
  weights.for_each_matrix([&](Matrix& m) {
    const auto place = places.find(m.data);
    if (place == places.end()) return;
    std::byte* const to = base + place->second.at;
    if (!place->second.packed) {
      m.data = to;
    } else if (const auto [at, first] = packed.try_emplace(m.data); first) {
      m = at->second = device.pack(m, to);
    } else {
      m = at->second;
    }
  });
  model.release_file();
  return memory;
}

}  // namespace hearth::engine
