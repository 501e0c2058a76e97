#include "engine/placement.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "core/error.h"

namespace hearth::engine {
namespace {

// `what` the ids name: "neuron", "expert".
void check_ids(const std::vector<int32_t>& ids, const char* list, size_t layer, const char* what, int64_t n) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= n) {
      fail("the plan's {} of layer {} names {} {}, expected 0 to {}; plan again", list, layer, what, ids[i], n - 1);
    }
    if (i > 0 && ids[i] <= ids[i - 1]) {
      fail("the plan's {} of layer {} is not ascending at {} {}; plan again", list, layer, what, ids[i]);
    }
  }
}

void check_disjoint(const std::vector<int32_t>& a, const char* list_a, const std::vector<int32_t>& b,
                    const char* list_b, size_t layer) {
  std::vector<int32_t> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  if (!both.empty()) {
    fail("the plan has neuron {} of layer {} in {} and in {}; plan again", both.front(), layer, list_a, list_b);
  }
}

void check_layer(const LayerPlacement& l, size_t layer, int64_t n_ff) {
  check_ids(l.gpu_bucket, "gpu_bucket", layer, "neuron", n_ff);
  check_ids(l.gpu_linked, "gpu_linked", layer, "neuron", n_ff);
  check_disjoint(l.gpu_bucket, "gpu_bucket", l.gpu_linked, "gpu_linked", layer);
  if (!l.gpu_linked.empty() &&
      (l.selection != Selection::predictor || l.predictor == Where::cpu || l.gpu_bucket.empty())) {
    fail(
        "the plan has the GPU read neurons of layer {} over the link, which takes a predictor and hot neurons on the "
        "GPU; plan again",
        layer);
  }
  if (l.selection == Selection::predictor && l.predictor == Where::cpu && !l.gpu_bucket.empty()) {
    fail("the plan has neurons of layer {} on the GPU and their predictor on the CPU; plan again", layer);
  }
}

// Lists of neurons of the experts on the GPU.
void check_cuts(const LayerPlacement& l, size_t layer, const model::Config& c) {
  const model::ExpertsDescription& e = c.experts;
  const std::vector<std::vector<int32_t>>& cuts = l.gpu_expert_neurons;
  if (cuts.empty()) return;
  if (cuts.size() != l.gpu_experts.size()) {
    fail("the plan has {} experts of layer {} on the GPU and lists of neurons of {}; plan again", l.gpu_experts.size(),
         layer, cuts.size());
  }
  const bool some = std::ranges::any_of(cuts, [](const auto& ids) { return !ids.empty(); });
  if (some && !c.ffn.sparse()) {
    fail("the plan cuts experts of layer {}, and {} ones are computed whole; plan again", layer, c.ffn.family);
  }
  std::optional<int64_t> of_each;
  for (size_t k = 0; k < cuts.size(); ++k) {
    const bool routed = l.gpu_experts[k] < e.routing.n_expert;
    const int64_t n_ff = e.neurons_of(l.gpu_experts[k]), n = cuts[k].empty() ? n_ff : std::ssize(cuts[k]);
    check_ids(cuts[k], fmt::format("expert {}", l.gpu_experts[k]).c_str(), layer, "neuron", n_ff);
    if (!cuts[k].empty() && n % kExpertBlock != 0) {
      fail("the plan has {} neurons of expert {} of layer {} on the GPU, expected whole blocks of {}; plan again", n,
           l.gpu_experts[k], layer, kExpertBlock);
    }
    if (routed && n != of_each.value_or(n)) {
      fail("the plan has {} neurons of expert {} of layer {} on the GPU and {} of another one; plan again", n,
           l.gpu_experts[k], layer, *of_each);
    }
    if (routed) of_each = n;
  }
}

void check_experts(const LayerPlacement& l, size_t layer, const model::Config& c) {
  const model::ExpertsDescription& e = c.experts;
  if (!e.in_layer(static_cast<int64_t>(layer))) {
    if (!l.gpu_experts.empty() || !l.gpu_expert_neurons.empty())
      fail("the plan has experts of layer {}, which is dense; plan again", layer);
    return;
  }
  if (!l.gpu_bucket.empty() || !l.gpu_linked.empty() || l.selection != Selection::all) {
    fail("the plan places neurons of layer {}, which is a mixture of experts; plan again", layer);
  }
  check_ids(l.gpu_experts, "gpu_experts", layer, "expert", e.routing.n_expert + (e.n_ff_shared > 0 ? 1 : 0));
  check_cuts(l, layer, c);
}

}  // namespace

const char* to_string(Where where) {
  return where == Where::gpu ? "gpu" : "cpu";
}

const char* to_string(Selection selection) {
  switch (selection) {
    case Selection::all:
      return "all";
    case Selection::gate:
      return "gate";
    case Selection::predictor:
      return "predictor";
  }
  return "?";
}

Sparsity parse_sparsity(std::string_view name) {
  if (name == "off") return Sparsity::off;
  if (name == "exact") return Sparsity::exact;
  if (name == "predict") return Sparsity::predict;
  if (name == "auto") return Sparsity::auto_;
  fail("unknown sparsity mode '{}'; expected off, exact, predict or auto", name);
}

const char* to_string(Sparsity sparsity) {
  switch (sparsity) {
    case Sparsity::off:
      return "off";
    case Sparsity::exact:
      return "exact";
    case Sparsity::predict:
      return "predict";
    case Sparsity::auto_:
      return "auto";
  }
  return "?";
}

std::optional<std::span<const int32_t>> LayerPlacement::neurons_on_gpu(size_t expert) const {
  const auto at = std::ranges::lower_bound(gpu_experts, static_cast<int32_t>(expert));
  if (at == gpu_experts.end() || *at != static_cast<int32_t>(expert)) return std::nullopt;
  if (gpu_expert_neurons.empty()) return std::span<const int32_t>();
  return gpu_expert_neurons[static_cast<size_t>(at - gpu_experts.begin())];
}

int64_t LayerPlacement::n_on_gpu(size_t expert, int64_t n_ff) const {
  const auto some = neurons_on_gpu(expert);
  return !some ? 0 : some->empty() ? n_ff : std::ssize(*some);
}

uint64_t Placement::planned_bytes() const {
  uint64_t sum = 0;
  for (const MemoryUse& use : planned) sum += use.bytes;
  return sum;
}

std::vector<int32_t> Placement::cpu_rows(size_t layer, int64_t n_ff) const {
  const LayerPlacement& l = layers[layer];
  std::vector<bool> listed(static_cast<size_t>(n_ff));
  for (const int32_t id : l.gpu_bucket) listed[static_cast<size_t>(id)] = true;
  for (const int32_t id : l.gpu_linked) listed[static_cast<size_t>(id)] = true;
  std::vector<int32_t> rows = l.gpu_linked;
  rows.reserve(static_cast<size_t>(n_ff) - l.gpu_bucket.size());
  for (int32_t id = 0; id < n_ff; ++id) {
    if (!listed[static_cast<size_t>(id)]) rows.push_back(id);
  }
  return rows;
}

void check_placement(const Placement& p, const model::Config& c, const std::string& model_fingerprint) {
  if (p.model_fingerprint != model_fingerprint) {
    fail("the plan was made for another model (fingerprint {}, expected {}); make one with `hearth plan`",
         p.model_fingerprint, model_fingerprint);
  }
  if (static_cast<int64_t>(p.layers.size()) != c.n_layer) {
    fail("the plan has {} layers and the model {}; plan again", p.layers.size(), c.n_layer);
  }
  if (p.n_ctx < 1 || p.n_sequences < 1 || p.n_batch < 1)
    fail("the plan is for a context of {}, a batch of {} and {} sequences; plan again", p.n_ctx, p.n_batch,
         p.n_sequences);
  for (size_t l = 0; l < p.layers.size(); ++l) {
    check_layer(p.layers[l], l, c.n_ff);
    check_experts(p.layers[l], l, c);
  }
  if (p.planned_bytes() > p.vram_budget) {
    fail("the plan uses {} bytes of GPU memory and its budget is {}; plan again", p.planned_bytes(), p.vram_budget);
  }
}

}  // namespace hearth::engine
