#include "offline/profile/expert_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "core/error.h"
#include "offline/profile/hottest.h"

namespace hearth::offline {
namespace {

// The part of `counts` that falls on a share of the experts, the first ones of `order`.
double covered(const std::vector<uint64_t>& counts, const std::vector<size_t>& order, double share) {
  const auto n = static_cast<size_t>(std::lround(share * static_cast<double>(order.size())));
  return share_of_first(counts, order, std::max<size_t>(1, n));
}

// Share of the activations inside experts, weighted by how often each is used.
std::optional<double> covered_inside(const model::LayerStatistics& s) {
  double hottest = 0, all = 0;
  for (size_t e = 0; e < s.inside_counts.used.size(); ++e) {
    std::vector<double> p = s.inside_counts.frequencies(e);
    std::ranges::sort(p, std::greater());
    const auto weight = static_cast<double>(s.active[e]);
    const auto n = std::lround(kHottestInside * static_cast<double>(p.size()));
    hottest += weight * std::accumulate(p.begin(), p.begin() + n, 0.0);
    all += weight * std::accumulate(p.begin(), p.end(), 0.0);
  }
  return all > 0 ? std::optional(hottest / all) : std::nullopt;
}

ExpertSummary summarize_layer(const model::Sidecar& sidecar, size_t layer) {
  const model::LayerStatistics& s = sidecar.statistics.layers[layer];
  ExpertSummary out{.layer = layer, .n_expert = s.n_ff(), .n_used = sidecar.n_expert_used[layer]};
  const std::vector<size_t> order = hottest_first(s.active);
  for (size_t k = 0; k < kHottestExperts.size(); ++k) {
    out.covered[k] = covered(s.active, order, kHottestExperts[k]);
    if (!s.active_heldout.empty()) out.covered_heldout[k] = covered(s.active_heldout, order, kHottestExperts[k]);
  }
  out.previous = s.previous.mean(), out.foreseen = s.foreseen.mean(), out.inside = s.inside.mean();
  out.hottest_inside = covered_inside(s);
  for (size_t k = 0; k < s.unions.size(); ++k) {
    const std::optional<double> share = s.unions[k].share(out.n_expert);
    if (share) out.growth[k] = *share * static_cast<double>(out.n_expert) / static_cast<double>(out.n_used);
  }
  return out;
}

std::string percent(const std::optional<double>& v) {
  return v ? fmt::format("{:.1f} %", 100 * *v) : "-";
}

std::string row(const std::string& name, const ExpertSummary& s) {
  std::string out = fmt::format("{:>5} {:>7} {:>5}", name, s.n_expert, s.n_used);
  for (const double share : s.covered) out += fmt::format(" {:>8}", percent(share));
  out += fmt::format(" {:>9} {:>9}", percent(s.covered_heldout[1]), percent(s.previous));
  for (const auto& growth : s.growth) out += fmt::format(" {:>8}", growth ? fmt::format("{:.2f} ×", *growth) : "-");
  return out + fmt::format(" {:>10} {:>7} {:>7}\n", percent(s.foreseen), percent(s.inside), percent(s.hottest_inside));
}

nlohmann::json json_or_null(const std::optional<double>& v) {
  return v ? nlohmann::json(*v) : nlohmann::json(nullptr);
}

}  // namespace

std::vector<ExpertSummary> summarize_experts(const model::Sidecar& sidecar) {
  std::vector<ExpertSummary> out;
  for (size_t l = 0; l < sidecar.n_ff.size(); ++l) {
    if (sidecar.is_mixture(l)) out.push_back(summarize_layer(sidecar, l));
  }
  return out;
}

ExpertSummary mean_of(const std::vector<ExpertSummary>& layers) {
  HEARTH_CHECK(!layers.empty());
  const auto mean = [&](auto&& field) -> std::optional<double> {
    double sum = 0, n = 0;
    for (const ExpertSummary& l : layers) {
      if (const std::optional<double> v = field(l)) sum += *v, ++n;
    }
    return n > 0 ? std::optional(sum / n) : std::nullopt;
  };
  ExpertSummary out{.n_expert = layers.front().n_expert, .n_used = layers.front().n_used};
  for (size_t k = 0; k < kHottestExperts.size(); ++k) {
    out.covered[k] = *mean([k](auto& l) { return std::optional(l.covered[k]); });
    out.covered_heldout[k] = mean([k](auto& l) { return l.covered_heldout[k]; });
  }
  for (size_t k = 0; k < out.growth.size(); ++k) out.growth[k] = mean([k](auto& l) { return l.growth[k]; });
  out.previous = mean([](auto& l) { return l.previous; });
  out.foreseen = mean([](auto& l) { return l.foreseen; });
  out.inside = mean([](auto& l) { return l.inside; });
  out.hottest_inside = mean([](auto& l) { return l.hottest_inside; });
  return out;
}

std::string expert_table(const std::vector<ExpertSummary>& layers) {
  std::string out =
      fmt::format("\n{:>5} {:>7} {:>5} {:>8} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8} {:>10} {:>7} {:>7}\n", "layer",
                  "experts", "used", "10 %", "20 %", "40 %", "held out", "previous", "2 tokens", "4 tokens", "8 tokens",
                  "look-ahead", "neurons", "hottest");
  for (const ExpertSummary& l : layers) out += row(std::to_string(l.layer), l);
  out += row("mean", mean_of(layers));
  return out +
         "\n10, 20, 40 %: share of a router's choices that fall on the hottest 10, 20 and 40 % of the experts; held "
         "out: on the same 20 % on text that was not profiled.\n"
         "previous: of a token's experts, those that the token before used too; N tokens: the experts that N "
         "consecutive tokens use together, times those of one.\n"
         "look-ahead: of a token's experts, those that the layer's router names on the input of the layer before.\n"
         "neurons: of those of a token's experts, the shared one among them, the active ones; of ReLU families "
         "alone. hottest: of those, the share of the most active quarter of each expert's neurons.\n";
}

nlohmann::json to_json(const ExpertSummary& s) {
  nlohmann::json shares, heldout, growths;
  for (size_t k = 0; k < kHottestExperts.size(); ++k) {
    const std::string percent = fmt::format("{:.0f}", 100 * kHottestExperts[k]);
    shares[percent] = s.covered[k], heldout[percent] = json_or_null(s.covered_heldout[k]);
  }
  for (size_t k = 0; k < s.growth.size(); ++k) {
    growths[std::to_string(model::kUnionTokens[k])] = json_or_null(s.growth[k]);
  }
  return {{"experts", s.n_expert},
          {"experts_used", s.n_used},
          {"choices_of_hottest_percent", shares},
          {"choices_of_hottest_percent_heldout", heldout},
          {"previous_token", json_or_null(s.previous)},
          {"union_per_token", growths},
          {"look_ahead", json_or_null(s.foreseen)},
          {"neurons_active", json_or_null(s.inside)},
          {"neurons_active_of_hottest_percent",
           {{fmt::format("{:.0f}", 100 * kHottestInside), json_or_null(s.hottest_inside)}}}};
}

}  // namespace hearth::offline
