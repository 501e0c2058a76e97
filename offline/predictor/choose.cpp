#include "offline/predictor/choose.h"

#include "core/error.h"

namespace hearth::offline {

std::optional<ChosenPredictor> choose_predictor(LayerFit& fit, const std::vector<Candidate>& candidates,
                                                const FfnShard& shard, const CostModel& cost, bool gpu,
                                                FunctionRef<bool()> keep_going) {
  HEARTH_CHECK(!candidates.empty());
  std::optional<ChosenPredictor> best;
  const auto reaches = [](const ChosenPredictor& c) {
    return c.predictor.figures.loss_recall >= c.predictor.figures.recall_target;
  };
  for (const Candidate& candidate : candidates) {
    if (!keep_going()) return std::nullopt;
    ChosenPredictor c{candidate, fit.fit(candidate), 0};
    c.seconds = expected_seconds(c.predictor, shard, cost, gpu);
    const bool better =
        !best || (reaches(c) != reaches(*best)
                      ? reaches(c)
                      : (reaches(c) ? c.seconds < best->seconds
                                    : c.predictor.figures.loss_recall > best->predictor.figures.loss_recall));
    if (better) best = std::move(c);
  }
  return best;
}

}  // namespace hearth::offline
