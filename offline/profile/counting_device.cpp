#include "offline/profile/counting_device.h"

#include <Eigen/Dense>
#include <algorithm>

#include "core/error.h"

namespace hearth::offline {

CountingDevice::CountingDevice(Device& inner, ThreadTeam& team, const model::Model& model, float threshold,
                               bool moments, PredictorTrial& trial, model::Statistics& statistics)
    : FfnProbe(inner, model), trial_(trial), statistics_(statistics), moments_(moments) {
  HEARTH_CHECK(statistics.layers.size() == model.weights().layers.size());
  for (const model::LayerWeights& l : model.weights().layers) {
    const NeuronRule rule{l.ffn.act, l.ffn.act_threshold, l.ffn.up_relu, threshold};
    counters_.emplace_back(team, rule, down_row_norms(l.ffn));
  }
}

void CountingDevice::begin_sequence(bool heldout) {
  heldout_ = heldout;
  for (ActivationCounter& c : counters_) c.begin_sequence();
}

void CountingDevice::ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                               const NextNorm* next) {
  const Act in = rows_of(input, T);
  const size_t layer = layer_of(shard);
  evaluate(shard, in, T, true);
  counters_[layer].add(gate_.data(), shard.up ? up_.data() : nullptr, T, heldout_, statistics_.layers[layer]);
  if (const int64_t n = std::min(T, trial_.wanted(layer)); n > 0) {
    trial_.add(layer, bring_input(in, n), gate_.data(), n);
  }
  if (moments_ && !heldout_) add_moments(layer, bring_input(in, T), T);
  inner_.ffn_dense(shard, in, T, y_bias, y, next);
}

const float* CountingDevice::bring_input(Act in, int64_t T) {
  host_input_.resize(static_cast<size_t>(T * n_embd_));
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
