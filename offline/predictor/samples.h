#pragma once
// Inputs of every layer's FFN over a text: what predictors are fitted on. Kept in f16, so that 20,000 tokens of a 7B
// model (32 layers of 4096) take 5 GB and those of a small one nothing to speak of.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/model.h"
#include "offline/profile/corpus.h"

namespace hearth::offline {

// What a token is used for: fitting weights, calibrating thresholds, choosing among candidates.
enum class Part { fit, calibrate, validate };
constexpr int kParts = 3;

struct LayerSamples {
  std::vector<f16_t> ffn;        // [T][n_embd] normed inputs of the FFN
  std::vector<f16_t> predictor;  // [T][n_embd] what the predictor reads, where that is something else
  const std::vector<f16_t>& read_by_predictor() const { return predictor.empty() ? ffn : predictor; }
};

struct Samples {
  int64_t n_embd = 0;
  model::PredictorInput input = model::PredictorInput::ffn_input;
  std::vector<LayerSamples> layers[kParts];  // by part, then layer
  int64_t tokens(Part part) const;
  const LayerSamples& at(Part part, size_t layer) const { return layers[static_cast<int>(part)][layer]; }
  uint64_t bytes() const;
};

struct SampleOptions {
  int64_t max_tokens = 0;  // of all parts together; taken evenly from the whole corpus. 0: all
  int64_t window = 512;    // longest sequence, tokens
  model::PredictorInput input = model::PredictorInput::ffn_input;
  bool only_validate = false;  // all tokens are of that part: a text to test on
};

struct SampleProgress {
  int64_t tokens_done = 0, tokens_total = 0;
  double seconds = 0;
};

// Runs the model, dense, over documents spread evenly over the corpus. Of four documents two are fitted on, one
// calibrates and one validates, so that no text is used twice. After every sequence `keep_going` is asked; when it
// answers false, what was gathered is returned. Throws Error when a part would be empty, or when layer 0 is to be
// predicted from the layer before it.
Samples gather_samples(model::Model& model, Device& device, const Corpus& corpus, const SampleOptions& options,
                       FunctionRef<bool(const SampleProgress&)> keep_going);

}  // namespace hearth::offline
