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
  for (const model::LayerWeights& l : model.weights().layers) {
    rules_.push_back({l.ffn.act, l.ffn.act_threshold, l.ffn.up_relu, threshold});
    counters_.emplace_back(team, rules_.back(), down_row_norms(l.ffn));
  }
}

void CountingDevice::begin_sequence(bool heldout) {
  heldout_ = heldout;
  for (ActivationCounter& c : counters_) c.begin_sequence();
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
