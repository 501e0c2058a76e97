#include "offline/predictor/fit_layers.h"

#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "model/sidecar.h"

namespace hearth::offline {
namespace {

// In a file where there is room for one; fitting goes on without it, but cannot be taken up again in its middle.
std::optional<Samples> gather(model::Model& model, const Corpus& corpus, SampleOptions options,
                              const FitHardware& hardware, FitListener& listener) {
  const auto progress = [&](const SampleProgress& p) {
    listener.gathering(options.first_layer, options.n_layers, p);
    return listener.keep_going();
  };
  const uint64_t bytes = sample_bytes_per_layer(model, corpus, options) * options.n_layers;
  std::error_code unknown;
  const auto space = std::filesystem::space(options.file.parent_path(), unknown);
  const uint64_t there = std::filesystem::exists(options.file) ? std::filesystem::file_size(options.file) : 0;
  if (unknown || space.available + there < bytes + (uint64_t{64} << 20)) {
    log::warn(
        "'{}' has no room for {:.2f} GB of activations; they are kept in memory, and an interrupted run gathers "
        "them again",
        options.file.parent_path().string(), static_cast<double>(bytes) / 1e9);
    options.file.clear();
  }
  const std::unique_ptr<Device> device = hardware.make_device();
  return gather_samples(model, *device, corpus, options, progress);
}

}  // namespace

nlohmann::json fit_key(const model::Model& model, const Corpus& corpus, const FitPlan& plan) {
  nlohmann::json texts = nlohmann::json::array(), candidates = nlohmann::json::array();
  for (const model::ProfiledText& t : corpus.texts) texts.push_back({{"hash", t.hash}, {"bytes", t.bytes}});
  for (const Candidate& c : plan.candidates) candidates.push_back(c.name());
  const FfnShard& ffn = model.weights().layers.front().ffn;
  return {{"version", 1},
          {"model", model::fingerprint(model.file())},
          {"activation", static_cast<int>(ffn.act)},
          {"texts", texts},
          {"tokens", plan.samples.max_tokens},
          {"window", plan.samples.window},
          {"input", model::to_string(plan.samples.input)},
          {"candidates", candidates},
          {"recall", plan.fit.recall},
          {"threshold", plan.fit.threshold},
          {"for_gpu", plan.for_gpu},
          {"epochs", plan.fit.mlp.epochs}};
}

size_t layers_at_once(const model::Model& model, const Corpus& corpus, const FitPlan& plan) {
  const uint64_t each = sample_bytes_per_layer(model, corpus, plan.samples);
  if (each > plan.sample_bytes) {
    fail(
        "the inputs of one layer take {:.2f} GiB, more than the {:.2f} GiB that they may; give fewer --tokens or more "
        "--sample-memory",
        static_cast<double>(each) / (1 << 30), static_cast<double>(plan.sample_bytes) / (1 << 30));
  }
  return std::min<size_t>(plan.sample_bytes / each, model.weights().layers.size());
}

bool fit_layers(model::Model& model, const Corpus& corpus, const FitPlan& plan, const FitWork& work,
                const FitHardware& hardware, FitListener& listener) {
  for (const Candidate& c : plan.candidates) check_candidate(c, model.config().n_embd);
  const size_t end = plan.first_layer + plan.n_layers, at_once = layers_at_once(model, corpus, plan);
  HEARTH_CHECK(plan.n_layers > 0 && end <= model.weights().layers.size());
  SampleOptions options = plan.samples;
  options.file = work.samples();
  options.identity = fit_key(model, corpus, plan).dump();
  for (size_t group = plan.first_layer / at_once * at_once; group < end; group += at_once) {
    const size_t first = std::max(group, plan.first_layer), last = std::min(group + at_once, end);
    std::vector<size_t> missing;
    for (size_t l = first; l < last; ++l) {
      if (!work.has(l)) missing.push_back(l);
    }
    if (missing.empty()) continue;
    options.first_layer = first, options.n_layers = last - first;
    const std::optional<Samples> samples = gather(model, corpus, options, hardware, listener);
    if (!samples) return false;
    for (const size_t layer : missing) {
      LayerFit fit(model, layer, *samples, plan.fit, hardware.products, hardware.team);
      auto chosen = choose_predictor(fit, plan.candidates, model.weights().layers[layer].ffn, CostModel{}, plan.for_gpu,
                                     [&] { return listener.keep_going(); });
      if (!chosen) return false;
      listener.fitted(layer, *chosen);
      work.keep(layer, std::move(chosen->predictor));
      if (!listener.keep_going()) return false;
    }
    work.drop_samples();
  }
  return true;
}

}  // namespace hearth::offline
