#include "offline/plan/explain_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "offline/plan/explain.h"

namespace hearth::offline {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30, kMostBudgets = 48;

// A layer that is a mixture.
struct ExpertRow {
  int64_t experts = 0, on_gpu = 0, neurons = 0;  // neurons: of each of those on the GPU; 0: all of them
  double used = 0, hit_rate = 0;
  std::optional<double> break_even;
  bool operator==(const ExpertRow&) const = default;
};

ExpertRow row_of(const Planner& planner, const Plan& plan, size_t layer) {
  const LayerShape& shape = planner.shape().layers[layer];
  const LayerReport& r = plan.layers[layer];
  ExpertRow row{shape.n_ff, r.choice.hot, r.choice.neurons, shape.n_used, r.hot_activations / r.activations, {}};
  if (shape.gpu_experts) row.break_even = planner.break_even(layer, r.choice);
  return row;
}

}  // namespace

bool has_experts(const Planner& planner) {
  return std::ranges::any_of(planner.shape().layers, &LayerShape::experts);
}

std::string expert_rows(const Planner& planner, const Plan& plan) {
  const bool cut = std::ranges::any_of(plan.layers, [](const LayerReport& l) { return l.choice.neurons > 0; });
  const auto of_each = [&](const std::string& text) { return cut ? fmt::format(" {:>9}", text) : std::string(); };
  std::string out = fmt::format("\n{:>7} {:>9} {:>6} {:>8}{} {:>8} {:>11}\n", "layer", "experts", "used", "on GPU",
                                of_each("neurons"), "hit", "break-even");
  const std::vector<LayerShape>& layers = planner.shape().layers;
  for (size_t first = 0, next = 0; first < layers.size(); first = next) {
    next = first + 1;
    if (!layers[first].experts) continue;
    const ExpertRow row = row_of(planner, plan, first);
    while (next < layers.size() && layers[next].experts && row_of(planner, plan, next) == row) ++next;
    const std::string name = next - first > 1 ? fmt::format("{}-{}", first, next - 1) : std::to_string(first);
    const std::string neurons = row.on_gpu == 0    ? "-"
                                : row.neurons == 0 ? "all"
                                                   : fmt::format("{}/{}", row.neurons, layers[first].inside.n_ff);
    out += fmt::format("{:>7} {:>9} {:>6.0f} {:>8}{} {:>7.1f}% {:>11}\n", name, row.experts, row.used, row.on_gpu,
                       of_each(neurons), 100 * row.hit_rate,
                       row.break_even ? fmt::format("{:.1f}%", 100 * *row.break_even) : "never");
  }
  if (cut) {
    out +=
        "neurons: the most active ones of each of the experts on the GPU, which has those alone; the CPU has the "
        "others, and computes the active ones.\n";
  }
  return out + fmt::format(
                   "hit: share of the {} that tokens use which are on the GPU; break-even: from this on, experts "
                   "there are faster than none, the GPU's kernels and the hand-off included.\n",
                   cut ? "experts' neurons" : "experts");
}

std::string why_experts(const Planner& planner, const Plan& plan) {
  int64_t hot = 0, all = 0, cut = 0;
  double used = 0, hit = 0;
  bool kernels = true;
  for (size_t l = 0; l < plan.layers.size(); ++l) {
    if (!planner.shape().layers[l].experts) continue;
    hot += plan.layers[l].choice.hot, all += plan.layers[l].n_ff;
    cut += plan.layers[l].choice.neurons > 0 ? 1 : 0;
    hit += plan.layers[l].hot_activations, used += plan.layers[l].activations;
    kernels &= planner.shape().layers[l].gpu_experts;
  }
  std::string out =
      fmt::format("experts: {} of {} on the GPU, {:.1f} % of {} that a token uses ({})", hot, all, 100 * hit / used,
                  cut > 0 ? "the neurons of those" : "those", planner.frequencies().source);
  if (cut > 0) {
    out += fmt::format(
        "\n  neurons: in {} layers the GPU has the most active neurons of its experts alone, which saves more than "
        "whole experts",
        cut);
  }
  if (!kernels) out += "\n  the GPU has no kernels for experts of this shape or type: they stay on the CPU";
  return out;
}

std::string inside_experts(const Planner& planner) {
  double least = 1, most = 0;
  for (const LayerShape& l : planner.shape().layers) {
    if (!l.experts) continue;
    const double active = l.skippable_bytes > 0 ? l.active_inside : 1;
    least = std::min(least, active), most = std::max(most, active);
  }
  if (least == 1) return "";
  const std::string share = most - least < 0.005 ? fmt::format("{:.0f} %", 100 * most)
                                                 : fmt::format("{:.0f} to {:.0f} %", 100 * least, 100 * most);
  return fmt::format("inside experts: {} of the neurons are active; the CPU reads those alone, a GPU whole experts\n",
                     share);
}

nlohmann::json experts_json(const Planner& planner, const Plan& plan, size_t layer) {
  const ExpertRow row = row_of(planner, plan, layer);
  return {{"experts", row.experts},
          {"experts_used", row.used},
          {"experts_on_gpu", row.on_gpu},
          {"neurons_of_each_on_gpu", row.neurons > 0 ? nlohmann::json(row.neurons) : nlohmann::json(nullptr)},
          {"hit_rate", row.hit_rate},
          {"break_even_hit_rate", row.break_even ? nlohmann::json(*row.break_even) : nlohmann::json(nullptr)}};
}

uint64_t worthwhile_budget(const Planner& planner) {
  const uint64_t from = planner.smallest_budget(), to = std::max(from, planner.largest_useful_budget());
  const uint64_t step = std::max(kGiB, (to - from) / kMostBudgets);
  const double worth = kWorthPerGib * static_cast<double>(step) / static_cast<double>(kGiB);
  uint64_t budget = from;
  double before = planner.tokens_per_second(from);
  for (uint64_t b = from; b < to;) {
    const uint64_t more = std::min(b + step, to);
    const double after = planner.tokens_per_second(more);
    if (after >= before * (1 + worth * static_cast<double>(more - b) / static_cast<double>(step))) budget = more;
    b = more, before = after;
  }
  return budget;
}

}  // namespace hearth::offline
