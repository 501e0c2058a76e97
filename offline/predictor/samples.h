#pragma once
// Inputs of layers' FFNs over a text: what predictors are fitted on. Kept in f16: 20,000 tokens of a 7B model take
// 164 MB a layer, those of a small one nothing to speak of.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/thread_team.h"
#include "model/model.h"
#include "offline/predictor/sample_store.h"
#include "offline/profile/corpus.h"

namespace hearth::offline {

// The use of a token: fitting weights, calibrating thresholds, choosing among candidates.
enum class Part { fit, calibrate, validate };
constexpr int kParts = 3;

struct LayerSamples {
  std::span<const f16_t> ffn;        // [T][n_embd] normed inputs of the FFN
  std::span<const f16_t> predictor;  // [T][n_embd] what the predictor reads, where that is something else
  std::span<const f16_t> read_by_predictor() const { return predictor.empty() ? ffn : predictor; }
};

struct Samples {
  int64_t n_embd = 0;
  model::PredictorInput input = model::PredictorInput::ffn_input;
  size_t first_layer = 0;
  std::vector<LayerSamples> layers[kParts];  // by part, then layer from first_layer on
  std::shared_ptr<SampleStore> store;        // has the values
  int64_t tokens(Part part) const;
  const LayerSamples& at(Part part, size_t layer) const {
    return layers[static_cast<int>(part)].at(layer - first_layer);
  }
  uint64_t bytes() const { return store->bytes(); }
};

struct SampleOptions {
  int64_t max_tokens = 0;  // of all parts together; taken evenly from the whole corpus. 0: all
  int64_t window = 512;    // longest sequence, tokens
  model::PredictorInput input = model::PredictorInput::ffn_input;
  bool only_validate = false;            // all tokens are of that part: a text to test on
  size_t first_layer = 0, n_layers = 0;  // whose inputs are kept; 0: all from the first on
  std::filesystem::path file;            // where they are kept (sample_store.h); empty: in memory
  std::string identity;                  // what they are of: model, texts and the options above
};

struct SampleProgress {
  int64_t tokens_done = 0, tokens_total = 0;
  int64_t tokens_before = 0;  // of tokens_done: gathered by an earlier run
  double seconds = 0;
};

// Bytes that the samples of one layer take.
uint64_t sample_bytes_per_layer(const model::Model& model, const Corpus& corpus, const SampleOptions& options);

// Runs the model, dense, over documents spread evenly over the corpus. Of four documents two are fitted on, one
// calibrates and one validates, so that no text is used twice. After every sequence `keep_going` is asked; nullopt when
// it answers false. With a file, what it holds already is not gathered again. Throws Error when a part would be empty.
std::optional<Samples> gather_samples(model::Model& model, Device& device, const Corpus& corpus,
                                      const SampleOptions& options,
                                      FunctionRef<bool(const SampleProgress&)> keep_going);

}  // namespace hearth::offline
