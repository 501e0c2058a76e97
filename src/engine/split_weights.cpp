#include "engine/split_weights.h"

#include <cstring>
#include <span>

#include "core/error.h"

namespace hearth::engine {
namespace {

using model::LayerWeights;
using model::Weights;

// Takes rows of matrices and elements of biases by neuron id, into buffers of its own.
class RowPacker {
 public:
  explicit RowPacker(std::vector<HostBuffer>& storage) : storage_(storage) {}

  Matrix rows(const Matrix& m, std::span<const int32_t> ids) {
    if (!m) return {};
    const size_t row = m.row_size();
    storage_.emplace_back(ids.size() * row);
    std::byte* out = storage_.back().data();
    for (size_t k = 0; k < ids.size(); ++k) std::memcpy(out + k * row, m.row(ids[k]), row);
    return {m.type, static_cast<int64_t>(ids.size()), m.cols, out, nullptr};
  }
  Vector elements(const Vector& v, std::span<const int32_t> ids) {
    if (!v) return {};
    storage_.emplace_back(ids.size() * sizeof(float));
    float* out = storage_.back().as<float>();
    for (size_t k = 0; k < ids.size(); ++k) out[k] = v.data[ids[k]];
    return {out, static_cast<int64_t>(ids.size())};
  }
  FfnShard shard(const FfnShard& whole, std::span<const int32_t> ids) {
    FfnShard part = whole;  // activation and its parameters
    part.gate = rows(whole.gate, ids);
    part.up = rows(whole.up, ids);
    part.down_t = rows(whole.down_t, ids);
    part.gate_bias = elements(whole.gate_bias, ids);
    part.up_bias = elements(whole.up_bias, ids);
    return part;
  }

 private:
  std::vector<HostBuffer>& storage_;
};

template <typename T>
T adopt(Device& device, const T& tensor) {
  return tensor ? device.adopt(tensor) : T{};
}

FfnShard adopt_shard(Device& device, FfnShard s) {
  s.gate = adopt(device, s.gate), s.up = adopt(device, s.up);
  s.down_t = adopt(device, s.down_t), s.down = adopt(device, s.down);
  s.gate_bias = adopt(device, s.gate_bias), s.up_bias = adopt(device, s.up_bias);
  return s;
}

void adopt_attention(Device& device, const LayerWeights& from, LayerWeights& to) {
  to.wq = adopt(device, from.wq), to.wk = adopt(device, from.wk), to.wv = adopt(device, from.wv);
  to.wo = adopt(device, from.wo);
  to.bq = adopt(device, from.bq), to.bk = adopt(device, from.bk), to.bv = adopt(device, from.bv);
  to.bo = adopt(device, from.bo);
  to.q_norm = adopt(device, from.q_norm), to.k_norm = adopt(device, from.k_norm);
  to.attn_norm = {adopt(device, from.attn_norm.weight), adopt(device, from.attn_norm.bias)};
}

void adopt_ffn(Device& device, const LayerWeights& from, const FfnShard& shard, LayerWeights& to) {
  to.ffn = adopt_shard(device, shard);
  to.ffn_norm = {adopt(device, from.ffn_norm.weight), adopt(device, from.ffn_norm.bias)};
  to.ffn_down_bias = adopt(device, from.ffn_down_bias);
}

void adopt_embedding(Device& device, const Weights& from, Weights& to) {
  to.tok_embd = adopt(device, from.tok_embd);
  to.pos_embd = adopt(device, from.pos_embd);
}

void adopt_output(Device& device, const Weights& from, Weights& to) {
  const bool tied_here = from.output.data == from.tok_embd.data && to.tok_embd;
  to.output = tied_here ? to.tok_embd : adopt(device, from.output);
  to.output_norm = {adopt(device, from.output_norm.weight), adopt(device, from.output_norm.bias)};
  to.output_bias = adopt(device, from.output_bias);
}

// One layer's FFN: whole on one side from the model's own rows, or divided through packs.
void split_ffn(const LayerWeights& from, const Placement& placement, size_t layer, Device& main, Device& host,
               SplitWeights& out) {
  const LayerPlacement& place = placement.layers[layer];
  LayerWeights& to_main = out.main.layers[layer];
  LayerWeights& to_host = out.host.layers[layer];
  const int64_t n_ff = from.ffn.n();
  LayerSplit& split = out.split[layer];
  split.has_hot = !place.gpu_bucket.empty();
  split.has_cold = !place.ffn_on_gpu(n_ff);
  if (!split.has_cold) return adopt_ffn(main, from, from.ffn, to_main);
  if (!split.has_hot) return adopt_ffn(host, from, from.ffn, to_host);
  if (!from.ffn.down_t) fail("the neurons of a layer cannot be divided: its down projection is not stored transposed");
  std::vector<HostBuffer> staging;  // a GPU copies from it; a stand-in for one goes on using it
  std::vector<HostBuffer>& hot_storage = main.is_host() ? out.packs : staging;
  adopt_ffn(main, from, RowPacker(hot_storage).shard(from.ffn, place.gpu_bucket), to_main);
  main.synchronize();
  adopt_ffn(host, from, RowPacker(out.packs).shard(from.ffn, placement.cpu_rows(layer, n_ff)), to_host);
  to_host.ffn_down_bias = {};  // added once, by the main device
}

}  // namespace

SplitWeights split_weights(model::Model& model, const Placement& placement, Device& main, Device& host) {
  const Weights& w = model.weights();
  for (size_t l = 0; l < placement.layers.size(); ++l) {
    if (!placement.layers[l].gpu_gates.empty() || placement.layers[l].selection == Selection::predictor) {
      fail(
          "the plan of layer {} needs {}, which this version cannot run; make a plan with this version's `hearth plan`",
          l, placement.layers[l].gpu_gates.empty() ? "a predictor" : "gate rows apart from their neurons");
    }
  }
  SplitWeights out;
  out.embedding_on_host = placement.embedding == Where::cpu;
  out.output_on_host = placement.output == Where::cpu;
  out.main.layers.resize(w.layers.size());
  out.host.layers.resize(w.layers.size());
  out.main.inv_freq = adopt(main, w.inv_freq);
  out.host.inv_freq = adopt(host, w.inv_freq);
  adopt_embedding(out.embedding_on_host ? host : main, w, out.embedding_on_host ? out.host : out.main);
  adopt_output(out.output_on_host ? host : main, w, out.output_on_host ? out.host : out.main);
  for (size_t l = 0; l < w.layers.size(); ++l) {
    LayerSplit& split = out.split.emplace_back();
    split.attention_on_host = placement.layers[l].attention == Where::cpu;
    adopt_attention(split.attention_on_host ? host : main, w.layers[l],
                    split.attention_on_host ? out.host.layers[l] : out.main.layers[l]);
    split_ffn(w.layers[l], placement, l, main, host, out);
    if (main.is_host()) continue;  // a stand-in for a GPU uses the model's own rows
    main.synchronize();
    const auto layer = static_cast<int64_t>(l);
    if (!split.attention_on_host) model.release_attention(layer);
    if (split.has_hot) model.release_ffn(layer);  // on the device, or in packs
  }
  return out;
}

}  // namespace hearth::engine
