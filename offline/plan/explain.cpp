#include "offline/plan/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "offline/plan/explain_experts.h"

namespace hearth::offline {
namespace {

using engine::Selection;
using engine::Where;
using nlohmann::json;

constexpr double kMiB = 1024.0 * 1024, kGiB = kMiB * 1024;

struct Row {
  const char* purpose;
  uint64_t bytes;
};
std::vector<Row> rows_of(const GpuBytes& g, bool has_experts) {
  return {{"CUDA context", g.context},        {"margin", g.margin},      {"staging for prompts", g.staging},
          {"activations", g.activations},     {"scratch", g.scratch},    {"norms and biases", g.norms},
          {"attention weights", g.attention}, {"KV cache", g.kv_cache},  {"predictors", g.predictors},
          {has_experts ? "experts" : "hot neurons", g.neurons},         {"output head", g.output}, {"token embedding", g.embedding}};
}

int64_t layers_with_attention(const Plan& plan) {
  return std::count_if(plan.layers.begin(), plan.layers.end(),
                       [](const LayerReport& l) { return l.choice.attention == Where::gpu; });
}

// Runs of layers that are placed alike share a line.
bool alike(const LayerReport& a, const LayerReport& b) {
  return a.choice.attention == b.choice.attention && a.choice.selection == b.choice.selection &&
         a.choice.predictor == b.choice.predictor && a.choice.hot == b.choice.hot &&
         a.choice.neurons == b.choice.neurons && a.n_ff == b.n_ff && a.activations == b.activations;
}

std::string layer_rows(const Plan& plan) {
  std::string out = fmt::format("{:>7} {:>9} {:>9} {:>8} {:>8} {:>8} {:>9} {:>9} {:>9} {:>8}\n", "layer", "attention",
                                "neurons", "density", "hot", "hit", "GPU MiB", "GPU MB/t", "CPU MB/t", "µs");
  for (size_t first = 0, next = 0; first < plan.layers.size(); first = next) {
    while (next < plan.layers.size() && alike(plan.layers[first], plan.layers[next])) ++next;
    const LayerReport& l = plan.layers[first];
    const auto n = static_cast<double>(l.n_ff);
    const Traffic traffic = [&] {
      Traffic t = l.attention;
      return t += l.ffn;
    }();
    const std::string name = next - first > 1 ? fmt::format("{}-{}", first, next - 1) : std::to_string(first);
    out +=
        fmt::format("{:>7} {:>9} {:>9} {:>7.1f}% {:>7.1f}% {:>7.1f}% {:>9.1f} {:>9.2f} {:>9.2f} {:>8.1f}\n", name,
                    to_string(l.choice.attention), to_string(l.choice.selection), 100 * l.activations / n,
                    100 * l.hot / n, l.activations > 0 ? 100 * l.hot_activations / l.activations : 0.0,
                    static_cast<double>(l.gpu_bytes) / kMiB, traffic.gpu() / 1e6, traffic.cpu() / 1e6, 1e6 * l.seconds);
  }
  return out;
}

std::string why_attention(const Plan& plan) {
  const auto n = static_cast<int64_t>(plan.layers.size()), on_gpu = layers_with_attention(plan);
  if (on_gpu == n) return "attention and KV cache: all on the GPU; every byte is read for every token";
  return fmt::format(
      "attention and KV cache: {} of {} layers on the GPU; the cache of a layer takes memory for {} positions and is "
      "read "
      "for {} on average, so that the bytes of other tensors save more",
      on_gpu, n, plan.placement.n_ctx, plan.n_kv);
}

std::string named_neurons(const Planner& planner) {
  double sum = 0;
  int n = 0;
  for (const LayerShape& l : planner.shape().layers) {
    if (l.named_per_active) sum += *l.named_per_active, ++n;
  }
  if (n > 0) return fmt::format("they name {:.2f} neurons for each active one, as measured", sum / n);
  return fmt::format("they are taken to name {:.2f} neurons for each active one (`hearth profile` tries them)",
                     planner.request().cost.predicted_per_active);
}

std::string why_neurons(const Planner& planner, const Plan& plan) {
  int64_t hot = 0, neurons = 0, predicted = 0, foreseen = 0, all_linked = 0;
  for (const LayerReport& l : plan.layers) {
    hot += l.choice.hot, neurons += l.n_ff;
    predicted += l.choice.selection == Selection::predictor ? 1 : 0;
    foreseen += l.choice.look_ahead ? 1 : 0;
    all_linked += l.ffn.link > 0 && l.ffn.cpu_sparse <= 0 ? 1 : 0;
  }
  const auto share = [&](int64_t k) { return 100.0 * static_cast<double>(k) / static_cast<double>(neurons); };
  if (has_experts(planner)) return why_experts(planner, plan);
  std::string out = fmt::format("neurons: {:.1f} % hot, making {:.1f} % of the activations ({})", share(hot),
                                100 * plan.hit_rate, planner.frequencies().source);
  if (!planner.request().gpu_buckets.empty()) out += "\n  hot neurons: those of the GPU index, not the plan's choice";
  if (plan.traffic.link > 0) {
    out += fmt::format(
        "\n  over the link: the GPU reads {:.0f} % of what tokens need of cold neurons from host memory itself, "
        "while the CPU reads the rest",
        100 * plan.link_share);
    if (all_linked > 0) {
      out += fmt::format("; in {} layers all of it, since asking the CPU and waiting for its answer would take longer",
                         all_linked);
    }
  }
  if (predicted > 0) {
    out +=
        fmt::format("\n  predictors: in {} layers, where reading the predictor costs less than reading every gate; {}",
                    predicted, named_neurons(planner));
    if (foreseen > 0) {
      out += fmt::format(
          "\n  look-ahead: in {} layers the GPU evaluates the predictor on the layer before as well, so that the CPU "
          "can fetch {:.0f} % of its rows while the GPU is at the attention",
          foreseen, 100 * planner.request().cost.foreseen_share);
    }
  } else if (planner.shape().layers.front().predictor_bytes > 0) {
    out += "\n  predictors: not used; evaluating the gates is as fast here and misses nothing";
  }
  if (!planner.shape().layers.front().by_neuron) {
    out +=
        "\n  the file stores `down` quantised and untransposed: each FFN runs dense and on one side; `hearth quantize` "
        "makes a file whose neurons can be placed";
  }
  return out;
}

std::string why_head(const Planner& planner, const Plan& plan) {
  const bool head = plan.placement.output == Where::gpu, embedding = plan.placement.embedding == Where::gpu;
  std::string out = head ? "output head: on the GPU; all of it is read for every token"
                         : "output head: on the CPU; there is no room for it";
  if (planner.shape().tied_head) return out + "; the embedding is the same tensor";
  return out + (embedding ? "\n  token embedding: on the GPU, there was room left"
                          : "\n  token embedding: on the host; a token needs one row of it");
}

std::string totals(const Planner& planner, const Plan& plan, const Explanation& e) {
  std::string out = fmt::format(
      "expected: {:.1f} tok/s ({:.2f} ms per token), hit rate {:.1f} %, density {:.1f} %\n"
      "bytes per token: {:.1f} MB on the GPU, {:.1f} MB on the CPU, {}at {} positions of context\n"
      "memory: {:.2f} of {:.2f} GiB on the GPU, {:.2f} GiB on the host\n",
      plan.tokens_per_second(), 1e3 * plan.seconds, 100 * plan.hit_rate, 100 * plan.density, plan.traffic.gpu() / 1e6,
      plan.traffic.cpu() / 1e6,
      plan.traffic.link > 0 ? fmt::format("{:.1f} MB over the link, ", plan.traffic.link / 1e6) : "", plan.n_kv,
      static_cast<double>(plan.gpu.total()) / kGiB, static_cast<double>(plan.placement.vram_budget) / kGiB,
      static_cast<double>(plan.host_bytes) / kGiB);
  out += fmt::format("optimality: no plan of this budget{} is more than {:.3f} % faster, by the same cost model\n",
                     planner.request().gpu_buckets.empty() ? "" : " with these neurons on the GPU",
                     100 * std::max(0.0, plan.seconds / plan.bound - 1));
  if (e.one_more_gib) {
    out += fmt::format("one more GiB: {:.1f} tok/s ({:+.1f} %), hit rate {:.1f} %\n", e.one_more_gib->tokens_per_second,
                       100 * (e.one_more_gib->tokens_per_second / plan.tokens_per_second() - 1),
                       100 * e.one_more_gib->hit_rate);
  } else if (plan.placement.uses_gpu()) {
    out += "one more GiB: nothing, everything is on the GPU\n";
  }
  if (e.worthwhile_budget) {
    out += fmt::format("more GPU memory pays up to {:.2f} GiB: from there on one more GiB brings less than {:.0f} %\n",
                       static_cast<double>(*e.worthwhile_budget) / kGiB, 100 * kWorthPerGib);
  }
  if (e.typical_profile_tps) {
    out += fmt::format(
        "no profile: which neurons are hot is not known. With activations as skewed as published ones, `hearth "
        "profile` "
        "would make this plan {:.1f} tok/s ({:+.0f} %)\n",
        *e.typical_profile_tps, 100 * (*e.typical_profile_tps / plan.tokens_per_second() - 1));
  }
  if (has_experts(planner) && !planner.frequencies().known) {
    out += "no profile: which experts are chosen often is not known; `hearth profile -f TEXT` counts them\n";
  }
  const Streaming streaming = planner.streaming(plan.placement);
  if (!plan.placement.uses_gpu() || streaming.tokens() == 0) return out;
  const int64_t most = plan.placement.n_batch;
  const double ms = 1e3 * streaming.seconds(most);
  if (has_experts(planner)) {
    return out + fmt::format(
                     "prompts: batches of {} tokens or more stream some of the host's experts that they choose while "
                     "the CPU computes the others, which takes {:.0f} ms each (up to {} tokens; the CPU alone: {:.0f} "
                     "ms)\n",
                     streaming.tokens(), ms, most, 1e3 * streaming.cpu_seconds(most));
  }
  return out + fmt::format(
                   "prompts: batches of {} tokens or more stream what is on the host, which takes {:.0f} ms each (up "
                   "to {} tokens); the CPU computes its share of smaller ones\n",
                   streaming.tokens(), ms, most);
}

json traffic_json(const Traffic& t) {
  return {{"gpu_dense", t.gpu_dense},
          {"gpu_sparse", t.gpu_sparse},
          {"cpu_dense", t.cpu_dense},
          {"cpu_sparse", t.cpu_sparse},
          {"link", t.link}};
}

json layer_json(const LayerReport& l) {
  return {{"attention", to_string(l.choice.attention)},
          {"selection", to_string(l.choice.selection)},
          {"predictor", to_string(l.choice.predictor)},
          {"n_ff", l.n_ff},
          {"hot", l.choice.hot},
          {"activations", l.activations},
          {"hot_activations", l.hot_activations},
          {"gpu_bytes", l.gpu_bytes},
          {"attention_bytes_per_token", traffic_json(l.attention)},
          {"ffn_bytes_per_token", traffic_json(l.ffn)},
          {"seconds", l.seconds}};
}

}  // namespace

Explanation explain(const Planner& planner, const Plan& plan) {
  Explanation e;
  const uint64_t budget = plan.placement.vram_budget;
  if (budget > 0 && plan.gpu.total() < planner.largest_useful_budget()) {
    const uint64_t more = std::max(budget + (uint64_t{1} << 30), planner.smallest_budget());
    const Plan better = planner.plan(more);
    e.one_more_gib = Alternative{more, better.tokens_per_second(), better.hit_rate};
  }
  if (budget > 0 && has_experts(planner)) e.worthwhile_budget = worthwhile_budget(planner);
  const bool unknown = !planner.frequencies().known && planner.shape().sparse_family &&
                       planner.request().sparsity != engine::Sparsity::off;
  if (unknown) {
    const Planner typical(planner.shape(), typical_frequencies(planner.shape(), kAssumedDensity), planner.request());
    e.typical_profile_tps = typical.plan(budget).tokens_per_second();
  }
  return e;
}

std::string plan_table(const Planner& planner, const Plan& plan, const Explanation& explanation) {
  const ModelShape& s = planner.shape();
  std::string out = fmt::format("{}: {} layers, {}, {:.2f} GiB of weights, context {}\n\n", s.name, s.layers.size(),
                                s.type_name, static_cast<double>(s.weight_bytes()) / kGiB, plan.placement.n_ctx);
  out += layer_rows(plan);
  if (has_experts(planner) && plan.placement.uses_gpu()) out += expert_rows(planner, plan);
  if (plan.placement.uses_gpu()) {
    out += "\nGPU memory, MiB\n";
    for (const Row& r : rows_of(plan.gpu, has_experts(planner))) {
      out += fmt::format("{:>22} {:>10.1f}\n", r.purpose, static_cast<double>(r.bytes) / kMiB);
    }
    out += fmt::format("{:>22} {:>10.1f}\n", "total", static_cast<double>(plan.gpu.total()) / kMiB);
    out += fmt::format("\nwhy\n  {}\n  {}\n  {}\n", why_attention(plan), why_neurons(planner, plan),
                       why_head(planner, plan));
  } else if (plan.placement.vram_budget > 0) {
    out += "\nThe CPU alone is at least as fast as handing work over to the GPU within this budget.\n";
  }
  return out + "\n" + inside_experts(planner) + totals(planner, plan, explanation);
}

json plan_json(const Planner& planner, const Plan& plan, const Explanation& e) {
  const CostModel& c = planner.request().cost;
  json memory = json::object();
  for (const Row& r : rows_of(plan.gpu, has_experts(planner))) memory[r.purpose] = r.bytes;
  json j = {{"model", planner.shape().name},
            {"model_fingerprint", plan.placement.model_fingerprint},
            {"vram_budget", plan.placement.vram_budget},
            {"n_ctx", plan.placement.n_ctx},
            {"n_batch", plan.placement.n_batch},
            {"n_kv", plan.n_kv},
            {"sparsity", to_string(planner.request().sparsity)},
            {"frequencies", planner.frequencies().source},
            {"profiled", planner.frequencies().known},
            {"gpu_bandwidth", c.gpu_bandwidth},
            {"cpu_bandwidth", c.cpu_bandwidth},
            {"pcie_bandwidth", c.pcie_bandwidth},
            {"link_share", plan.link_share},
            {"cpu_flops", c.cpu_flops},
            {"stream_tokens", planner.streaming(plan.placement).tokens()},
            {"tokens_per_second", plan.tokens_per_second()},
            {"seconds_per_token", plan.seconds},
            {"seconds_per_token_bound", plan.bound},
            {"hit_rate", plan.hit_rate},
            {"density", plan.density},
            {"bytes_per_token", traffic_json(plan.traffic)},
            {"gpu_bytes", plan.gpu.total()},
            {"gpu_bytes_by_purpose", memory},
            {"host_bytes", plan.host_bytes},
            {"smallest_budget", planner.smallest_budget()},
            {"largest_useful_budget", planner.largest_useful_budget()},
            {"embedding", to_string(plan.placement.embedding)},
            {"output", to_string(plan.placement.output)}};
  j["layers"] = json::array();
  for (size_t l = 0; l < plan.layers.size(); ++l) {
    json layer = layer_json(plan.layers[l]);
    if (planner.shape().layers[l].experts) layer["experts"] = experts_json(planner, plan, l);
    j["layers"].push_back(std::move(layer));
  }
  j["worthwhile_budget"] = e.worthwhile_budget ? json(*e.worthwhile_budget) : json(nullptr);
  j["one_more_gib"] = nullptr;
  if (e.one_more_gib) {
    j["one_more_gib"] = {{"vram_budget", e.one_more_gib->vram_budget},
                         {"tokens_per_second", e.one_more_gib->tokens_per_second},
                         {"hit_rate", e.one_more_gib->hit_rate}};
  }
  j["typical_profile_tokens_per_second"] = e.typical_profile_tps ? json(*e.typical_profile_tps) : json(nullptr);
  return j;
}

}  // namespace hearth::offline
