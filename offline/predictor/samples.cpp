#include "offline/predictor/samples.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "engine/engine.h"

namespace hearth::offline {
namespace {

using model::PredictorInput;

// Notes the input of every FFN, and what its predictor is to read.
class SamplingDevice final : public ForwardingDevice {
 public:
  SamplingDevice(Device& inner, int64_t n_embd, size_t n_layer, Samples& samples)
      : ForwardingDevice(inner), n_embd_(n_embd), n_layer_(n_layer), samples_(samples) {}

  void begin_sequence(Part part) { part_ = part; }

  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override {
    if (samples_.input == PredictorInput::residual) download(x, T, residual_[out.x]);
    ForwardingDevice::norm(args, x, T, out);
  }
  void ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) override {
    const size_t layer = layers_.try_emplace(shard.gate.data, layers_.size()).first->second;
    HEARTH_CHECK(layer < n_layer_, "more FFNs than layers");
    LayerSamples& s = samples_.layers[static_cast<int>(part_)][layer];
    download(in.x, T, current_);
    append(current_, s.ffn);
    if (samples_.input == PredictorInput::residual) append(residual_.at(in.x), s.predictor);
    if (samples_.input == PredictorInput::previous_ffn_input) {
      append(layer == 0 ? current_ : previous_, s.predictor);
      previous_.swap(current_);
    }
    ForwardingDevice::ffn_dense(shard, in, T, y_bias, y);
  }

 private:
  void download(const float* x, int64_t T, std::vector<float>& to) {
    to.resize(static_cast<size_t>(T * n_embd_));
    inner_.download(to.data(), x, to.size() * sizeof(float));
  }
  void append(const std::vector<float>& values, std::vector<f16_t>& to) const {
    const size_t before = to.size();
    to.resize(before + values.size());
    traits(DType::f16).from_float(values.data(), to.data() + before, static_cast<int64_t>(values.size()));
  }

  int64_t n_embd_;
  size_t n_layer_;
  Samples& samples_;
  Part part_ = Part::fit;
  std::unordered_map<const void*, size_t> layers_;                 // by the gate's address, in order of first use
  std::unordered_map<const float*, std::vector<float>> residual_;  // by the address of what the norm made of it
  std::vector<float> current_, previous_;
};

// Documents come as one or more sequences; those of one document must share a part.
Part part_of(size_t sequence, bool only_validate) {
  if (only_validate) return Part::validate;
  constexpr Part parts[] = {Part::fit, Part::calibrate, Part::fit, Part::validate};
  return parts[sequence % 4];
}

// Sequences taken evenly from the corpus, in its order, until they have the tokens that are wanted.
std::vector<const Sequence*> choose(const Corpus& corpus, int64_t max_tokens) {
  const auto all = static_cast<int64_t>(corpus.tokens());
  std::vector<const Sequence*> chosen;
  int64_t seen = 0, taken = 0;
  for (const Sequence& s : corpus.sequences) {
    const auto n = static_cast<int64_t>(s.ids.size());
    seen += n;
    // Taken whenever the share taken so far lags behind the share passed so far.
    const bool take = max_tokens <= 0 || max_tokens >= all ||
                      static_cast<double>(taken) * static_cast<double>(all) <=
                          static_cast<double>(max_tokens) * static_cast<double>(seen - n);
    if (!take) continue;
    chosen.push_back(&s);
    taken += n;
    if (max_tokens > 0 && taken >= max_tokens) break;
  }
  return chosen;
}

}  // namespace

int64_t Samples::tokens(Part part) const {
  const auto& l = layers[static_cast<int>(part)];
  return l.empty() || n_embd == 0 ? 0 : static_cast<int64_t>(l.front().ffn.size()) / n_embd;
}

uint64_t Samples::bytes() const {
  uint64_t sum = 0;
  for (const auto& part : layers) {
    for (const LayerSamples& l : part) sum += (l.ffn.size() + l.predictor.size()) * sizeof(f16_t);
  }
  return sum;
}

Samples gather_samples(model::Model& model, Device& device, const Corpus& corpus, const SampleOptions& options,
                       FunctionRef<bool(const SampleProgress&)> keep_going) {
  const model::Config& c = model.config();
  Samples samples;
  samples.n_embd = c.n_embd;
  samples.input = options.input;
  for (auto& part : samples.layers) part.resize(static_cast<size_t>(c.n_layer));
  SamplingDevice sampling(device, c.n_embd, static_cast<size_t>(c.n_layer), samples);
  engine::EngineOptions engine_options;
  engine_options.n_ctx = options.window;
  engine_options.sparsity = engine::Sparsity::off;
  engine_options.use_graph = false;
  engine::Engine engine(model, sampling, engine_options);

  const std::vector<const Sequence*> chosen = choose(corpus, options.max_tokens);
  SampleProgress progress;
  for (const Sequence* s : chosen) progress.tokens_total += static_cast<int64_t>(s->ids.size());
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < chosen.size(); ++i) {
    engine.truncate(0);
    sampling.begin_sequence(part_of(i, options.only_validate));
    engine.eval(chosen[i]->ids);
    progress.tokens_done += static_cast<int64_t>(chosen[i]->ids.size());
    progress.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!keep_going(progress)) break;
  }
  for (const Part part : {Part::fit, Part::calibrate, Part::validate}) {
    if (options.only_validate && part != Part::validate) continue;
    if (samples.tokens(part) < 2) {
      fail("the texts have {} documents or pieces of one, and fitting a predictor needs 4 or more; give more text",
           chosen.size());
    }
  }
  return samples;
}

}  // namespace hearth::offline
