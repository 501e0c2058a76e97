#include "offline/tune/record.h"

#include <fmt/format.h>

#include <cmath>

namespace hearth::offline {
namespace {

using nlohmann::json;

template <typename T>
json or_null(const std::optional<T>& v) {
  return v ? json(*v) : json(nullptr);
}

json measurement_json(const Measurement& m) {
  if (m.windows == 0) return nullptr;
  json j = summary_json(m.comparison);
  j["density"] = m.density();
  return j;
}

json setting_json(const CurveSetting& s) {
  return {{"threshold", or_null(s.global)},
          {"thresholds", s.thresholds},
          {"fit", measurement_json(s.fit)},
          {"validation", measurement_json(s.validation)},
          {"planned_tokens_per_second", s.planned_tps},
          {"hit_rate", s.hit_rate},
          {"measured_tokens_per_second", or_null(s.measured_tps)}};
}

json curve_json(const std::vector<CurveSetting>& settings) {
  json list = json::array();
  for (const CurveSetting& s : settings) list.push_back(setting_json(s));
  return list;
}

std::string name_of(const CurveSetting& s, size_t index) {
  return s.global ? fmt::format("{:.3g}", *s.global) : fmt::format("path {}", index);
}

std::string row(const std::string& name, const CurveSetting& s, bool marked) {
  const Comparison& c = s.validation.comparison;
  const std::string measured = s.measured_tps ? fmt::format("{:.1f}", *s.measured_tps) : "-";
  return fmt::format(
      "{:>10} {:>8.2f} % {:>9.5f} ± {:.5f} {:>9.3f} {:>+8.2f} ± {:.2f} % {:>7.2f} % {:>6.1f} % {:>10.1f} {:>10}{}\n",
      name, 100 * s.validation.density(), c.kl.mean(), c.kl.standard_error(), c.other.perplexity(),
      100 * c.perplexity_increase(), 100 * c.perplexity_increase_error(), 100 * c.agreement.mean(), 100 * s.hit_rate,
      s.planned_tps, measured, marked ? "  <- knee" : "");
}

std::string header(const char* first) {
  return fmt::format("{:>10} {:>10} {:>19} {:>9} {:>18} {:>9} {:>8} {:>10} {:>10}\n", first, "density", "KL to dense",
                     "perplexity", "increase", "agreement", "hit", "plan tok/s", "measured");
}

}  // namespace

json tune_record(const TuneResult& result, const TuneRequest& request, const TuneContext& context) {
  json texts = json::array();
  for (const model::ProfiledText& t : context.texts) {
    texts.push_back({{"name", t.name}, {"hash", t.hash}, {"bytes", t.bytes}});
  }
  const TuneGoal& g = request.goal;
  const CostModel& cost = request.plan.cost;
  return {{"model", context.model},
          {"fingerprint", context.fingerprint},
          {"device", context.device},
          {"texts", std::move(texts)},
          {"separate_validation", context.separate_validation},
          {"window", context.window},
          {"fit_tokens", context.fit_tokens},
          {"validation_tokens", context.validation_tokens},
          {"goal",
           {{"max_kl", or_null(g.max_kl)},
            {"max_ppl_increase", or_null(g.max_ppl_increase)},
            {"target_tokens_per_second", or_null(g.target_tps)},
            {"density", or_null(g.density)}}},
          {"plan",
           {{"vram_budget", request.plan.vram_budget},
            {"gpu_bandwidth", cost.gpu_bandwidth},
            {"cpu_bandwidth", cost.cpu_bandwidth},
            {"pcie_bandwidth", cost.pcie_bandwidth}}},
          {"global", curve_json(result.global)},
          {"global_knee", result.global_knee},
          {"by_layer", curve_json(result.layered)},
          {"by_layer_knee", result.layered_knee},
          {"chosen", setting_json(result.chosen)},
          {"chosen_by", result.chosen_by},
          {"steps_back", result.steps_back}};
}

std::string tune_table(const TuneResult& result) {
  std::string out;
  if (!result.global.empty()) {
    out += "One threshold of |act(gate)| for all layers:\n" + header("threshold");
    for (size_t i = 0; i < result.global.size(); ++i)
      out += row(name_of(result.global[i], i), result.global[i], i == result.global_knee);
    out += "\nThresholds by layer, along the path of least loss per time saved:\n" + header("setting");
    for (size_t i = 0; i < result.layered.size(); ++i)
      out += row(name_of(result.layered[i], i), result.layered[i], i == result.layered_knee);
    out += "\n";
  }
  out += fmt::format("Chosen: {}{}\n", result.chosen_by,
                     result.steps_back > 0 ? fmt::format(" ({} steps back on the other text)", result.steps_back) : "");
  out += header("") + row("chosen", result.chosen, false);
  out +=
      "\nAll figures are of text that was not tuned on, ± one standard error, the increase token by token against "
      "dense. "
      "hit: share of the activations on the GPU, and plan: tokens/s, both by the cost model; measured: decoding on "
      "this "
      "machine.\n";
  return out;
}

}  // namespace hearth::offline
