#include "tools/choose_sparsity.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/error.h"

namespace hearth::tools {

using engine::Sparsity;

std::vector<Way> ways_to_run(const model::Model& model, Sparsity asked, bool thresholded) {
  const auto& layers = model.weights().layers;
  const bool predictors =
      std::any_of(layers.begin(), layers.end(), [](const auto& l) { return bool(l.predictor.weights); });
  if (asked != Sparsity::auto_ || !predictors || model.config().experts || model.why_not_by_neuron()) return {};
  std::vector<Way> ways = {{Sparsity::off, false}};
  if (model.config().ffn.sparse() || thresholded) ways.push_back({Sparsity::exact, thresholded});
  ways.push_back({Sparsity::predict, true});
  return ways;
}

const Way& fastest(std::span<const Way> measured) {
  HEARTH_CHECK(!measured.empty());
  const auto worth = [](const Way& w) { return w.tokens_per_second / (w.approximate ? kApproximateGain : 1.0); };
  return *std::max_element(measured.begin(), measured.end(),
                           [&](const Way& a, const Way& b) { return worth(a) < worth(b); });
}

double measure_decode(engine::Engine& engine, int32_t first) {
  using Clock = std::chrono::steady_clock;
  constexpr int kWarmUp = 2, kTokens = 24, kFewest = 3;
  constexpr std::chrono::duration<double> kLimit{0.3};
  engine::Sequence text = engine.sequence("measurement");
  std::vector<double> seconds;
  int32_t id = first;
  auto begin = Clock::now();
  for (int i = 0; i < kWarmUp + kTokens && text.n_past() < engine.n_ctx(); ++i) {
    if (i == kWarmUp) begin = Clock::now();
    const auto before = Clock::now();
    id = engine.eval_greedy(text, id);
    const auto now = Clock::now();
    if (i >= kWarmUp || engine.n_ctx() <= kWarmUp)
      seconds.push_back(std::chrono::duration<double>(now - before).count());
    if (std::ssize(seconds) >= kFewest && now - begin > kLimit) break;
  }
  engine.reset_density();
  const auto middle = seconds.begin() + std::ssize(seconds) / 2;
  std::nth_element(seconds.begin(), middle, seconds.end());
  return 1 / std::max(*middle, 1e-9);
}

std::string describe(std::span<const Way> measured) {
  std::vector<Way> ways(measured.begin(), measured.end());
  std::stable_sort(ways.begin(), ways.end(),
                   [](const Way& a, const Way& b) { return a.tokens_per_second > b.tokens_per_second; });
  std::string text;
  for (const Way& w : ways) {
    if (w.tokens_per_second <= 0) continue;
    if (!text.empty()) text += ", ";
    text += fmt::format("{} {:.{}f}", engine::to_string(w.sparsity), w.tokens_per_second,
                        w.tokens_per_second < 100 ? 1 : 0);
  }
  return text + " tokens/s";
}

nlohmann::ordered_json to_json(std::span<const Way> measured) {
  nlohmann::ordered_json j;
  for (const Way& w : measured) j[engine::to_string(w.sparsity)] = w.tokens_per_second;
  return j;
}

}  // namespace hearth::tools
