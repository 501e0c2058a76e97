#include "offline/profile/counting_device.h"

#include <Eigen/Dense>
#include <algorithm>

#include "core/error.h"

namespace hearth::offline {

CountingDevice::CountingDevice(Device& inner, ThreadTeam& team, const model::Model& model, float threshold,
                               bool moments, PredictorTrial& trial, ImportanceCollector* importance,
                               model::Statistics& statistics)
    : FfnProbe(inner, model),
      team_(team),
      trial_(trial),
      importance_(importance),
      statistics_(statistics),
      moments_(moments) {
  HEARTH_CHECK(statistics.layers.size() == model.weights().layers.size());
  for (size_t i = 0; i < model.weights().layers.size(); ++i) {
    const model::LayerWeights& l = model.weights().layers[i];
    rules_.push_back({l.ffn.act, l.ffn.act_threshold, l.ffn.up_relu, threshold});
    counters_.emplace_back(team, rules_.back(), down_row_norms(l.ffn));
    if (!l.router) continue;
    mixtures_.push_back(i);
    expert_counters_.emplace_back(l.router.routing.n_expert, l.router.routing.n_used);
  }
}

void CountingDevice::reserve(const Limits& limits) {
  FfnProbe::reserve(limits);
  if (mixtures_.empty()) return;
  const auto words = [&](int64_t n) { return static_cast<size_t>(limits.max_tokens * n) * sizeof(float); };
  kept_ = inner_.allocate(words(n_embd_), Purpose::scratch);
  foreseen_ids_ = inner_.allocate(words(limits.n_named), Purpose::scratch);
  foreseen_weights_ = inner_.allocate(words(limits.n_named), Purpose::scratch);
  inside_ = inner_.allocate(static_cast<size_t>(limits.n_named * limits.n_ff_expert) * sizeof(float), Purpose::scratch);
}

void CountingDevice::begin_sequence(bool heldout) {
  heldout_ = heldout;
  for (ActivationCounter& c : counters_) c.begin_sequence();
  for (ExpertCounter& c : expert_counters_) c.begin_sequence();
}

// The attention has two products: q, k and v of its input, and the output, which is added to the residual stream. The
// head is the third kind; nobody collects its importance (llama.cpp's default, too).
void CountingDevice::matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) {
  const bool output = parts.size() == 1 && parts[0].accumulate;
  if (importance_ == nullptr || heldout_ || (parts.size() == 1 && !output)) return inner_.matmul(parts, in, T, next);
  auto& layers = output ? attn_outputs_ : readers_of_attention_;
  const size_t layer = layers.try_emplace(parts[0].w.data, layers.size()).first->second;
  HEARTH_CHECK(layer < model_.weights().layers.size(), "more attentions than layers");
  const Act rows = rows_of(in, T);
  const int64_t n = parts[0].w.cols;
  importance_->add(layer, output ? MatrixInput::attn_output : MatrixInput::attention, bring(rows, T, n), T, n);
  inner_.matmul(parts, rows, T, next);
}

void CountingDevice::ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                               const NextNorm* next) {
  const Act in = rows_of(input, T);
  const size_t layer = layer_of(shard);
  keep_for_next(layer, in, T);
  evaluate(shard, in, T, true);
  counters_[layer].add(gate_.data(), shard.up ? up_.data() : nullptr, T, heldout_, statistics_.layers[layer]);
  if (const int64_t n = std::min(T, trial_.wanted(layer)); n > 0) {
    trial_.add(layer, bring(in, n, n_embd_), gate_.data(), n);
  }
  if (moments_ && !heldout_) add_moments(layer, bring(in, T, n_embd_), T);
  if (importance_ != nullptr && !heldout_) {
    importance_->add(layer, MatrixInput::ffn, bring(in, T, n_embd_), T, n_embd_);
    add_down_inputs(layer, T);
  }
  inner_.ffn_dense(shard, in, T, y_bias, y, next);
}

void CountingDevice::route(const Router& router, const Input& input, int64_t T, const ExpertChoice& choice) {
  const Act in = rows_of(input, T);
  inner_.expert_ffn()->route(router, in, T, choice);
  const size_t index = routers_.try_emplace(router.w.data, routers_.size()).first->second;
  HEARTH_CHECK(index < mixtures_.size(), "more routers than layers that have one");
  const size_t layer = mixtures_[index];
  std::vector<int32_t> foreseen;
  if (kept_of_ && *kept_of_ + 1 == layer && !heldout_) {
    const ExpertChoice tried{foreseen_ids_.as<int32_t>(), foreseen_weights_.as<float>(), choice.n_named};
    inner_.expert_ffn()->route(router, Act{kept_.as<float>(), nullptr}, T, tried);
    foreseen = bring_ids(tried, T);
  }
  expert_counters_[index].add(bring_ids(choice, T), foreseen, T, heldout_, statistics_.layers[layer]);
  keep_for_next(layer, in, T);
  routed_ = layer;
}

void CountingDevice::ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& input, int64_t T,
                                 float* y) {
  const Act in = rows_of(input, T);
  const FfnShard& first = model_.weights().layers[routed_].some_ffn();
  if (model_.config().ffn.sparse() && !heldout_) {
    const NeuronRule rule{first.act, first.act_threshold, first.up_relu, 0.0f};
    const std::vector<int32_t> ids = bring_ids(choice, T);
    const size_t row = inner_.q8_bytes(n_embd_);
    model::MeanShare& inside = statistics_.layers[routed_].inside;
    for (int64_t t = 0; t < T; t += kInsideEvery) {
      const auto at = static_cast<size_t>(t), n = static_cast<size_t>(choice.n_named);
      const Act token{in.x + t * n_embd_, in.q8 != nullptr ? static_cast<std::byte*>(in.q8) + at * row : nullptr};
      inside.sum += count_inside(set, std::span(ids).subspan(at * n, n), token, rule), ++inside.tokens;
    }
  }
  inner_.expert_ffn()->ffn_experts(set, choice, in, T, y);
}

double CountingDevice::count_inside(const ExpertSet& set, std::span<const int32_t> ids, Act token,
                                    const NeuronRule& rule) {
  int64_t n = 0, active = 0;
  for (const int32_t id : ids) {
    const FfnShard& ffn = set.experts[static_cast<size_t>(id)].ffn;
    const MatmulPart gate{.w = ffn.gate, .bias = ffn.gate_bias, .y = inside_.as<float>() + n};
    inner_.matmul({&gate, 1}, token, 1);
    n += ffn.n();
  }
  std::vector<float> gates(static_cast<size_t>(n));
  inner_.download(gates.data(), inside_.as<float>(), gates.size() * sizeof(float));
  model::InsideCounts& counts = statistics_.layers[routed_].inside_counts;
  const model::ExpertsDescription& e = model_.config().experts;
  if (!counts) counts = {e.routing.n_expert, e.n_ff};
  const float* z = gates.data();
  for (const int32_t id : ids) {
    const bool routed = id < e.routing.n_expert;
    if (routed) ++counts.used[static_cast<size_t>(id)];
    for (int64_t i = 0; i < e.neurons_of(id); ++i) {
      if (rule.activate(*z++) == 0.0f) continue;
      ++active;
      if (routed) ++counts.active[static_cast<size_t>(id * e.n_ff + i)];
    }
  }
  return static_cast<double>(active) / static_cast<double>(n);
}

void CountingDevice::keep_for_next(size_t layer, Act in, int64_t T) {
  const auto& layers = model_.weights().layers;
  kept_of_.reset();
  if (layer + 1 == layers.size() || !layers[layer + 1].router) return;
  inner_.copy(kept_.as<float>(), in.x, static_cast<size_t>(T * n_embd_) * sizeof(float));
  kept_of_ = layer;
}

std::vector<int32_t> CountingDevice::bring_ids(const ExpertChoice& choice, int64_t T) {
  std::vector<int32_t> ids(static_cast<size_t>(T * choice.n_named));
  inner_.download(ids.data(), choice.ids, ids.size() * sizeof(int32_t));
  return ids;
}

void CountingDevice::add_down_inputs(size_t layer, int64_t T) {
  const NeuronRule& rule = rules_[layer];
  const bool gated = static_cast<bool>(model_.weights().layers[layer].ffn.up);
  team_.for_chunks(T, 1, [&](int64_t t, int64_t, int) {
    for (int64_t i = t * n_ff_; i < (t + 1) * n_ff_; ++i) {
      const auto at = static_cast<size_t>(i);
      const float up = !gated ? 1.0f : rule.up_relu ? std::max(0.0f, up_[at]) : up_[at];
      gate_[at] = rule.activate(gate_[at]) * up;
    }
  });
  importance_->add(layer, MatrixInput::down, gate_.data(), T, n_ff_);
}

const float* CountingDevice::bring(Act in, int64_t T, int64_t n) {
  host_input_.resize(static_cast<size_t>(T * n));
  inner_.download(host_input_.data(), in.x, host_input_.size() * sizeof(float));
  return host_input_.data();
}

void CountingDevice::add_moments(size_t layer, const float* input, int64_t T) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  std::vector<float>& moments = statistics_.layers[layer].moments;
  moments.resize(static_cast<size_t>(n_embd_ * n_embd_));
  const Eigen::Map<const RowMajor> x(input, T, n_embd_);
  Eigen::Map<RowMajor> sum(moments.data(), n_embd_, n_embd_);
  sum.noalias() += x.transpose() * x;
}

}  // namespace hearth::offline
