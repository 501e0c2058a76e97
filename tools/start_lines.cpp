#include "tools/start_lines.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/log.h"
#include "tools/figures.h"
#include "tools/fit_memory.h"

namespace hearth::tools {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

std::string rate_text(double tokens_per_second) {
  return fmt::format("{:.{}f} tokens/s", tokens_per_second, tokens_per_second < 100 ? 1 : 0);
}

// Share of the neurons, experts' too, that a placement has on the GPU.
double share_on_gpu(const model::Model& m, const engine::Placement& p) {
  double hot = 0, all = 0;
  for (size_t l = 0; l < p.layers.size(); ++l) {
    const model::LayerWeights& w = m.weights().layers[l];
    hot += static_cast<double>(p.layers[l].gpu_bucket.size()), all += static_cast<double>(w.ffn.n());
    for (size_t id = 0; id < w.experts.size(); ++id) {
      const int64_t n = w.experts[id].ffn.n();
      hot += static_cast<double>(p.layers[l].n_on_gpu(id, n)), all += static_cast<double>(n);
    }
  }
  return all > 0 ? hot / all : 0;
}

// Every neuron, or expert, of every layer.
std::vector<std::vector<int32_t>> all_ids(const model::Model& m) {
  std::vector<std::vector<int32_t>> all;
  for (const model::LayerWeights& w : m.weights().layers) {
    std::vector<int32_t>& ids = all.emplace_back(w.router ? w.experts.size() : static_cast<size_t>(w.ffn.n()));
    std::iota(ids.begin(), ids.end(), 0);
  }
  return all;
}

// Expected of a model that is not divided, by the plan that has it where it is; nullopt for other kernels than usual.
std::optional<double> plan_speed(Session& session, const ModelOptions& o) {
  if (o.isa || o.no_measure) return std::nullopt;
  try {
    std::string why;
    const std::optional<cuda::GpuInfo> gpu = session.on_gpu() ? find_gpu(*session.gpu(), why) : std::nullopt;
    offline::PlanRequest request;
    request.n_ctx = session.engine().n_ctx(), request.n_batch = session.engine().n_batch();
    request.sparsity = session.engine().sparsity();
    request.vram_budget = gpu ? gpu->total_bytes : 0;
    set_machine({.gpu = o.gpu, .threads = o.threads}, gpu, session.model(), request);
    request.host_memory = 0;                                  // it is there already
    if (gpu) request.gpu_buckets = all_ids(session.model());  // even if the CPU alone should be faster
    const offline::Planner planner =
        make_planner(session.model(), {session.sidecar(), session.thresholds(), std::nullopt}, request);
    return planner.plan(gpu ? planner.largest_useful_budget() : 0).tokens_per_second();
  } catch (const Error& e) {
    log::debug("how fast this should be is not known: {}", e.what());
    return std::nullopt;
  }
}

StartFacts facts_of(Session& session, const ModelOptions& o) {
  const model::Model& m = session.model();
  StartFacts f;
  f.model = o.model;
  f.threads = session.team().size();
  f.place = session.planned()  ? StartFacts::Place::divided
            : session.on_gpu() ? StartFacts::Place::gpu
                               : StartFacts::Place::cpu;
  if (session.planned()) {
    f.vram_budget = session.planned()->placement.vram_budget;
    f.on_gpu = share_on_gpu(m, session.planned()->placement);
  }
  for (const Way& way : session.measured_ways()) {
    if (way.sparsity == session.engine().sparsity()) f.tokens_per_second = way.tokens_per_second, f.measured = true;
  }
  if (!f.measured)
    f.tokens_per_second = session.planned() ? session.planned()->tokens_per_second : plan_speed(session, o);
  const auto& layers = m.weights().layers;
  f.mixture = static_cast<bool>(m.config().experts);
  f.sparse_family = m.config().ffn.sparse();
  f.by_neuron = f.mixture ? f.place == StartFacts::Place::gpu || !m.why_experts_are_whole() : !m.why_not_by_neuron();
  f.profiled = session.sidecar() != nullptr && session.sidecar()->has_statistics();
  f.predictors = std::any_of(layers.begin(), layers.end(), [](const auto& l) { return bool(l.predictor.weights); });
  f.weight_bytes = m.weight_bytes();
  f.wide = f.weight_bytes > 15 * m.parameters() / 8;
  f.q8_0_bytes = bytes_as(m, DType::q8_0), f.q4_k_bytes = bytes_as(m, DType::q4_k);
  return f;
}

}  // namespace

std::string plan_line(const StartFacts& f) {
  std::string text = "plan: ";
  switch (f.place) {
    case StartFacts::Place::cpu:
      text += fmt::format("all on the CPU, {} threads", f.threads);
      break;
    case StartFacts::Place::gpu:
      text += "all on the GPU";
      break;
    case StartFacts::Place::divided:
      text += fmt::format("{:.0f} % of the {} in {} of GPU memory, the others on the CPU at the same time",
                          100 * f.on_gpu, f.mixture ? "experts" : "neurons", human_bytes(f.vram_budget));
  }
  if (!f.tokens_per_second) return text;
  return text +
         fmt::format("; {} {}", rate_text(*f.tokens_per_second), f.measured ? "when it was measured" : "expected");
}

std::vector<std::string> hints(const StartFacts& f) {
  std::vector<std::string> all;
  const bool divided = f.place == StartFacts::Place::divided, large = f.weight_bytes >= kGiB;
  if (!f.by_neuron && f.sparse_family) {
    all.push_back("--transpose-down computes only the neurons that fire");
  } else if (!f.by_neuron && !f.mixture && divided) {
    all.push_back("--transpose-down divides layers between GPU and CPU neuron by neuron");
  }
  if (divided && !f.profiled && (f.sparse_family || f.mixture)) {
    all.push_back(fmt::format("`hearth profile -m {} -f TEXT` finds the {} that the GPU should have", f.model,
                              f.mixture ? "experts" : "neurons"));
  }
  if (f.sparse_family && !f.mixture && f.by_neuron && !f.predictors && (divided || large)) {
    all.push_back(fmt::format("`hearth predictor fit -m {} -f TEXT` reads fewer gates, approximately", f.model));
  }
  if (divided && !f.wide && f.q4_k_bytes < f.vram_budget && f.q4_k_bytes < f.weight_bytes * 9 / 10) {
    all.push_back(fmt::format("in q4_k ({}) the GPU holds all of it (`hearth quantize`)", human_bytes(f.q4_k_bytes)));
  }
  if (f.wide && large) {
    all.push_back(fmt::format("in q8_0 a token reads {:.0f} % of the bytes, in q4_k {:.0f} % (`hearth quantize`)",
                              100 * static_cast<double>(f.q8_0_bytes) / static_cast<double>(f.weight_bytes),
                              100 * static_cast<double>(f.q4_k_bytes) / static_cast<double>(f.weight_bytes)));
  }
  return all;
}

void print_start(Session& session, const ModelOptions& options) {
  if (log::level() == log::Level::quiet) return;
  const StartFacts facts = facts_of(session, options);
  log::info("{}", plan_line(facts));
  std::string text;
  for (const std::string& hint : hints(facts)) text += (text.empty() ? "" : "; ") + hint;
  if (!text.empty()) log::info("faster: {}", text);
}

}  // namespace hearth::tools
