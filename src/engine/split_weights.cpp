#include "engine/split_weights.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "engine/adopt_weights.h"
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
    return {m.type, static_cast<int64_t>(ids.size()), m.cols, out};
  }
  Vector elements(const Vector& v, Ids ids) {
    if (!v) return {};
    auto* out = reinterpret_cast<float*>(take_(ids.size() * sizeof(float)));
    for (size_t k = 0; k < ids.size(); ++k) out[k] = v.data[ids[k]];
    return {out, static_cast<int64_t>(ids.size())};
  }
  Expert expert(const Expert& all, Ids ids) { return {shard(all.ffn, ids), all.down_bias}; }
  FfnShard shard(const FfnShard& all, Ids ids) {
    FfnShard part = all;  // activation and its parameters
    part.gate = rows(all.gate, ids);
    part.gate_bias = elements(all.gate_bias, ids);
    part.up = rows(all.up, ids);
    part.down_t = rows(all.down_t, ids);
    part.up_bias = elements(all.up_bias, ids);
    return part;
  }
  Predictor predictor(const Predictor& p, Ids ids) {
    Predictor part = p;
    part.fc2 = rows(p.fc2, ids);
    part.threshold = elements(p.threshold, ids);
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

model::Norm adopt(Device& device, const model::Norm& norm) {
  return {adopt(device, norm.weight), adopt(device, norm.bias)};
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
  to.sinks = adopt(device, from.sinks);
  to.latent.q_a = adopt(device, from.latent.q_a), to.latent.q_a_norm = adopt(device, from.latent.q_a_norm);
  to.latent.k_rotated = adopt(device, from.latent.k_rotated), to.latent.norm = adopt(device, from.latent.norm);
  to.latent.k_b = adopt(device, from.latent.k_b), to.latent.v_b = adopt(device, from.latent.v_b);
  to.attn_norm = adopt(device, from.attn_norm);
}

void adopt_ffn(Device& device, const LayerWeights& from, const FfnShard& shard, LayerWeights& to) {
  to.ffn = adopt_shard(device, shard);
  to.ffn_norm = adopt(device, from.ffn_norm);
  to.ffn_down_bias = adopt(device, from.ffn_down_bias);
}

void adopt_router(Device& device, const Router& from, Router& to) {
  to = from;
  to.w = adopt(device, from.w), to.shared_gate = adopt(device, from.shared_gate);
  to.bias = adopt(device, from.bias), to.correction = adopt(device, from.correction);
}

void adopt_embedding(Device& device, const Weights& from, Weights& to) {
  to.tok_embd = adopt(device, from.tok_embd);
  to.pos_embd = adopt(device, from.pos_embd);
}

void adopt_output(Device& device, const Weights& from, Weights& to) {
  const bool tied_here = from.output.data == from.tok_embd.data && to.tok_embd;
  to.output = tied_here ? to.tok_embd : adopt(device, from.output);
  to.output_norm = adopt(device, from.output_norm);
  to.output_bias = adopt(device, from.output_bias);
}

// Whether a layer's predictor can be evaluated on the input of the layer before, with nothing else handed over in
// between: both layers' neurons are predicted on the main device, for the CPU too.
bool can_hint(const LayerFacts& before, const LayerFacts& layer) {
  const auto predicts_for_cpu = [](const LayerFacts& f) {
    return f.cold && f.selection == Selection::predictor && f.main_predicts;
  };
  return predicts_for_cpu(before) && predicts_for_cpu(layer) && !layer.all_linked && !layer.host_attends;
}

// Whether the CPU can name a layer's experts on the input of the layer before: both hand-offs bring their input.
bool can_foresee(const LayerFacts& before, const LayerFacts& layer) {
  return before.brings_experts() && layer.brings_experts() && !layer.early_router && !layer.host_attends;
}

MainRows expert_rows(const std::vector<Expert>& experts) {
  MainRows rows;
  double bytes = 0;
  for (const Expert& e : experts) rows.n_hot += e.ffn.n(), bytes += static_cast<double>(e.bytes());
  if (rows.n_hot > 0) rows.expert_neuron_bytes = bytes / static_cast<double>(rows.n_hot);
  return rows;
}

// The ids below n that are not among `ids`, which ascend.
std::vector<int32_t> others(Ids ids, int64_t n) {
  std::vector<int32_t> out;
  for (int32_t id = 0; id < n; ++id) {
    if (!std::ranges::binary_search(ids, id)) out.push_back(id);
  }
  return out;
}

// Divides one layer after the other.
class Splitter {
 public:
  Splitter(const model::Model& model, const Placement& placement, Device& main, Device& host, ThreadTeam& team)
      : model_(model), weights_(model.weights()), placement_(placement), main_(main), host_(host), team_(team) {}

  // Host memory that the CPU's rows of all layers will take.
  size_t arena_bytes() const {
    size_t sum = 0;
    for (size_t l = 0; l < weights_.layers.size(); ++l) {
      for (size_t id = 0; id < weights_.layers[l].experts.size(); ++id) sum += cut_bytes(l, id);
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
      sum += HostArena::rounded(main_.cold_rows()->link_bytes(slice_neurons(f, 0, linked)));
    }
    return sum;
  }

  void ffn(size_t layer, SplitWeights& out) {
    const LayerWeights& from = weights_.layers[layer];
    const LayerPlacement& place = placement_.layers[layer];
    LayerWeights& to_main = out.main.layers[layer];
    LayerWeights& to_host = out.host.layers[layer];
    const LayerFacts& facts = out.facts[layer];
    out.rows[layer].n_hot = std::ssize(place.gpu_bucket);
    std::vector<HostBuffer> staging;  // a GPU copies from it; a stand-in for one goes on using it
    const auto stage = [&](size_t bytes) {
      return (main_.is_host() ? out.packs : staging).emplace_back(std::max<size_t>(bytes, 64)).data();
    };
    const auto keep = [&](size_t bytes) { return out.arena.take(bytes); };
    if (from.router) return experts(layer, out);
    if (place.selection == Selection::predictor) predictor(layer, RowPacker(team_, stage), out);
    if (!facts.cold) {
      adopt_ffn(main_, from, from.ffn, to_main);
    } else if (!from.ffn.down_t && facts.hot) {
      fail("the neurons of a layer cannot be divided: its down projection is not stored transposed");
    } else if (!from.ffn.down_t) {
      adopt_ffn(host_, from, from.ffn, to_host);
    } else {
      divide(layer, RowPacker(team_, stage), RowPacker(team_, keep), out);
    }
    main_.synchronize();  // before the staging goes
  }

 private:
  // Host memory for the CPU's part of an expert that is cut.
  size_t cut_bytes(size_t layer, size_t id) const {
    const FfnShard& f = weights_.layers[layer].experts[id].ffn;
    const int64_t n = f.n() - placement_.layers[layer].n_on_gpu(id, f.n());
    if (n == 0 || n == f.n()) return 0;
    size_t sum = HostArena::rounded(gate_bytes({f.gate.type, n, f.gate.cols, nullptr}));
    for (const Matrix* m : {&f.up, &f.down_t}) {
      if (*m) sum += HostArena::rounded(static_cast<size_t>(n) * m->row_size());
    }
    for (const Vector* v : {&f.gate_bias, &f.up_bias}) {
      if (*v) sum += HostArena::rounded(static_cast<size_t>(n) * sizeof(float));
    }
    return sum;
  }
  size_t gate_bytes(const Matrix& gate) const { return std::max(gate.bytes(), host_.packed_bytes(gate)); }

  // What the CPU has of an expert that is cut: up and down, which are read row by row, in the arena, the gate in `staging`.
  Expert cold_part(const Expert& whole, Ids hot, HostArena& arena, std::vector<HostBuffer>& staging) {
    const std::vector<int32_t> cold = others(hot, whole.ffn.n());
    if (cold.empty()) return {};
    const auto keep = [&](size_t bytes) { return arena.take(bytes); };
    const auto stage = [&](size_t bytes) { return staging.emplace_back(bytes).data(); };
    Expert rest = whole;
    rest.ffn.gate = {};
    Expert part = RowPacker(team_, keep).expert(rest, cold);
    part.ffn.gate = RowPacker(team_, stage).rows(whole.ffn.gate, cold);
    part.down_bias = {};  // added once, by the main device
    return part;
  }
  // Gates are read whole: into the arena, packed where the CPU has a form for that.
  Matrix keep_gate(const Matrix& gate, HostArena& arena) {
    std::byte* const memory = arena.take(gate_bytes(gate));
    if (host_.packed_bytes(gate) > 0) return host_.pack(gate, memory);
    std::memcpy(memory, gate.data, gate.bytes());
    return {gate.type, gate.rows, gate.cols, memory};
  }

  // Whole experts, and parts of some.
  void experts(size_t layer, SplitWeights& out) {
    const LayerWeights& from = weights_.layers[layer];
    const LayerPlacement& place = placement_.layers[layer];
    LayerWeights& to_main = out.main.layers[layer];
    LayerWeights& to_host = out.host.layers[layer];
    std::vector<HostBuffer> staging, gates;
    std::vector<HostBuffer>& copied = main_.is_host() ? out.packs : staging;
    const auto stage = [&](size_t bytes) { return copied.emplace_back(std::max<size_t>(bytes, 64)).data(); };
    const auto hot = [&](size_t id, const Expert& whole) {
      const auto neurons = place.neurons_on_gpu(id);
      if (!neurons) return Expert{};
      return neurons->empty() ? whole : RowPacker(team_, stage).expert(whole, *neurons);
    };
    const auto cold = [&](size_t id, const Expert& whole) {
      const auto neurons = place.neurons_on_gpu(id);
      if (!neurons) return whole;
      return neurons->empty() ? Expert{} : cold_part(whole, *neurons, out.arena, gates);
    };
    to_main.experts = adopt_experts(model_, layer, hot, main_, copied);
    to_host.experts = adopt_experts(model_, layer, cold, host_, out.packs);
    for (size_t id = 0; id < from.experts.size(); ++id) {
      if (cut_bytes(layer, id) == 0) continue;
      Matrix& gate = to_host.experts[id].ffn.gate;
      gate = keep_gate(gate, out.arena);
    }
    out.rows[layer] = expert_rows(to_main.experts);
    if (!place.gpu_experts.empty()) {
      to_main.expert_table = main_.expert_ffn()->adopt_experts({to_main.experts, from.router.shared});
    }
    const bool routes = out.facts[layer].main_routes;
    to_host.router.shared = from.router.shared;  // whoever routes
    if (routes) adopt_router(main_, from.router, to_main.router);
    if (!routes || out.facts[layer].foreseen) adopt_router(host_, from.router, to_host.router);
    to_main.ffn_norm = adopt(main_, from.ffn_norm), to_host.ffn_norm = adopt(host_, from.ffn_norm);
    main_.synchronize();
  }

  void divide(size_t layer, RowPacker staging, RowPacker arena, SplitWeights& out) {
    const LayerWeights& from = weights_.layers[layer];
    const LayerPlacement& place = placement_.layers[layer];
    LayerWeights& to_main = out.main.layers[layer];
    LayerWeights& to_host = out.host.layers[layer];
    const std::vector<int32_t> cold = placement_.cpu_rows(layer, from.ffn.n());
    adopt_ffn(host_, from, arena.shard(from.ffn, cold), to_host);
    if (out.facts[layer].hot) {
      link(layer, std::ssize(place.gpu_linked), to_host.ffn, out);
      adopt_ffn(main_, from, staging.shard(from.ffn, place.gpu_bucket), to_main);
      to_host.ffn_down_bias = {};  // added once, by the main device
    } else {
      // A predictor there may read the normed input, of this layer or in the next.
      to_main.ffn_norm = adopt(main_, from.ffn_norm);
      to_main.ffn_down_bias = adopt(main_, from.ffn_down_bias);  // of prompts that stream the CPU's rows
    }
  }

  // The first n of the CPU's neurons are the main device's to compute, where it can.
  void link(size_t layer, int64_t n, const FfnShard& cold, SplitWeights& out) {
    if (n == 0) return;
    const FfnShard linked = slice_neurons(cold, 0, n);
    if (!main_.cold_rows()->can_link(linked)) {
      if (!warned_) {
        log::warn("{} cannot compute neurons from host memory with rows of this size; the CPU computes them",
                  main_.name());
      }
      warned_ = true;
      out.facts[layer].linked = out.facts[layer].all_linked = false;
      return;
    }
    const size_t bytes = main_.cold_rows()->link_bytes(linked);
    out.rows[layer].linked = main_.cold_rows()->link(linked, bytes > 0 ? out.arena.take(bytes) : nullptr);
  }

  void predictor(size_t layer, RowPacker staging, SplitWeights& out) {
    const model::LayerPredictor& from = weights_.layers[layer].predictor;
    const LayerFacts& facts = out.facts[layer];
    if (!from.weights) {
      fail(
          "the plan uses a predictor in layer {}, and there is none; make one with `hearth predictor fit`, or plan "
          "again",
          layer);
    }
    model::LayerPredictor to = from;
    const std::vector<int32_t>& hot = placement_.layers[layer].gpu_bucket;
    if (!hot.empty() && facts.cold) {  // otherwise the order of the file is right
      std::vector<int32_t> order = hot;
      const std::vector<int32_t> cold = placement_.cpu_rows(layer, from.weights.n());
      order.insert(order.end(), cold.begin(), cold.end());
      to.weights = staging.predictor(from.weights, order);
    }
    Device& device = facts.main_predicts ? main_ : host_;
    to.for_each([&](auto& tensor) { tensor = adopt(device, tensor); });
    (facts.main_predicts ? out.main : out.host).layers[layer].predictor = to;
  }

  const model::Model& model_;
  const Weights& weights_;
  const Placement& placement_;
  Device& main_;
  Device& host_;
  ThreadTeam& team_;
  bool warned_ = false;
};

}  // namespace

HostArena::HostArena(Device& main, size_t bytes) : memory_(bytes) {
  if (bytes > 0) lock_ = std::make_unique<PageLock>(*main.cold_rows(), memory_.data(), bytes);
}

HostArena& HostArena::operator=(HostArena&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(lock_, other.lock_);
  std::swap(used_, other.used_);
  return *this;
}

std::byte* HostArena::take(size_t bytes) {
  HEARTH_CHECK(used_ + rounded(bytes) <= memory_.bytes(), "{} bytes of {} are taken, {} more were asked for", used_,
               memory_.bytes(), bytes);
  std::byte* const data = memory_.data() + used_;
  used_ += rounded(bytes);
  return data;
}

std::vector<LayerFacts> layer_facts(const model::Model& model, const Placement& placement, bool main_can_route) {
  std::vector<LayerFacts> all;
  for (size_t l = 0; l < placement.layers.size(); ++l) {
    const LayerPlacement& place = placement.layers[l];
    const model::LayerWeights& w = model.weights().layers[l];
    LayerFacts& f = all.emplace_back();
    f.parallel = model.config().parallel_block, f.post_norms = model.config().post_norms;
    f.host_attends = place.attention == Where::cpu;
    if (w.router) {
      f.experts = true;
      f.hot = !place.gpu_experts.empty();
      for (size_t id = 0; id < w.experts.size(); ++id) {
        const int64_t n = w.experts[id].ffn.n(), on_gpu = place.n_on_gpu(id, n);
        f.cold |= on_gpu < n;
        if (on_gpu == 0 || on_gpu == n || w.experts[id].ffn.down_t) continue;
        fail(
            "the plan cuts expert {} of layer {}, whose down projection is not stored transposed; run with "
            "--transpose-down, or plan again",
            id, l);
      }
      // Of the CPU's experts only the active neurons, where it can tell them.
      const bool skips = f.cold && model.config().ffn.sparse() && w.some_ffn().down_t;
      f.selection = skips ? Selection::gate : Selection::all;
      f.early_router = model.config().early_router;
      f.main_routes = main_can_route && (f.hot || !f.host_attends);
      // GPUs read no transposed down projections (ExpertFfn::takes_down_t()).
      f.streamable =
          f.cold && f.main_routes && w.some_ffn().down && gpu_computes(ExpertSet(w.experts, w.router.shared));
      if (f.hot && !main_can_route) {
        fail("the plan has experts of layer {} on the GPU, which cannot compute experts yet; plan again", l);
      }
      f.foreseen = l > 0 && can_foresee(all[l - 1], f);
      continue;
    }
    f.hot = !place.gpu_bucket.empty(), f.cold = !place.ffn_on_gpu(w.ffn.n());
    f.selection = place.selection;
    f.main_predicts = place.predictor == Where::gpu;
    f.reads_residual = w.predictor.input == model::PredictorInput::residual;
    f.linked = f.hot && !place.gpu_linked.empty();
    f.all_linked = f.linked && std::ssize(place.gpu_linked) + std::ssize(place.gpu_bucket) == w.ffn.n();
    f.streamable = f.cold && w.ffn.down_t;
    f.hinted = l > 0 && place.look_ahead && can_hint(all[l - 1], f);
  }
  return all;
}

SplitWeights split_weights(model::Model& model, const Placement& placement, Device& main, Device& host,
                           ThreadTeam& team) {
  const Weights& w = model.weights();
  SplitWeights out;
  out.embedding_on_host = placement.embedding == Where::cpu;
  out.output_on_host = placement.output == Where::cpu;
  out.main.layers.resize(w.layers.size());
  out.host.layers.resize(w.layers.size());
  out.facts = layer_facts(model, placement, main.expert_ffn() != nullptr), out.rows.resize(w.layers.size());
  out.main.inv_freq = adopt(main, w.inv_freq);
  out.host.inv_freq = adopt(host, w.inv_freq);
  adopt_embedding(out.embedding_on_host ? host : main, w, out.embedding_on_host ? out.host : out.main);
  adopt_output(out.output_on_host ? host : main, w, out.output_on_host ? out.host : out.main);
  Splitter splitter(model, placement, main, host, team);
  out.arena = HostArena(main, splitter.arena_bytes());
  for (size_t l = 0; l < w.layers.size(); ++l) {
    const bool host_attends = out.facts[l].host_attends;
    out.main.layers[l].attn_post_norm = adopt(main, w.layers[l].attn_post_norm);
    out.main.layers[l].ffn_post_norm = adopt(main, w.layers[l].ffn_post_norm);
    adopt_attention(host_attends ? host : main, w.layers[l], (host_attends ? out.host : out.main).layers[l]);
    splitter.ffn(l, out);
    if (main.is_host()) continue;  // a stand-in for a GPU uses the model's own rows
    main.synchronize();
    const auto layer = static_cast<int64_t>(l);
    if (!host_attends) model.release_attention(layer);
    if (w.layers[l].ffn.down_t) model.release_ffn(layer);  // on the device, or in the arena
  }
  return out;
}

}  // namespace hearth::engine
