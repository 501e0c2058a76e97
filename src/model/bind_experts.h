#pragma once
// The tensors of one layer's experts under llama.cpp's names: stacked in three dimensions, with gate and up merged, or,
// in files of 2023, one tensor an expert; down projections also transposed, ffn_down_t_exps. Part of model.cpp.
#include <string>
#include <vector>

#include "core/error.h"
#include "model/model.h"

namespace hearth::model {

template <typename Binder>
class ExpertBinder {
 public:
  // `layer_prefix`: "blk.3."
  ExpertBinder(Binder& binder, const gguf::File& file, const Config& config, std::string layer_prefix)
      : b_(binder), file_(file), c_(config), e_(config.experts), p_(std::move(layer_prefix)) {}

  void bind(LayerWeights& l) {
    bind_router(l.router);
    l.experts.resize(static_cast<size_t>(e_.routing.n_expert));
    for (Expert& e : l.experts) set_activation(e.ffn);
    if (b_.has(p_ + "ffn_gate_up_exps.weight")) {
      const Matrix both = stacked("ffn_gate_up_exps", 2 * e_.n_ff, c_.n_embd);
      each(l, [&](Expert& e, int64_t i) {
        e.ffn.gate = both.slice_rows(2 * i * e_.n_ff, e_.n_ff);
        e.ffn.up = both.slice_rows((2 * i + 1) * e_.n_ff, e_.n_ff);
      });
      refuse("ffn_gate_up_exps.bias");
    } else {
      if (c_.ffn.gated) bind(l, "ffn_gate", e_.n_ff, c_.n_embd, [](Expert& e) { return &e.ffn.gate; });
      // The first matrix of ungated families decides which neurons are active, as a gate does.
      const bool gated = c_.ffn.gated;
      bind(l, "ffn_up", e_.n_ff, c_.n_embd, [=](Expert& e) { return gated ? &e.ffn.up : &e.ffn.gate; });
      if (gated) bind_bias(l, "ffn_gate_exps", e_.n_ff, [](Expert& e) { return &e.ffn.gate_bias; });
      bind_bias(l, "ffn_up_exps", e_.n_ff, [=](Expert& e) { return gated ? &e.ffn.up_bias : &e.ffn.gate_bias; });
    }
    if (b_.has(p_ + "ffn_down_t_exps.weight") || b_.has(p_ + "ffn_down_t.0.weight")) {
      bind(l, "ffn_down_t", e_.n_ff, c_.n_embd, [](Expert& e) { return &e.ffn.down_t; });
    } else {
      bind(l, "ffn_down", c_.n_embd, e_.n_ff, [](Expert& e) { return &e.ffn.down; });
    }
    bind_bias(l, "ffn_down_exps", c_.n_embd, [](Expert& e) { return &e.down_bias; });
    if (e_.n_ff_shared > 0) bind_shared(l);
  }

 private:
  void bind_router(Router& r) {
    r.routing = e_.routing;
    r.shared = e_.n_ff_shared > 0;
    r.w = in_f32(p_ + "ffn_gate_inp.weight", e_.routing.n_expert);
    r.bias = b_.optional_vector(p_ + "ffn_gate_inp.bias", e_.routing.n_expert);
    r.correction = b_.optional_vector(p_ + "exp_probs_b.bias", e_.routing.n_expert);
    const std::string gate = p_ + "ffn_gate_inp_shexp.weight";
    if (!b_.has(gate)) return;
    if (!r.shared) fail("'{}': tensor {} is there, and no shared expert", file_.path().string(), gate);
    r.shared_gate = in_f32(gate, 1);
  }
  // Routers are not quantised, so that a choice depends on little else than the activations.
  Matrix in_f32(const std::string& name, int64_t rows) {
    const Matrix m = b_.matrix(name, rows, c_.n_embd);
    if (is_quantized(m.type)) {
      fail("'{}': tensor {} is {}; a router is f32, f16 or bf16: quantise the model again", file_.path().string(), name,
           traits(m.type).name);
    }
    return m;
  }

  void bind_shared(LayerWeights& l) {
    Expert& e = l.experts.emplace_back();
    set_activation(e.ffn);
    e.ffn.gate =
        b_.matrix(p_ + (c_.ffn.gated ? "ffn_gate_shexp.weight" : "ffn_up_shexp.weight"), e_.n_ff_shared, c_.n_embd);
    if (c_.ffn.gated) e.ffn.up = b_.matrix(p_ + "ffn_up_shexp.weight", e_.n_ff_shared, c_.n_embd);
    if (b_.has(p_ + "ffn_down_t_shexp.weight")) {
      e.ffn.down_t = b_.matrix(p_ + "ffn_down_t_shexp.weight", e_.n_ff_shared, c_.n_embd);
    } else {
      e.ffn.down = b_.matrix(p_ + "ffn_down_shexp.weight", c_.n_embd, e_.n_ff_shared);
    }
  }

  template <typename F>
  void each(LayerWeights& l, F&& f) {
    for (int64_t i = 0; i < e_.routing.n_expert; ++i) f(l.experts[static_cast<size_t>(i)], i);
  }
  // One matrix of every expert, of the shape [rows][cols]: stacked, or one tensor each.
  template <typename Member>
  void bind(LayerWeights& l, const char* name, int64_t rows, int64_t cols, Member member) {
    const std::string exps = std::string(name) + "_exps";
    if (b_.has(p_ + exps + ".weight") || !b_.has(p_ + name + ".0.weight")) {
      const Matrix all = stacked(exps, rows, cols);
      return each(l, [&](Expert& e, int64_t i) { *member(e) = all.slice_rows(i * rows, rows); });
    }
    each(l,
         [&](Expert& e, int64_t i) { *member(e) = b_.matrix(fmt::format("{}{}.{}.weight", p_, name, i), rows, cols); });
    refuse(fmt::format("{}.{}.weight", name, e_.routing.n_expert));
  }
  Matrix stacked(const std::string& name, int64_t rows, int64_t cols) {
    const std::string full = p_ + name + ".weight";
    if (const gguf::TensorInfo* t = file_.find_tensor(full)) {
      const int64_t n = t->ne.size() > 2 ? t->ne[2] : 1;
      if (n != e_.routing.n_expert || t->ne.size() > 3) {
        fail("'{}': tensor {} holds {} experts, and {}.expert_count is {}", file_.path().string(), full, n, c_.arch,
             e_.routing.n_expert);
      }
      if (t->ne[0] != cols || t->ne[1] != rows) {
        fail("'{}': tensor {} is [{}, {}, {}], expected [{}, {}, {}] (columns, rows, experts)", file_.path().string(),
             full, t->ne[0], t->ne[1], n, cols, rows, n);
      }
    }
    return b_.matrix(full, rows * e_.routing.n_expert, cols);
  }
  template <typename Member>
  void bind_bias(LayerWeights& l, const char* name, int64_t n, Member member) {
    const std::string full = p_ + name + ".bias";
    if (!b_.has(full)) return;
    const Vector all = b_.flat_vector(full, e_.routing.n_expert, n);
    each(l, [&](Expert& e, int64_t i) { *member(e) = {all.data + i * n, n}; });
  }
  // A tensor that contradicts what was bound.
  void refuse(const std::string& name) {
    if (b_.has(p_ + name)) {
      fail("'{}': tensor {} is there, and nothing reads it; {}.expert_count is {}", file_.path().string(), p_ + name,
           c_.arch, e_.routing.n_expert);
    }
  }
  void set_activation(FfnShard& f) const {
    f.act = c_.ffn.act, f.act_threshold = c_.ffn.act_threshold, f.up_relu = c_.ffn.up_relu;
  }

  Binder& b_;
  const gguf::File& file_;
  const Config& c_;
  const ExpertsDescription& e_;
  const std::string p_;
};

}  // namespace hearth::model
