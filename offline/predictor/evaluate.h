#pragma once
// How good a model's predictors are: layer by layer against what the neurons really do, and end to end against the
// dense model. Every token goes through Device::predict() and ffn_sparse(), as when text is generated.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/predictors.h"
#include "offline/tune/metrics.h"
#include "predictor/thresholds.h"

namespace hearth::offline {

struct EvaluatedLayer {
  std::string method, type;
  int64_t rank = 0;        // 0: gate-bits
  uint64_t bytes = 0;      // of the predictor; 0 = the layer has none and runs dense
  uint64_t ffn_bytes = 0;  // of the layer's FFN
  predictor::Tally tally;  // the truth is that of the predicted run's own inputs
  double seconds = 0;      // of Device::predict(), all tokens
  double seconds_per_token() const;
  int64_t tokens = 0;
};

struct Evaluation {
  std::vector<EvaluatedLayer> layers;
  Comparison comparison;
};

struct EvaluationOptions {
  int64_t window = 512;                // tokens evaluated together, each from an empty context
  int64_t max_tokens = 0;              // 0: all
  std::vector<float> thresholds = {};  // by layer: a neuron is active when |act(gate)| exceeds this; empty: 0
};

struct EvaluationProgress {
  int64_t tokens_done = 0, tokens_total = 0;
  const Comparison* comparison = nullptr;
};

// `dense` and `sparse`: two host devices nobody else uses. Throws Error when no layer has a predictor, or the file's
// down projections cannot be used sparsely. After every window `keep_going` is asked.
Evaluation evaluate_predictors(model::Model& model, Device& dense, Device& sparse, std::span<const int32_t> ids,
                               std::optional<int32_t> bos, const EvaluationOptions& options,
                               FunctionRef<bool(const EvaluationProgress&)> keep_going);

std::string evaluation_table(const Evaluation& evaluation);
nlohmann::json evaluation_json(const Evaluation& evaluation);

}  // namespace hearth::offline
