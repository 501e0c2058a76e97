#include "offline/profile/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "offline/profile/expert_summary.h"
#include "offline/profile/hottest.h"

namespace hearth::offline {
namespace {

double neurons_for_share(const std::vector<uint64_t>& counts, const std::vector<size_t>& order, double share) {
  const uint64_t all = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  uint64_t sum = 0;
  for (size_t k = 0; k < order.size(); ++k) {
    sum += counts[order[k]];
    if (static_cast<double>(sum) >= share * static_cast<double>(all)) {
      return static_cast<double>(k + 1) / static_cast<double>(order.size());
    }
  }
  return 1;
}

nlohmann::json json_or_null(const std::optional<double>& v) {
  return v ? nlohmann::json(*v) : nlohmann::json(nullptr);
}
nlohmann::json to_json(const LayerSummary& l) {
  nlohmann::json shares, growths;
  for (size_t k = 0; k < l.unions.size(); ++k) {
    const std::string tokens = std::to_string(model::kUnionTokens[k]);
    shares[tokens] = json_or_null(l.unions[k]), growths[tokens] = json_or_null(l.growth(k));
  }
  return {{"density", l.density},
          {"neurons_for_80_percent", l.hot_share},
          {"coactive_previous", json_or_null(l.previous)},
          {"coactive_recent_64", json_or_null(l.recent)},
          {"union", shares},
          {"union_per_density", growths},
          {"hit_rate_of_26_percent", l.hit},
          {"hit_rate_heldout", json_or_null(l.hit_heldout)},
          {"hit_rate_heldout_possible", json_or_null(l.hit_heldout_possible)},
          {"predictor_named_per_active", json_or_null(l.named_per_active)}};
}

std::string percent(const std::optional<double>& v) {
  return v ? fmt::format("{:.1f} %", 100 * *v) : "-";
}
std::string row(const std::string& name, const LayerSummary& l) {
  return fmt::format("{:>5} {:>9} {:>13} {:>9} {:>9} {:>9} {:>10} {:>10}\n", name, percent(l.density),
                     percent(l.hot_share), percent(l.previous), percent(l.recent), percent(l.hit),
                     percent(l.hit_heldout), percent(l.hit_heldout_possible));
}

std::string union_row(const std::string& name, const LayerSummary& l) {
  std::string out = fmt::format("{:>5} {:>9}", name, percent(l.density));
  for (size_t k = 0; k < l.unions.size(); ++k) {
    const std::optional<double> growth = l.growth(k);
    out += fmt::format(" {:>9} {:>8}", percent(l.unions[k]), growth ? fmt::format("{:.2f} ×", *growth) : "-");
  }
  return out + "\n";
}

// A layer that counts neurons.
struct DenseLayer {
  size_t layer;
  LayerSummary summary;
};
std::vector<DenseLayer> dense_layers(const model::Sidecar& sidecar) {
  std::vector<DenseLayer> out;
  const std::vector<LayerSummary> all = summarize(sidecar.statistics);
  for (size_t l = 0; l < all.size(); ++l) {
    if (!sidecar.is_mixture(l)) out.push_back({l, all[l]});
  }
  return out;
}
LayerSummary mean_of(const std::vector<DenseLayer>& layers) {
  std::vector<LayerSummary> all;
  for (const DenseLayer& l : layers) all.push_back(l.summary);
  return mean_of(all);
}

// How many neurons a few consecutive tokens need together.
std::string union_table(const std::vector<DenseLayer>& layers, const LayerSummary& mean) {
  if (std::none_of(mean.unions.begin(), mean.unions.end(), [](auto& u) { return u.has_value(); })) {
    return "several tokens: the sidecar does not say how many neurons consecutive tokens need together; "
           "`hearth profile -f TEXT` without --resume counts them.\n";
  }
  std::string out = fmt::format("\n{:>5} {:>9}", "layer", "density");
  for (const int64_t tokens : model::kUnionTokens) out += fmt::format(" {:>18}", fmt::format("of {} tokens", tokens));
  out += "\n";
  for (const DenseLayer& l : layers) out += union_row(std::to_string(l.layer), l.summary);
  out += union_row("mean", mean);
  return out +
         "\nof N tokens: share of the neurons that are active in at least one of N consecutive tokens; ×: times the "
         "density of one.\n";
}

// Layers that count neurons; there is one at least.
std::string neuron_tables(const std::vector<DenseLayer>& layers) {
  std::string out = fmt::format("\n{:>5} {:>9} {:>13} {:>9} {:>9} {:>9} {:>10} {:>10}\n", "layer", "density",
                                "80 % made by", "previous", "last 64", "hit rate", "held out", "possible");
  for (const DenseLayer& l : layers) out += row(std::to_string(l.layer), l.summary);
  const LayerSummary mean = mean_of(layers);
  out += row("mean", mean);
  out += fmt::format(
      "\nprevious, last 64: share of a token's active neurons that were active with the token before, or with any of "
      "64.\n"
      "hit rate: share of the activations that the hottest {:.0f} % of the neurons make; held out: the same neurons on "
      "text that was not profiled; possible: that text's own hottest.\n",
      100 * kHotSet);
  if (mean.named_per_active) {
    out += fmt::format("predictors: the file's own name {:.2f} neurons for each active one.\n", *mean.named_per_active);
  }
  return out + union_table(layers, mean);
}

}  // namespace

std::optional<double> LayerSummary::growth(size_t k) const {
  return unions[k] && density > 0 ? std::optional(*unions[k] / density) : std::nullopt;
}

std::vector<LayerSummary> summarize(const model::Statistics& statistics) {
  std::vector<LayerSummary> summaries;
  for (size_t l = 0; l < statistics.layers.size(); ++l) {
    const model::LayerStatistics& s = statistics.layers[l];
    const std::vector<size_t> order = hottest_first(s.active);
    const auto hot = static_cast<size_t>(std::lround(kHotSet * static_cast<double>(order.size())));
    LayerSummary summary;
    summary.density = statistics.density(l);
    summary.hot_share = neurons_for_share(s.active, order, kActivationShare);
    summary.previous = s.previous.mean();
    summary.recent = s.recent.mean();
    summary.named_per_active = s.named.per_active();
    for (size_t k = 0; k < s.unions.size(); ++k) summary.unions[k] = s.unions[k].share(s.n_ff());
    summary.hit = share_of_first(s.active, order, hot);
    if (statistics.tokens_heldout > 0 && !s.active_heldout.empty()) {
      summary.hit_heldout = share_of_first(s.active_heldout, order, hot);
      summary.hit_heldout_possible = share_of_first(s.active_heldout, hottest_first(s.active_heldout), hot);
    }
    summaries.push_back(summary);
  }
  return summaries;
}

LayerSummary mean_of(const std::vector<LayerSummary>& layers) {
  LayerSummary mean;
  const auto n = static_cast<double>(layers.size());
  const auto add = [&](std::optional<double>& sum, const std::optional<double>& v, bool first) {
    if (first)
      sum = v ? std::optional(*v / n) : std::nullopt;
    else if (sum && v)
      *sum += *v / n;
    else
      sum.reset();
  };
  for (const LayerSummary& l : layers) {
    const bool first = &l == &layers.front();
    mean.density += l.density / n, mean.hot_share += l.hot_share / n, mean.hit += l.hit / n;
    add(mean.previous, l.previous, first);
    add(mean.recent, l.recent, first);
    add(mean.hit_heldout, l.hit_heldout, first);
    add(mean.hit_heldout_possible, l.hit_heldout_possible, first);
    add(mean.named_per_active, l.named_per_active, first);
    for (size_t k = 0; k < l.unions.size(); ++k) add(mean.unions[k], l.unions[k], first);
  }
  return mean;
}

std::string summary_table(const model::Sidecar& sidecar) {
  const model::Statistics& s = sidecar.statistics;
  std::string out = fmt::format("model        {}\nsource       {}\ntokens       {}{} profiled, {} held out{}\n",
                                sidecar.model_name, s.source, s.tokens_estimated ? "about " : "", s.tokens,
                                s.tokens_heldout, s.complete ? "" : " (incomplete: --resume goes on)");
  for (const model::ProfiledText& t : s.texts) out += fmt::format("text         {} ({} bytes)\n", t.name, t.bytes);
  if (const std::vector<DenseLayer> dense = dense_layers(sidecar); !dense.empty()) out += neuron_tables(dense);
  if (const std::vector<ExpertSummary> experts = summarize_experts(sidecar); !experts.empty()) {
    out += expert_table(experts);
  }
  return out;
}

nlohmann::json summary_json(const model::Sidecar& sidecar) {
  const model::Statistics& s = sidecar.statistics;
  const std::vector<DenseLayer> dense = dense_layers(sidecar);
  const std::vector<ExpertSummary> experts = summarize_experts(sidecar);
  nlohmann::json j = {{"model", sidecar.model_name},
                      {"fingerprint", sidecar.model_fingerprint},
                      {"source", s.source},
                      {"tokens", s.tokens},
                      {"tokens_estimated", s.tokens_estimated},
                      {"tokens_heldout", s.tokens_heldout},
                      {"complete", s.complete},
                      {"threshold", s.threshold},
                      {"mean", dense.empty() ? nlohmann::json(nullptr) : to_json(mean_of(dense))}};
  if (!experts.empty()) j["mean_experts"] = to_json(mean_of(experts));
  j["texts"] = nlohmann::json::array();
  for (const model::ProfiledText& t : s.texts)
    j["texts"].push_back({{"name", t.name}, {"hash", t.hash}, {"bytes", t.bytes}});
  j["layers"] = nlohmann::json::array();
  j["layers"].get_ref<nlohmann::json::array_t&>().resize(s.layers.size());
  for (const DenseLayer& l : dense) j["layers"][l.layer] = to_json(l.summary);
  for (const ExpertSummary& e : experts) j["layers"][e.layer] = to_json(e);
  return j;
}

}  // namespace hearth::offline
