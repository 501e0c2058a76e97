#include "offline/report/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/error.h"
#include "model/predictors.h"
#include "offline/profile/expert_summary.h"
#include "offline/profile/summary.h"
#include "offline/report/svg.h"

namespace hearth::offline {
namespace {

using nlohmann::json;

constexpr size_t kCells = 64;    // of a row of the heat map
constexpr size_t kExpertCells = 128;
constexpr size_t kBudgets = 24;  // points of tokens/s against budget
constexpr double kGiB = 1024.0 * 1024 * 1024;

std::string section(const std::string& title, const std::string& body, const std::string& note) {
  return fmt::format("<h2>{}</h2>\n{}\n<p class=\"note\">{}</p>\n", escape_html(title), body, escape_html(note));
}

std::vector<double> sorted_frequencies(const model::Statistics& s, size_t layer) {
  std::vector<double> p = s.frequencies(layer);
  std::sort(p.begin(), p.end(), std::greater<>());
  return p;
}

// A heat map of layers, the most frequent first, in at most `most_cells` cells a layer.
std::string heat_of(const model::Statistics& s, const std::vector<size_t>& layers, size_t most_cells,
                    const std::string& x_name) {
  std::vector<std::vector<double>> rows;
  double most = 0;
  for (const size_t l : layers) {
    const std::vector<double> p = sorted_frequencies(s, l);
    std::vector<double> cells;
    const size_t n = std::min(most_cells, p.size());
    for (size_t c = 0; c < n; ++c) {
      const size_t begin = c * p.size() / n, end = (c + 1) * p.size() / n;
      const auto at = [&](size_t i) { return p.begin() + static_cast<ptrdiff_t>(i); };
      cells.push_back(std::accumulate(at(begin), at(end), 0.0) / static_cast<double>(end - begin));
      most = std::max(most, cells.back());
    }
    rows.push_back(std::move(cells));
  }
  for (std::vector<double>& row : rows) {
    for (double& cell : row) cell /= most > 0 ? most : 1;
  }
  return heat_map(rows, x_name, fmt::format("{:.0f} % of the tokens", 100 * most), layers.front());
}

std::string heat(const model::Sidecar& sidecar) {
  const model::Statistics& s = sidecar.statistics;
  std::vector<size_t> dense, mixtures;
  for (size_t l = 0; l < s.layers.size(); ++l) (sidecar.is_mixture(l) ? mixtures : dense).push_back(l);
  std::string out;
  if (!dense.empty()) {
    const size_t n = s.layers[dense.front()].active.size();
    out += section("How often neurons fire",
                   heat_of(s, dense, kCells, "neurons, the most active first"),
                   fmt::format("Each cell: how often {} neurons of the layer are active, on average.",
                               n > kCells ? fmt::format("a {}th of the", kCells) : "single"));
  }
  if (!mixtures.empty()) {
    const ExpertSummary mean = mean_of(summarize_experts(sidecar));
    out += section(
        "How often experts are chosen",
        heat_of(s, mixtures, kExpertCells, "experts, the most often chosen first"),
        fmt::format("Each cell: the share of the tokens that use an expert. A token uses {} of {}; the "
                    "hottest 10, 20 and 40 % of the experts get {:.0f}, {:.0f} and {:.0f} % of the choices.{}",
                    mean.n_used, mean.n_expert, 100 * mean.covered[0], 100 * mean.covered[1],
                    100 * mean.covered[2],
                    mean.previous ? fmt::format(" {:.0f} % of a token's experts served the token before, too.",
                                                100 * *mean.previous)
                                  : ""));
  }
  return out;
}

// Share of the activations that the hottest share of neurons makes: the mean, and the extremes among layers.
std::string coverage(const model::Statistics& s, const std::string& units) {
  constexpr size_t kPoints = 50;
  std::vector<Series> series = {{"mean of the layers"}, {"flattest layer"}, {"steepest layer"}};
  std::vector<std::vector<double>> curves;
  for (size_t l = 0; l < s.layers.size(); ++l) {
    const std::vector<double> p = sorted_frequencies(s, l);
    const double all = std::max(1e-300, std::accumulate(p.begin(), p.end(), 0.0));
    std::vector<double> curve = {0.0};
    double sum = 0;
    for (size_t i = 0, k = 1; k <= kPoints; ++k) {
      for (; i < k * p.size() / kPoints; ++i) sum += p[i];
      curve.push_back(100 * sum / all);
    }
    curves.push_back(std::move(curve));
  }
  for (size_t k = 0; k <= kPoints; ++k) {
    double mean = 0, low = 100, high = 0;
    for (const auto& c : curves) {
      mean += c[k] / static_cast<double>(curves.size()), low = std::min(low, c[k]), high = std::max(high, c[k]);
    }
    const double x = 100.0 * static_cast<double>(k) / kPoints;
    series[0].points.emplace_back(x, mean), series[1].points.emplace_back(x, low),
        series[2].points.emplace_back(x, high);
  }
  return section("What the hottest " + units + " cover",
                 line_chart({"hottest " + units + ", %", 0, 100}, {"activations, %", 0, 100}, series),
                 "A GPU that holds this share of the " + units + " makes that share of the activations.");
}

std::string generalisation(const model::Statistics& s, const std::string& units) {
  const std::vector<LayerSummary> layers = summarize(s);
  if (layers.empty() || !layers.front().hit_heldout)
    return section("Does that hold on other text?", "",
                   "No text was held out of the profile (hearth profile --heldout-every).");
  std::vector<Series> series = {{"profiled text"}, {"other text, the same " + units}, {"other text, its own hottest"}};
  for (size_t l = 0; l < layers.size(); ++l) {
    const auto x = static_cast<double>(l);
    series[0].points.emplace_back(x, 100 * layers[l].hit);
    series[1].points.emplace_back(x, 100 * *layers[l].hit_heldout);
    series[2].points.emplace_back(x, 100 * layers[l].hit_heldout_possible.value_or(0));
  }
  double low = 100, high = 0;
  for (const Series& curve : series) {
    for (const auto& [x, y] : curve.points) low = std::min(low, y), high = std::max(high, y);
  }
  const double last = std::max(1.0, static_cast<double>(layers.size() - 1));
  const Axis hit{fmt::format("activations made by the hottest {:.0f} % of the {}, %", 100 * kHotSet, units),
                 10 * std::floor(low / 10), std::min(100.0, 10 * std::ceil((high + 0.1) / 10))};
  return section(
      "Does that hold on other text?", line_chart({"layer", 0, last}, hit, series),
      "The " + units + " that were hottest on the profiled text, on that text and on text held out of the profile; "
      "and what that other text's own hottest would have made.");
}

std::string predictors(const model::Sidecar& sidecar) {
  const char* const title = "Predictors";
  if (sidecar.file == nullptr || !model::has_predictors(*sidecar.file))
    return section(title, "", "The sidecar has no predictors; `hearth predictor fit` makes them.");
  const auto stored = model::read_predictors(*sidecar.file, sidecar.n_embd, sidecar.n_ff);
  std::vector<Series> series = {{"recall"}, {"recall, weighted by loss"}, {"predicted density"}, {"true density"}};
  std::string rows;
  for (size_t l = 0; l < stored.size(); ++l) {
    const model::PredictorFigures& f = stored[l].figures;
    if (stored[l].predictor.method.empty()) continue;
    const auto x = static_cast<double>(l);
    series[0].points.emplace_back(x, 100 * f.recall), series[1].points.emplace_back(x, 100 * f.loss_recall);
    series[2].points.emplace_back(x, 100 * f.predicted_density), series[3].points.emplace_back(x, 100 * f.density);
    rows += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{:.2f} %</td><td>{:.2f} %</td><td>{:.2f} %</td><td>{:.2f} %</td></tr>", l,
        escape_html(stored[l].predictor.method), 100 * f.recall, 100 * f.precision, 100 * f.predicted_density,
        100 * f.density);
  }
  const double last = std::max(1.0, static_cast<double>(stored.size() - 1));
  // The same against each other: a dot is a layer.
  std::vector<Series> dots = {{"recall", {}, -1, "", Series::Style::dots},
                              {"recall, weighted by loss", {}, -1, "", Series::Style::dots}};
  double lowest = 100;
  for (size_t k = 0; k < series[0].points.size(); ++k) {
    for (size_t i = 0; i < 2; ++i) {
      dots[i].points.emplace_back(series[2].points[k].second, series[i].points[k].second);
      lowest = std::min(lowest, series[i].points[k].second);
    }
  }
  const double floor = lowest > 99 ? 99 : lowest > 90 ? std::floor(lowest) : 10 * std::floor(lowest / 10);
  return section(title,
                 line_chart({"layer", 0, last}, {"%", 0, 100}, series) +
                     line_chart({"predicted density, %"}, {"recall of a layer, %", floor, 100}, dots) +
                     "<div class=\"scroll\"><table><tr><th>layer</th><th>method</th><th>recall</th><th>precision</th>"
                     "<th>predicted</th><th>active</th></tr>" +
                     rows + "</table></div>",
                 "On held-out tokens. Recall: share of the active neurons that were predicted.");
}

std::string plan_bars(const Planner& planner, const Plan& plan) {
  std::vector<Bar> bars;
  for (size_t l = 0; l < plan.layers.size(); ++l) {
    const LayerReport& r = plan.layers[l];
    const LayerShape& shape = planner.shape().layers[l];
    const auto ffn = static_cast<double>(shape.ffn_bytes()), attention = static_cast<double>(shape.attention_bytes);
    const double hot = ffn * r.choice.hot / std::max<double>(1, static_cast<double>(shape.n_ff));
    const bool on_gpu = r.choice.attention == engine::Where::gpu;
    bars.push_back({std::to_string(l),
                    {on_gpu ? attention : 0, hot, on_gpu ? 0 : attention, ffn - hot},
                    fmt::format("{:.1f} MiB", (ffn + attention) / 1024 / 1024)});
  }
  return section(
      "What lives where", stacked_bars({"attention, GPU", "neurons, GPU", "attention, CPU", "neurons, CPU"}, bars),
      fmt::format("By layer, under a budget of {:.2f} GiB: {:.1f} tokens/s by the cost model, {:.1f} % of the "
                  "activations on the GPU.",
                  static_cast<double>(plan.placement.vram_budget) / kGiB, plan.tokens_per_second(),
                  100 * plan.hit_rate));
}

std::string speed_by_budget(const Planner& planner, const Planner* with_thresholds) {
  const uint64_t from = planner.smallest_budget(), to = std::max(from + 1, planner.largest_useful_budget());
  std::vector<Series> series;
  for (const Planner* p : {&planner, with_thresholds}) {
    if (p == nullptr) continue;
    Series& s = series.emplace_back(Series{p == &planner ? "nothing left out" : "with the tuned thresholds"});
    for (size_t i = 0; i < kBudgets; ++i) {
      const uint64_t budget = from + (to - from) * i / (kBudgets - 1);
      s.points.emplace_back(static_cast<double>(budget) / kGiB, p->plan(budget).tokens_per_second());
    }
  }
  const double alone = planner.plan(0).tokens_per_second(), first = series.front().points.front().first,
               last = series.front().points.back().first;
  series.push_back({"the CPU alone", {{first, alone}, {last, alone}}, -1, "", Series::Style::dashed});
  const CostModel& c = planner.request().cost;
  return section(
      "What GPU memory buys", line_chart({"GPU memory, GiB", first, last}, {"tokens/s by the plan"}, series),
      fmt::format("By the cost model, for a GPU of {:.0f} GB/s, host memory of {:.0f} GB/s and a link of {:.0f} "
                  "GB/s. The smallest budget that works is {:.2f} GiB.",
                  c.gpu_bandwidth / 1e9, c.cpu_bandwidth / 1e9, c.pcie_bandwidth / 1e9,
                  static_cast<double>(from) / kGiB));
}

Series curve(const json& settings, const std::string& name, const char* x, const char* y, double scale, int mark) {
  Series s{name, {}, mark, "knee"};
  for (const json& j : settings) {
    s.points.emplace_back(j.contains(x) ? j.at(x).get<double>() : j.at("validation").at(x).get<double>(),
                          scale * j.at("validation").at(y).get<double>());
  }
  return s;
}

// By the plan, and measured where it was.
std::vector<Series> speeds(const json& settings, int knee) {
  std::vector<Series> both = {{"by the plan", {}, knee, "knee"}, {"measured"}};
  for (const json& j : settings) {
    const double t = j.at("threshold").get<double>();
    both[0].points.emplace_back(t, j.at("planned_tokens_per_second").get<double>());
    const json& measured = j.at("measured_tokens_per_second");
    if (!measured.is_null()) both[1].points.emplace_back(t, measured.get<double>());
  }
  if (both[1].points.empty()) both.pop_back();
  return both;
}

std::string curve_table(const json& record) {
  std::string rows;
  for (const char* family : {"global", "by_layer"}) {
    for (const json& j : record.at(family)) {
      const json& v = j.at("validation");
      const json& measured = j.at("measured_tokens_per_second");
      rows += fmt::format(
          "<tr><td>{}</td><td>{:.2f} %</td><td>{:.5f}</td><td>{:.4f} ± {:.4f}</td><td>{:+.2f} ± {:.2f} "
          "%</td><td>{:.2f} "
          "%</td><td>{:.1f}</td><td>{}</td></tr>",
          j.at("threshold").is_null() ? "by layer" : fmt::format("{:.3g}", j.at("threshold").get<double>()),
          100 * v.at("density").get<double>(), v.at("kl").get<double>(), v.at("perplexity").get<double>(),
          v.at("perplexity_standard_error").get<double>(), 100 * v.at("perplexity_increase").get<double>(),
          100 * v.at("perplexity_increase_standard_error").get<double>(), 100 * v.at("agreement").get<double>(),
          j.at("planned_tokens_per_second").get<double>(),
          measured.is_null() ? "-" : fmt::format("{:.1f}", measured.get<double>()));
    }
  }
  return "<div class=\"scroll\"><table><tr><th>threshold</th><th>density</th><th>KL</th><th>perplexity</th><th>increase"
         "</th><th>agreement</th><th>plan tok/s</th><th>measured</th></tr>" +
         rows + "</table></div>";
}

std::string tuning(const model::Sidecar& sidecar) {
  const char* const title = "What thresholds cost";
  if (!sidecar.thresholds) return section(title, "", "The sidecar has no thresholds; `hearth tune` chooses them.");
  try {
    const json r = json::parse(sidecar.thresholds->record);
    const std::string chosen = fmt::format(
        "Chosen: {}. All figures are of {} tokens that were not tuned on; KL in nats, ± one standard error.",
        r.at("chosen_by").get<std::string>(), r.at("validation_tokens").get<int64_t>());
    if (r.at("global").empty()) return section(title, "", chosen);
    const int knee = r.at("global_knee").get<int>(), layer_knee = r.at("by_layer_knee").get<int>();
    const Axis threshold{"threshold of |act(gate)|, the same for all layers"};
    std::string body = line_chart(threshold, {"KL to dense, nats (logarithmic)", 0, 0, true},
                                  {curve(r.at("global"), "KL", "threshold", "kl", 1, knee)});
    body += line_chart(threshold, {"perplexity (logarithmic)", 0, 0, true},
                       {curve(r.at("global"), "perplexity", "threshold", "perplexity", 1, knee)});
    body += line_chart(threshold, {"tokens/s"}, speeds(r.at("global"), knee));
    Series global = curve(r.at("global"), "one threshold", "planned_tokens_per_second", "kl", 1, knee);
    Series layered = curve(r.at("by_layer"), "thresholds by layer", "planned_tokens_per_second", "kl", 1, layer_knee);
    const double slow = global.points.front().first,
                 fast = std::max(global.points.back().first, layered.points.back().first);
    Series picked{"chosen", {}, 0, "chosen", Series::Style::dots};
    const json& choice = r.at("chosen");
    picked.points.emplace_back(choice.at("planned_tokens_per_second").get<double>(),
                               choice.at("validation").at("kl").get<double>());
    body += line_chart({"tokens/s by the plan", slow, std::max(fast, slow * 1.001)}, {"KL to dense, nats"},
                       {global, layered, picked});
    return section(title, body + curve_table(r), chosen);
  } catch (const json::exception& e) {
    fail("the sidecar's record of tuning cannot be read ({}); make it again with `hearth tune`", e.what());
  }
}

}  // namespace

std::string html_report(const model::Sidecar& sidecar, const Planner& planner, const Plan& plan,
                        const Planner* with_thresholds) {
  const model::Statistics& s = sidecar.statistics;
  std::string out = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>{0}: hearth "
      "report</title>{1}</head><body>\n<h1>{0}</h1>\n",
      escape_html(sidecar.model_name), page_style());
  if (sidecar.has_statistics()) {
    const bool dense = std::ranges::any_of(sidecar.n_expert_used, [](int64_t n) { return n == 0; });
    const std::string units = !sidecar.has_mixtures() ? "neurons" : dense ? "neurons and experts" : "experts";
    out += fmt::format("<p class=\"note\">{} layers; {} over {} tokens.</p>\n", s.layers.size(), escape_html(s.source),
                       s.tokens);
    out += heat(sidecar) + coverage(s, units) + generalisation(s, units);
  } else {
    out += section("How often neurons fire", "", "The sidecar has no statistics; `hearth profile` gathers them.");
  }
  out += predictors(sidecar) + plan_bars(planner, plan) + speed_by_budget(planner, with_thresholds) + tuning(sidecar);
  return out + "</body></html>\n";
}

}  // namespace hearth::offline
