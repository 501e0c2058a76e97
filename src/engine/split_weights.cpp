#include "engine/split_weights.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "engine/cold_stream.h"

namespace hearth::engine {
namespace {

using model::LayerWeights;
using model::Weights;

using Ids = std::span<const int32_t>;

// Takes rows of matrices and elements of vectors by neuron id, into memory from `take(bytes)`.
class RowPacker {
 public:
  RowPacker(ThreadTeam& team, FunctionRef<std::byte*(size_t)> take) : team_(team), take_(take) {}

  Matrix rows(const Matrix& m, Ids ids) {
    if (!m) return {};
    const size_t row = m.row_size();
    std::byte* out = take_(ids.size() * row);
    team_.for_chunks(static_cast<int64_t>(ids.size()), 32, [&](int64_t begin, int64_t end, int) {
      for (auto k = static_cast<size_t>(begin); k < static_cast<size_t>(end); ++k) {
        std::memcpy(out + k * row, m.row(ids[k]), row);
      }
    });
    return {m.type, static_cast<int64_t>(ids.size()), m.cols, out, nullptr};
  }
  Vector elements(const Vector& v, Ids ids) {
    if (!v) return {};
    auto* out = reinterpret_cast<float*>(take_(ids.size() * sizeof(float)));
    for (size_t k = 0; k < ids.size(); ++k) out[k] = v.data[ids[k]];
    return {out, static_cast<int64_t>(ids.size())};
  }
  // Gate rows of `gates`, up and down rows of `whole`, which `gates` begins with.
  FfnShard shard(const FfnShard& all, Ids gates, Ids whole) {
    FfnShard part = all;  // activation and its parameters
    part.gate = rows(all.gate, gates);
    part.gate_bias = elements(all.gate_bias, gates);
    part.up = rows(all.up, whole);
    part.down_t = rows(all.down_t, whole);
    part.up_bias = elements(all.up_bias, whole);
    return part;
  }
  Predictor predictor(const Predictor& p, Ids ids) {
    Predictor part = p;
    part.fc2 = rows(p.fc2, ids);
    part.threshold = elements(p.threshold, ids);
    if (p.signs != nullptr) {
      const auto words = static_cast<size_t>((p.n_signs + 31) / 32);
      auto* out = reinterpret_cast<uint32_t*>(take_(ids.size() * words * sizeof(uint32_t)));
      for (size_t k = 0; k < ids.size(); ++k) {
        std::copy_n(p.signs + static_cast<size_t>(ids[k]) * words, words, out + k * words);
      }
      part.signs = out;
    }
    return part;
  }

 private:
  ThreadTeam& team_;
  FunctionRef<std::byte*(size_t)> take_;
};

template <typename T>
T adopt(Device& device, const T& tensor) {
  return tensor ? device.adopt(tensor) : T{};
}

FfnShard adopt_shard(Device& device, FfnShard s) {
  if (s.down_t.rows == 0) s.down_t = {};
  if (s.up.rows == 0) s.up = {};
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
  // A shard of lone gate rows: its down projection has no row, and still a shape.
  if (shard.down_t && shard.down_t.rows == 0)
    to.ffn.down_t = {shard.down_t.type, 0, shard.down_t.cols, to.ffn.gate.data, nullptr};
  if (shard.up && shard.up.rows == 0) to.ffn.up = {shard.up.type, 0, shard.up.cols, to.ffn.gate.data, nullptr};
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

// Whether a layer's predictor can be evaluated on the input of the layer before, with nothing else handed over in
// between: both layers' neurons are predicted on the main device, for the CPU too.
bool can_hint(const LayerSplit& before, const LayerSplit& split) {
  const auto predicts_for_cpu = [](const LayerSplit& s) {
    return s.has_cold && s.selection == Selection::predictor && s.predictor_on_main;
  };
  return predicts_for_cpu(before) && predicts_for_cpu(split) && !split.rests && !split.attention_on_host;
}

// Divides one layer after the other.
class Splitter {
 public:
  Splitter(const Weights& weights, const Placement& placement, Device& main, Device& host, ThreadTeam& team)
      : weights_(weights), placement_(placement), main_(main), host_(host), team_(team) {}

  // Host memory that the CPU's rows of all layers will take.
  size_t arena_bytes() const {
    size_t sum = 0;
    for (size_t l = 0; l < weights_.layers.size(); ++l) {
      const FfnShard& f = weights_.layers[l].ffn;
      const auto n = static_cast<size_t>(f.n()) - placement_.layers[l].gpu_bucket.size();
      if (n == 0 || !f.down_t) continue;
      for (const Matrix* m : {&f.gate, &f.up, &f.down_t}) {
        if (*m) sum += HostArena::rounded(n * m->row_size());
      }
      for (const Vector* v : {&f.gate_bias, &f.up_bias}) {
        if (*v) sum += HostArena::rounded(n * sizeof(float));
      }
      const auto linked = static_cast<int64_t>(placement_.layers[l].gpu_linked.size());
      sum += HostArena::rounded(main_.link_bytes(slice_neurons(f, 0, linked)));
    }
    return sum;
  }

  void ffn(size_t layer, SplitWeights& out) {
    const LayerWeights& from = weights_.layers[layer];
    const LayerPlacement& place = placement_.layers[layer];
    LayerWeights& to_main = out.main.layers[layer];
    LayerWeights& to_host = out.host.layers[layer];
    LayerSplit& split = out.split[layer];
    split.has_hot = !place.gpu_bucket.empty();
    split.has_cold = !place.ffn_on_gpu(from.ffn.n());
    split.selection = place.selection;
    split.n_first = static_cast<int64_t>(place.gpu_bucket.size());
    split.n_lone_gates = static_cast<int64_t>(place.gpu_gates.size());
    std::vector<HostBuffer> staging;  // a GPU copies from it; a stand-in for one goes on using it
    const auto stage = [&](size_t bytes) {
      return (main_.is_host() ? out.packs : staging).emplace_back(std::max<size_t>(bytes, 64)).data();
    };
    const auto keep = [&](size_t bytes) { return out.arena.take(bytes); };
    if (place.selection == Selection::predictor) predictor(layer, RowPacker(team_, stage), out);
    if (!split.has_cold) {
      adopt_ffn(main_, from, from.ffn, to_main);
    } else if (!from.ffn.down_t && split.has_hot) {
      fail("the neurons of a layer cannot be divided: its down projection is not stored transposed");
    } else if (!from.ffn.down_t) {
      adopt_ffn(host_, from, from.ffn, to_host);
    } else {
      divide(layer, RowPacker(team_, stage), RowPacker(team_, keep), out);
    }
    main_.synchronize();  // before the staging goes
  }

 private:
  void divide(size_t layer, RowPacker staging, RowPacker arena, SplitWeights& out) {
    const LayerWeights& from = weights_.layers[layer];
    const LayerPlacement& place = placement_.layers[layer];
    LayerSplit& split = out.split[layer];
    LayerWeights& to_main = out.main.layers[layer];
    LayerWeights& to_host = out.host.layers[layer];
    const std::vector<int32_t> cold = placement_.cpu_rows(layer, from.ffn.n());
    adopt_ffn(host_, from, arena.shard(from.ffn, cold, cold), to_host);
    link(static_cast<int64_t>(place.gpu_linked.size()), to_host.ffn, split, out.arena);
    split.rests = split.has_hot && split.linked.n() == to_host.ffn.n();
    if (split.has_hot || split.n_lone_gates > 0) {
      std::vector<int32_t> gates = place.gpu_bucket;
      gates.insert(gates.end(), place.gpu_gates.begin(), place.gpu_gates.end());
      adopt_ffn(main_, from, staging.shard(from.ffn, gates, place.gpu_bucket), to_main);
      if (split.has_hot) to_host.ffn_down_bias = {};  // added once, by the main device
    } else {  // a predictor there may read the normed input, of this layer or in the next
      to_main.ffn_norm = {adopt(main_, from.ffn_norm.weight), adopt(main_, from.ffn_norm.bias)};
      to_main.ffn_down_bias = adopt(main_, from.ffn_down_bias);  // of prompts that stream the CPU's rows
    }
  }

  // The first n of the CPU's neurons are the main device's to compute, where it can.
  void link(int64_t n, const FfnShard& cold, LayerSplit& split, HostArena& arena) {
    if (n == 0) return;
    const FfnShard linked = slice_neurons(cold, 0, n);
    if (!main_.can_link(linked)) {
      if (!warned_) {
        log::warn("{} cannot compute neurons from host memory with rows of this size; the CPU computes them",
                  main_.name());
      }
      warned_ = true;
      return;
    }
    const size_t bytes = main_.link_bytes(linked);
    split.linked = main_.link(linked, bytes > 0 ? arena.take(bytes) : nullptr);
  }

  void predictor(size_t layer, RowPacker staging, SplitWeights& out) {
    const model::LayerPredictor& from = weights_.layers[layer].predictor;
    LayerSplit& split = out.split[layer];
    if (!from.weights) {
      fail(
          "the plan uses a predictor in layer {}, and there is none; make one with `hearth predictor fit`, or plan "
          "again",
          layer);
    }
    split.predictor_on_main = placement_.layers[layer].predictor == Where::gpu;
    if (from.input == model::PredictorInput::previous_ffn_input) {
      const bool seen = layer > 0 && (split.predictor_on_main ? !out.split[layer - 1].whole_on_host()
                                                              : out.split[layer - 1].has_cold);
      if (!seen) {
        fail(
            "the predictor of layer {} reads the input of the layer before, which is on the other device; use "
            "--sparsity exact, or a predictor with --input ffn_input",
            layer);
      }
    }
    model::LayerPredictor to = from;
    const std::vector<int32_t>& hot = placement_.layers[layer].gpu_bucket;
    if (!hot.empty() && split.has_cold) {  // otherwise the order of the file is right
      std::vector<int32_t> order = hot;
      const std::vector<int32_t> cold = placement_.cpu_rows(layer, from.weights.n());
      order.insert(order.end(), cold.begin(), cold.end());
      to.weights = staging.predictor(from.weights, order);
    }
    Device& device = split.predictor_on_main ? main_ : host_;
    to.for_each([&](auto& tensor) { tensor = adopt(device, tensor); });
    (split.predictor_on_main ? out.main : out.host).layers[layer].predictor = to;
  }

  const Weights& weights_;
  const Placement& placement_;
  Device& main_;
  Device& host_;
  ThreadTeam& team_;
  bool warned_ = false;
};

}  // namespace

HostArena::HostArena(Device& main, size_t bytes) : main_(&main), memory_(bytes) {
  if (bytes > 0) main.pin(memory_.data(), bytes);
}

HostArena& HostArena::operator=(HostArena&& other) noexcept {
  std::swap(main_, other.main_);
  std::swap(memory_, other.memory_);
  std::swap(used_, other.used_);
  return *this;
}

HostArena::~HostArena() {
  if (memory_.bytes() > 0) main_->unpin(memory_.data());
}

std::byte* HostArena::take(size_t bytes) {
  HEARTH_CHECK(used_ + rounded(bytes) <= memory_.bytes(), "{} bytes of {} are taken, {} more were asked for", used_,
               memory_.bytes(), bytes);
  std::byte* const data = memory_.data() + used_;
  used_ += rounded(bytes);
  return data;
}

SplitWeights split_weights(model::Model& model, const Placement& placement, Device& main, Device& host,
                           ThreadTeam& team) {
  const Weights& w = model.weights();
  SplitWeights out;
  out.embedding_on_host = placement.embedding == Where::cpu;
  out.output_on_host = placement.output == Where::cpu;
  out.main.layers.resize(w.layers.size());
  out.host.layers.resize(w.layers.size());
  out.main.inv_freq = adopt(main, w.inv_freq);
  out.host.inv_freq = adopt(host, w.inv_freq);
  adopt_embedding(out.embedding_on_host ? host : main, w, out.embedding_on_host ? out.host : out.main);
  adopt_output(out.output_on_host ? host : main, w, out.output_on_host ? out.host : out.main);
  Splitter splitter(w, placement, main, host, team);
  out.arena = HostArena(main, splitter.arena_bytes());
  for (size_t l = 0; l < w.layers.size(); ++l) {
    LayerSplit& split = out.split.emplace_back();
    split.attention_on_host = placement.layers[l].attention == Where::cpu;
    adopt_attention(split.attention_on_host ? host : main, w.layers[l],
                    split.attention_on_host ? out.host.layers[l] : out.main.layers[l]);
    splitter.ffn(l, out);
    if (main.is_host()) continue;  // a stand-in for a GPU uses the model's own rows
    main.synchronize();
    const auto layer = static_cast<int64_t>(l);
    if (!split.attention_on_host) model.release_attention(layer);
    if (w.layers[l].ffn.down_t) model.release_ffn(layer);  // on the device, or in the arena
  }
  for (size_t l = 1; l < out.split.size(); ++l) {
    out.split[l].hinted = placement.layers[l].look_ahead && can_hint(out.split[l - 1], out.split[l]);
  }
  return out;
}

}  // namespace hearth::engine
