// A session's choice between the ways to run its model, and the words for it.
#include <algorithm>

#include "core/error.h"
#include "core/log.h"
#include "offline/plan/machine.h"
#include "tools/common.h"

namespace hearth::tools {

using engine::Sparsity;

// The kept speeds are valid for this, beside the processor, the GPU and the threads.
std::string Session::speeds_key(const ModelOptions& o) const {
  std::string key = fmt::format("{} {}", HEARTH_VERSION, model::fingerprint(model_->file()));
  if (sidecar_ && sidecar_->file) key += " sidecar " + model::fingerprint(*sidecar_->file);
  if (!thresholds_.words.empty()) key += ", " + thresholds_.words;
  if (!thresholds_.score_words.empty()) key += ", " + thresholds_.score_words;
  key += fmt::format(", device {}{}", o.device, o.isa ? " " + *o.isa : "");
  if (o.vram_budget) key += fmt::format(", budget {:g} GiB", *o.vram_budget);
  if (o.gpu_index) key += ", index " + *o.gpu_index;
  if (o.link_share) key += fmt::format(", link share {:g}", *o.link_share);
  for (const auto& [given, name] :
       {std::pair(o.no_look_ahead, "no look-ahead"), std::pair(o.mmap, "mmap"), std::pair(o.no_mmap, "no mmap"),
        std::pair(o.no_graph, "no graph"), std::pair(o.transpose_down.wanted, "transposed")}) {
    if (given) key += fmt::format(", {}", name);
  }
  return key;
}

void Session::stop() {
  text_.reset(), engine_.reset(), profiler_.reset(), host_profiler_.reset();
  device_.reset(), host_device_.reset(), planned_.reset(), gpu_.reset();
}

namespace {

// Keeps a start from saying again what the first one said.
class Silence {
 public:
  Silence() : level_(log::level()) { log::set_level(log::Level::quiet); }
  ~Silence() { log::set_level(level_); }
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;

 private:
  log::Level level_;
};

}  // namespace

// Starts the model the way that is fastest here. Ways are started one after the other, each as it would run: with its
// own plan and its own layout of the weights.
void Session::start_fastest(const ModelOptions& options) {
  std::vector<Way> ways;
  const bool decided = options.plan || options.no_measure;  // by the plan, or without asking
  if (!decided) ways = ways_to_run(*model_, engine::parse_sparsity(options.sparsity), thresholded());
  if (ways.size() < 2) return start(options);
  const auto start_way = [&](const Way& way) {
    stop();
    ModelOptions o = options;
    if (way.sparsity != Sparsity::predict) o.sparsity = engine::to_string(way.sparsity);  // auto: as a plan mixes them
    start(o);
  };
  std::string why;
  const std::optional<cuda::GpuInfo> gpu =
      options.device == "cpu" || options.isa ? std::nullopt : find_gpu(options.gpu, why);
  std::string key = speeds_key(options);
  if (gpu && !options.vram_budget) key += fmt::format(", {} GiB free", gpu->free_bytes >> 30);
  const std::string machine = offline::machine_key(team_->size(), gpu ? gpu->name : "");
  const auto cache = offline::machine_cache_path();
  offline::Speeds kept = offline::kept_speeds(cache, machine, key);
  const bool known = std::all_of(ways.begin(), ways.end(), [&](Way& way) {
    const auto it = kept.find(engine::to_string(way.sparsity));
    if (it != kept.end()) way.tokens_per_second = it->second;
    return it != kept.end();
  });
  if (known) {
    start_way(fastest(ways));
    measured_ways_ = std::move(ways);
    return;
  }
  start(options);
  if (engine_->sparsity() != Sparsity::predict) return;  // a plan found that predictors pay nowhere
  log::info("measuring what predictors, gates and every neuron bring here, once (--no-measure does not)");
  const text::Tokenizer* const words = tokenizer();
  const int32_t first = words != nullptr && words->bos() ? *words->bos() : 0;
  const Way* running = &ways.back();
  const auto measure = [&](Way& way) {
    way.tokens_per_second = 0;
    try {
      if (running != &way) running = nullptr, start_way(way), running = &way;
      way.tokens_per_second = measure_decode(*engine_, first);
    } catch (const Error& e) {  // a plan without predictors may need more memory than there is
      log::debug("{} cannot be run here: {}", engine::to_string(way.sparsity), e.what());
    }
  };
  const Silence again;
  measure(ways.back());
  std::for_each(ways.begin(), ways.end() - 1, measure);
  for (const Way& way : ways) kept[engine::to_string(way.sparsity)] = way.tokens_per_second;
  offline::keep_speeds(cache, machine, key, kept);
  const Way& best = fastest(ways);
  if (running != &best) start_way(best);
  measured_ways_ = std::move(ways);
}

std::string Session::sparsity_reason(const ModelOptions& options) {
  const std::string why = sparsity_reason_alone(options);
  if (measured_ways_.empty()) return why;
  const std::string speeds = "measured here: " + describe(measured_ways_);
  return why.empty() ? speeds : why + "; " + speeds;
}

std::string Session::sparsity_reason_alone(const ModelOptions& options) {
  const model::FfnDescription& ffn = model_->config().ffn;
  if (engine_->sparsity() == engine::Sparsity::predict) {
    std::string method;
    for (const model::LayerWeights& layer : model_->weights().layers) {
      if (layer.predictor.weights) method = layer.predictor.method;
    }
    std::string left_out = fmt::format("what the {} predictors miss", method);
    if (!thresholds_.score_words.empty()) left_out += fmt::format(" ({})", thresholds_.score_words);
    if (!thresholds_.words.empty()) left_out += ", and by " + thresholds_.words + ",";
    return fmt::format("approximate: {} is left out; --predictor none does without predictors", left_out);
  }
  if (engine_->sparsity() != engine::Sparsity::off) {
    const bool whole = on_gpu() && !planned() && model_->config().experts;
    if (!thresholds_.words.empty())
      return "approximate: " + thresholds_.words + (whole ? ", which the GPU applies and is no faster by" : "");
    return ffn.sparse() ? fmt::format("{} gates are exactly zero for many neurons", ffn.activation) : "as asked";
  }
  if (options.sparsity == "off") return "as asked";
  if (!measured_ways_.empty()) return "every neuron is computed";
  if (!ffn.sparse() && !thresholded()) {
    return fmt::format("{} is never exactly zero; --sparse-threshold allows an approximation", ffn.activation);
  }
  if (model_->config().experts) {
    return model_->why_experts_are_whole().value_or("the GPU computes every neuron of an expert");
  }
  return model_->why_not_by_neuron().value_or("");
}

}  // namespace hearth::tools
