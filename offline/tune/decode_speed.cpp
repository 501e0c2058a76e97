#include "offline/tune/decode_speed.h"

#include <algorithm>
#include <chrono>

namespace hearth::offline {

double measure_decode(model::Model& model, Device& device, const Thresholds& thresholds,
                      std::span<const int32_t> prompt, int64_t n) {
  engine::EngineOptions options;
  options.n_ctx = static_cast<int64_t>(prompt.size()) + n + 1;
  // Mixtures have no predictors, and without a threshold nothing of most is left out.
  options.sparsity = model.config().experts ? engine::Sparsity::auto_ : engine::Sparsity::exact;
  options.layer_thresholds = thresholds;
  engine::Engine engine(model, device, options);
  engine::Sequence text = engine.sequence();
  double best = 0;
  for (int run = 0; run < 3; ++run) {
    text.truncate(0);
    engine.eval(text, prompt);
    int32_t id = engine.eval_greedy(text, prompt.back());  // not timed: records the graph
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < n; ++i) id = engine.eval_greedy(text, id);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, static_cast<double>(n) / seconds);
  }
  return best;
}

}  // namespace hearth::offline
