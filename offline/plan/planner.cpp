#include "offline/plan/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "engine/activations.h"
#include "engine/kv_cache.h"
#include "engine/page_pool.h"

namespace hearth::offline {
namespace {

using engine::Selection;
using engine::Sparsity;
using engine::Where;

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr int64_t kDefaultContext = 4096;  // as the engine's

double gib(uint64_t bytes) {
  return static_cast<double>(bytes) / kGiB;
}
// Rounded up to the next hundredth, so that what an error advises works.
double gib_up(uint64_t bytes) {
  return std::ceil(gib(bytes) * 100) / 100;
}

}  // namespace

uint64_t typical_scratch_bytes(const Limits& l) {
  constexpr uint64_t kWorkspace = uint64_t{32} << 20;  // cuBLAS's; as much again for slabs of dequantised weights
  constexpr int64_t kPieces = 8 * 128;                 // of the attention of few tokens
  const auto f32 = [](int64_t n) { return static_cast<uint64_t>(n) * sizeof(float); };
  const uint64_t hidden = f32(2 * l.max_tokens * l.n_ff), input = f32(l.max_tokens * l.max_cols) / 2;  // in f16
  return hidden + input + f32(8 * l.n_ff + 136 * l.n_embd + kPieces * l.n_head * (l.head_dim + 2)) +
         (l.quantized_weights ? 2 : 1) * kWorkspace;
}

uint64_t GpuBytes::fixed() const {
  return context + margin + staging + activations + scratch + norms;
}
uint64_t GpuBytes::total() const {
  return fixed() + attention + kv_cache + neurons + predictors + embedding + output;
}

Planner::Planner(ModelShape shape, Frequencies frequencies, const PlanRequest& request)
    : shape_(std::move(shape)), frequencies_(std::move(frequencies)), request_(request) {
  HEARTH_CHECK(frequencies_.p.size() == shape_.layers.size());
  const CostModel& c = request_.cost;
  for (const double b : {c.gpu_bandwidth, c.cpu_bandwidth, c.pcie_bandwidth}) {
    if (!(b > 0) || !std::isfinite(b)) fail("a bandwidth of {} bytes/s was given, expected a positive number", b);
  }
  if (c.link_share && !(*c.link_share >= 0 && *c.link_share <= 1))
    fail("a share of {} was given for neurons read over the link, expected 0 to 1", *c.link_share);
  check_context();
  check_buckets();
  const auto predicts = [](const LayerShape& l) { return l.predictor_bytes > 0 && l.by_neuron; };
  if (request_.sparsity == Sparsity::predict && std::none_of(shape_.layers.begin(), shape_.layers.end(), predicts)) {
    fail(
        "--sparsity predict needs predictors and transposed down projections; use --sparsity exact, or make predictors "
        "with `hearth predictor fit`");
  }
  fixed_ = fixed_bytes();
  build_classes();
}

void Planner::check_context() {
  PlanRequest& r = request_;
  if (r.n_ctx < 0) fail("the context length is {}, expected 1 or more (0 = the model's)", r.n_ctx);
  if (r.n_ctx == 0) r.n_ctx = std::min(shape_.config.n_ctx_train, kDefaultContext);
  if (shape_.learned_positions && r.n_ctx > shape_.config.n_ctx_train) {
    fail("a context of {} was asked for, and this model has learned positions for {}; use -c {} or less", r.n_ctx,
         shape_.config.n_ctx_train, shape_.config.n_ctx_train);
  }
  if (r.n_batch < 1) fail("the batch size is {}, expected 1 or more", r.n_batch);
  if (r.n_sequences < 1) fail("the number of sequences is {}, expected 1 or more", r.n_sequences);
  r.n_batch = std::min(r.n_batch, r.n_ctx * r.n_sequences);
  n_kv_ = r.expected_context > 0 ? std::min(r.expected_context, r.n_ctx) : (r.n_ctx + 1) / 2;
}

void Planner::check_buckets() const {
  const auto& buckets = request_.gpu_buckets;
  HEARTH_CHECK(buckets.empty() || buckets.size() == shape_.layers.size(), "buckets of {} layers", buckets.size());
  for (size_t l = 0; l < buckets.size(); ++l) {
    const LayerShape& s = shape_.layers[l];
    const bool divided = !buckets[l].empty() && static_cast<int64_t>(buckets[l].size()) < s.n_ff;
    if (divided && !s.by_neuron) {
      fail(
          "{} of layer {}'s {} neurons are to be on the GPU, and the file stores its down projections quantised and "
          "not "
          "transposed, so that they cannot be told apart; `hearth quantize --transposed-down` makes a file that can",
          buckets[l].size(), l, s.n_ff);
    }
  }
}

uint64_t Planner::smallest_budget() const {
  uint64_t sum = fixed_.total();
  for (const ChoiceClass& c : classes_) sum += c.front().bytes;
  return sum;
}

uint64_t Planner::kv_layer_bytes() const {
  return static_cast<uint64_t>(request_.n_sequences * engine::pages_of(request_.n_ctx)) *
         engine::KvCache::layer_page_bytes(shape_.config);
}

// In a slot: as the CPU has it, as kernels read it where that is otherwise, and a table.
uint64_t Planner::largest_staged_expert() const {
  uint64_t most = 0;
  for (const LayerShape& s : shape_.layers) {
    if (!s.can_stream) continue;
    const uint64_t table = static_cast<uint64_t>(s.n_ff) * kExpertTableBytes;
    most = std::max(
        most, s.up_down_bytes + (shape_.quantized ? s.neuron_on_gpu() : 0) + table + 8 * request_.reserve.alignment);
  }
  return most;
}

GpuBytes Planner::fixed_bytes() const {
  GpuBytes b;
  b.context = request_.reserve.context_bytes;
  b.margin = request_.reserve.margin_bytes;
  b.staging = std::max(request_.reserve.staging_bytes, engine::ColdStream::kSlots * largest_staged_expert());
  const auto shape =
      engine::ActivationShape::of(request_.n_ctx, request_.n_sequences, request_.n_batch, shape_.quantized);
  b.activations = engine::Activations::bytes(shape_.config, shape, request_.reserve.q8_bytes);
  b.scratch = request_.reserve.scratch_bytes(
      engine::limits_of(shape_.config, request_.n_ctx, request_.n_batch, shape_.quantized));
  b.norms = shape_.small_bytes + 4 * request_.reserve.alignment;
  for (const LayerShape& l : shape_.layers) b.norms += l.small_bytes + 12 * request_.reserve.alignment;
  return b;
}

uint64_t Planner::embedding_gpu_bytes(bool embedding, bool output) const {
  const uint64_t slack = 2 * request_.reserve.alignment;
  if (shape_.tied_head) return output ? shape_.embedding_on_gpu() + slack : 0;
  return (embedding ? shape_.embedding_on_gpu() + slack : 0) + (output ? shape_.output_on_gpu() + slack : 0);
}

double Planner::head_seconds(bool embedding, bool output) const {
  const CostModel& c = request_.cost;
  const auto bytes = static_cast<double>(shape_.output_bytes);
  const double head =
      output ? c.on_gpu(c.head_kernels, bytes, c.gpu_dense(bytes)) : c.handoff_seconds + c.cpu_dense(bytes);
  return head + (embedding ? 0 : c.host_embedding_seconds);
}

void Planner::build_classes() {
  for (size_t l = 0; l < shape_.layers.size(); ++l) {
    const std::vector<int32_t>* bucket = request_.gpu_buckets.empty() ? nullptr : &request_.gpu_buckets[l];
    costs_.emplace_back(shape_.layers[l], frequencies_.p[l], request_.cost, request_.reserve, kv_layer_bytes(), n_kv_,
                        bucket);
    choices_.push_back(costs_[l].choices(request_.sparsity, sparse_family()));
    ChoiceClass c;
    c.reserve(choices_[l].size());
    for (uint32_t i = 0; i < choices_[l].size(); ++i) {
      c.push_back({costs_[l].gpu_bytes(choices_[l][i]), costs_[l].seconds(choices_[l][i]), i});
    }
    keep_pareto(c);
    classes_.push_back(std::move(c));
  }
  ChoiceClass head;
  for (uint32_t i = 0; i < 4; ++i) {  // bit 0: embedding, bit 1: output head
    const bool embedding = (i & 1) != 0, output = (i & 2) != 0;
    if (shape_.tied_head && embedding != output) continue;
    head.push_back({embedding_gpu_bytes(embedding, output), head_seconds(embedding, output), i});
  }
  keep_pareto(head);
  classes_.push_back(std::move(head));
}

uint64_t Planner::largest_useful_budget() const {
  uint64_t sum = fixed_.total();
  for (const ChoiceClass& c : classes_) sum += c.back().bytes;
  return sum;
}

Planner::Picked Planner::pick_cpu_only() const {
  Picked p;
  p.gpu = false;
  p.seconds = request_.cost.cpu_dense(static_cast<double>(shape_.output_bytes));
  for (const LayerCosts& c : costs_) {
    LayerChoice best;
    double fastest = std::numeric_limits<double>::infinity();
    for (const Selection s : c.selections(request_.sparsity, sparse_family())) {
      if (c.seconds_cpu_only(s) < fastest) fastest = c.seconds_cpu_only(s), best.selection = s;
    }
    p.layers.push_back(best);
    p.seconds += fastest;
  }
  p.bound = p.seconds;
  return p;
}

Planner::Picked Planner::pick(uint64_t vram_budget) const {
  if (vram_budget == 0) {
    if (!request_.gpu_buckets.empty())
      fail("a GPU index says which neurons are on the GPU, and the budget is 0; give a --vram-budget, or no index");
    return pick_cpu_only();
  }
  const uint64_t fixed = fixed_.total(), least = smallest_budget();
  if (vram_budget < least) {
    fail(
        "a budget of {:.2f} GiB is too small: context, margin, buffers for a batch of {}{} and norms need {:.2f} GiB; "
        "use --vram-budget {:.2f} or more, a smaller batch (-b), or --vram-budget 0 to run on the CPU alone",
        gib(vram_budget), request_.n_batch, least > fixed ? ", the neurons of the GPU index" : "", gib_up(least),
        gib_up(least));
  }
  const auto result = solve_knapsack(classes_, vram_budget - fixed);
  HEARTH_CHECK(result.has_value());
  Picked p;
  for (size_t l = 0; l < costs_.size(); ++l) p.layers.push_back(choices_[l][result->ids[l]]);
  p.embedding_gpu = (result->ids.back() & 1) != 0;
  p.output_gpu = (result->ids.back() & 2) != 0;
  p.seconds = result->seconds + request_.cost.token_seconds;
  p.bound = result->bound + request_.cost.token_seconds;
  if (!request_.gpu_buckets.empty()) return p;  // obeyed
  // Hand-offs can cost more than a small budget saves.
  Picked cpu = pick_cpu_only();
  if (cpu.seconds <= p.seconds) {
    cpu.bound = std::min(cpu.seconds, p.bound);
    return cpu;
  }
  return p;
}

std::optional<double> Planner::break_even(size_t layer, const LayerChoice& choice) const {
  const LayerCosts& costs = costs_[layer];
  LayerChoice with = choice;
  with.hot = 0;
  const double without = costs.seconds(with);
  for (with.hot = 1; with.hot <= shape_.layers[layer].n_ff; ++with.hot) {
    if (costs.seconds(with) < without) return costs.hot_activations(with) / costs.activations();
  }
  return std::nullopt;
}

LayerReport Planner::report_layer(size_t l, const Picked& picked) const {
  const LayerCosts& c = costs_[l];
  LayerReport r;
  r.choice = picked.layers[l];
  r.n_ff = shape_.layers[l].n_ff;
  r.hot = c.on_gpu(r.choice);
  r.activations = c.activations();
  r.hot_activations = c.hot_activations(r.choice);
  r.attention = c.attention_traffic(r.choice);
  r.ffn = c.ffn_traffic(r.choice);
  r.gpu_bytes = picked.gpu ? c.gpu_bytes(r.choice) : 0;
  r.seconds = picked.gpu ? c.seconds(r.choice) : c.seconds_cpu_only(r.choice.selection);
  return r;
}

// GPU bytes by purpose, and what stays on the host.
void Planner::account(const Picked& picked, Plan& plan) const {
  GpuBytes& g = plan.gpu;
  if (picked.gpu) g = fixed_;
  plan.host_bytes = shape_.weight_bytes() + fixed_.staging;
  // `file`: what then is not needed on the host.
  const auto on_gpu = [&](uint64_t& item, uint64_t bytes, uint64_t file) {
    item += bytes;
    plan.host_bytes -= std::min(plan.host_bytes, file);
  };
  for (size_t l = 0; l < picked.layers.size(); ++l) {
    const LayerChoice& c = picked.layers[l];
    const LayerShape& s = shape_.layers[l];
    const uint64_t all = plan.layers[l].gpu_bytes, kv = picked.gpu ? costs_[l].kv_gpu_bytes(c) : 0;
    const uint64_t attention = c.attention == Where::gpu ? s.attention_on_gpu() + 8 * request_.reserve.alignment : 0;
    const uint64_t predictors =
        c.predicts_on_gpu() ? s.predictor_on_gpu() + kPredictorTensors * request_.reserve.alignment : 0;
    g.kv_cache += kv;
    plan.host_bytes += kv_layer_bytes() - kv;
    if (c.selection == Selection::predictor && !c.predicts_on_gpu()) plan.host_bytes += s.predictor_bytes;
    if (s.copies_linked) plan.linked_copy_bytes += costs_[l].linked(c).size() * s.neuron_bytes();
    g.predictors += predictors;
    on_gpu(g.attention, attention, attention > 0 ? s.attention_bytes : 0);
    if (s.experts) plan.mapped_bytes += static_cast<uint64_t>(s.n_ff - c.hot) * s.neuron_bytes();
    on_gpu(g.neurons, all - kv - attention - predictors,
           static_cast<uint64_t>(plan.layers[l].hot * static_cast<double>(s.neuron_bytes())));
  }
  plan.host_bytes += plan.linked_copy_bytes;
  if (shape_.tied_head) {
    on_gpu(g.output, embedding_gpu_bytes(picked.embedding_gpu, picked.output_gpu),
           picked.output_gpu ? shape_.embedding_bytes : 0);
  } else {
    on_gpu(g.embedding, embedding_gpu_bytes(picked.embedding_gpu, false),
           picked.embedding_gpu ? shape_.embedding_bytes : 0);
    on_gpu(g.output, embedding_gpu_bytes(false, picked.output_gpu), picked.output_gpu ? shape_.output_bytes : 0);
  }
  plan.mapped_bytes = std::min(plan.mapped_bytes, plan.host_bytes);
}

engine::Placement Planner::placement(const Picked& picked, uint64_t vram_budget) const {
  engine::Placement p;
  p.model_fingerprint = shape_.fingerprint;
  p.n_ctx = request_.n_ctx, p.n_sequences = request_.n_sequences, p.n_batch = request_.n_batch;
  p.vram_budget = vram_budget;
  p.embedding = picked.embedding_gpu ? Where::gpu : Where::cpu;
  p.output = picked.output_gpu ? Where::gpu : Where::cpu;
  for (size_t l = 0; l < picked.layers.size(); ++l) {
    const LayerChoice& c = picked.layers[l];
    const std::vector<int32_t>& order = costs_[l].order();
    engine::LayerPlacement layer;
    layer.attention = c.attention, layer.selection = c.selection, layer.predictor = c.predictor;
    std::vector<int32_t>& hot = shape_.layers[l].experts ? layer.gpu_experts : layer.gpu_bucket;
    hot.assign(order.begin(), order.begin() + c.hot);
    std::sort(hot.begin(), hot.end());
    if (shape_.layers[l].experts) layer.selection = Selection::all;
    for (const int32_t id : hot) {
      if (c.neurons == 0) break;
      const bool shared = shape_.layers[l].shared_expert && id + 1 == shape_.layers[l].n_ff;
      layer.gpu_expert_neurons.push_back(shared ? std::vector<int32_t>() : costs_[l].hottest_inside(id, c.neurons));
    }
    layer.gpu_linked = costs_[l].linked(c);
    std::sort(layer.gpu_linked.begin(), layer.gpu_linked.end());
    layer.look_ahead = c.look_ahead;
    p.layers.push_back(std::move(layer));
  }
  return p;
}

Plan Planner::report(const Picked& picked, uint64_t vram_budget) const {
  Plan plan;
  plan.seconds = picked.seconds, plan.bound = picked.bound, plan.n_kv = n_kv_;
  double activations = 0, hot = 0, neurons = 0;
  for (size_t l = 0; l < picked.layers.size(); ++l) {
    plan.layers.push_back(report_layer(l, picked));
    const LayerReport& r = plan.layers.back();
    activations += r.activations, hot += r.hot_activations, neurons += static_cast<double>(r.n_ff);
    plan.traffic += r.attention;
    plan.traffic += r.ffn;
  }
  const double cold = plan.traffic.link + plan.traffic.cpu_sparse;
  plan.link_share = cold > 0 ? plan.traffic.link / cold : 0;
  (picked.output_gpu ? plan.traffic.gpu_dense : plan.traffic.cpu_dense) += static_cast<double>(shape_.output_bytes);
  plan.hit_rate = activations > 0 ? hot / activations : 0;
  plan.density = activations / neurons;
  account(picked, plan);
  plan.placement = placement(picked, vram_budget);
  if (picked.gpu) {
    const GpuBytes& g = plan.gpu;
    plan.placement.planned = {{Purpose::weights, g.norms + g.attention + g.neurons + g.embedding + g.output},
                              {Purpose::kv_cache, g.kv_cache},
                              {Purpose::activations, g.activations},
                              {Purpose::scratch, g.scratch + g.staging},
                              {Purpose::predictor, g.predictors},
                              {Purpose::context, g.context + g.margin}};
    HEARTH_CHECK(g.total() == plan.placement.planned_bytes() && g.total() <= vram_budget, "{} of {}", g.total(),
                 vram_budget);
  }
  return plan;
}

void Planner::check_host_memory(const Plan& plan) const {
  if (fits_host(plan)) return;
  uint64_t token_bytes = 0;  // of cache on the host, per position of the context
  for (size_t l = 0; l < plan.layers.size(); ++l) {
    if (plan.layers[l].choice.attention == Where::cpu) token_bytes += shape_.layers[l].kv_token_bytes;
  }
  const uint64_t needed = plan.host_bytes - plan.mapped_bytes, excess = needed - request_.host_memory;
  const auto pages = static_cast<uint64_t>(engine::pages_of(request_.n_ctx)), of_page = uint64_t{kPagePositions};
  const uint64_t page_bytes = token_bytes * of_page * static_cast<uint64_t>(request_.n_sequences);
  const uint64_t fewer = page_bytes > 0 ? (excess + page_bytes - 1) / page_bytes : 0;
  if (fewer > 0 && fewer < pages) {
    fail(
        "a context of {} does not fit: {:.2f} GiB of host memory would be needed and {:.2f} GiB may be used; "
        "use -c {} or less, or a larger --vram-budget",
        request_.n_ctx, gib_up(needed), gib(request_.host_memory), (pages - fewer) * of_page);
  }
  fail(
      "the model does not fit: what is not on the GPU takes {:.2f} GiB of host memory and {:.2f} GiB may be used; "
      "use {}a --vram-budget larger by {:.2f} GiB, or a smaller quantisation",
      gib_up(needed), gib(request_.host_memory), plan.linked_copy_bytes > 0 ? "a smaller --link-share, " : "",
      gib_up(excess));
}

Plan Planner::plan_with(uint64_t vram_budget, double link_share) const {
  PlanRequest r = request_;
  r.cost.link_share = link_share;
  const Planner other(shape_, frequencies_, r);
  return other.report(other.pick(vram_budget), vram_budget);
}

Plan Planner::plan(uint64_t vram_budget) const {
  Plan p = report(pick(vram_budget), vram_budget);
  if (!fits_host(p) && p.linked_copy_bytes > 0 && !request_.cost.link_share) {
    // As many copies as there is room for; with fewer of them the division differs a little.
    constexpr double kOfRoom = 0.95;
    const double excess = static_cast<double>(p.host_bytes - p.mapped_bytes - request_.host_memory);
    const double kept = kOfRoom * (1 - excess / static_cast<double>(p.linked_copy_bytes));
    if (kept > 0) p = plan_with(vram_budget, kept * p.link_share);
    if (!fits_host(p)) p = plan_with(vram_budget, 0);
  }
  check_host_memory(p);
  return p;
}

}  // namespace hearth::offline
