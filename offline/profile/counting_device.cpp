#include "offline/profile/counting_device.h"

#include <Eigen/Dense>
#include <array>
#include <cmath>

#include "core/error.h"

namespace hearth::offline {

std::vector<float> down_row_norms(const FfnShard& shard) {
  const Matrix& m = shard.down_t ? shard.down_t : shard.down;
  std::vector<double> squares(static_cast<size_t>(shard.n()));
  std::vector<float> row(static_cast<size_t>(m.cols));
  for (int64_t r = 0; r < m.rows; ++r) {
    traits(m.type).to_float(m.row(r), row.data(), m.cols);
    for (size_t c = 0; c < row.size(); ++c) {
      squares[shard.down_t ? static_cast<size_t>(r) : c] += static_cast<double>(row[c]) * row[c];
    }
  }
  std::vector<float> norms;
  for (const double s : squares) norms.push_back(static_cast<float>(std::sqrt(s)));
  return norms;
}

CountingDevice::CountingDevice(Device& inner, ThreadTeam& team, const model::Model& model, float threshold,
                               bool moments, model::Statistics& statistics)
    : ForwardingDevice(inner),
      statistics_(statistics),
      moments_(moments),
      n_embd_(model.config().n_embd),
      n_ff_(model.config().n_ff) {
  HEARTH_CHECK(statistics.layers.size() == model.weights().layers.size());
  for (const model::LayerWeights& l : model.weights().layers) {
    const NeuronRule rule{l.ffn.act, l.ffn.act_threshold, l.ffn.up_relu, threshold};
    counters_.emplace_back(team, rule, down_row_norms(l.ffn));
  }
}

CountingDevice::~CountingDevice() = default;

void CountingDevice::begin_sequence(bool heldout) {
  heldout_ = heldout;
  for (ActivationCounter& c : counters_) c.begin_sequence();
}

void CountingDevice::reserve(const Limits& limits) {
  inner_.reserve(limits);
  const auto n = static_cast<size_t>(limits.max_tokens * n_ff_);
  gate_ = inner_.allocate(n * sizeof(float), Purpose::scratch);
  up_ = inner_.allocate(n * sizeof(float), Purpose::scratch);
  host_gate_.resize(n);
  host_up_.resize(n);
  if (moments_) host_input_.resize(static_cast<size_t>(limits.max_tokens * n_embd_));
}

size_t CountingDevice::layer_of(const FfnShard& shard) {
  const size_t layer = layers_.try_emplace(shard.gate.data, layers_.size()).first->second;
  HEARTH_CHECK(layer < counters_.size(), "more FFNs than layers");
  return layer;
}

void CountingDevice::ffn_dense(const FfnShard& shard, Act in, int64_t T, Vector y_bias, float* y) {
  count(layer_of(shard), shard, in, T);
  inner_.ffn_dense(shard, in, T, y_bias, y);
}

void CountingDevice::ffn_sparse(const FfnShard&, const SparseArgs&, Act, Vector, float*) {
  HEARTH_CHECK(false, "profiling runs dense");
}

void CountingDevice::count(size_t layer, const FfnShard& shard, Act in, int64_t T) {
  const std::array parts = {MatmulPart{.w = shard.gate, .bias = shard.gate_bias, .y = gate_.as<float>()},
                            MatmulPart{.w = shard.up, .bias = shard.up_bias, .y = up_.as<float>()}};
  const bool gated = static_cast<bool>(shard.up);
  inner_.matmul(std::span(parts).first(gated ? 2 : 1), in, T);
  const size_t bytes = static_cast<size_t>(T * n_ff_) * sizeof(float);
  inner_.download(host_gate_.data(), gate_.as<float>(), bytes);
  if (gated) inner_.download(host_up_.data(), up_.as<float>(), bytes);
  counters_[layer].add(host_gate_.data(), gated ? host_up_.data() : nullptr, T, heldout_, statistics_.layers[layer]);
  if (moments_ && !heldout_) {
    inner_.download(host_input_.data(), in.x, static_cast<size_t>(T * n_embd_) * sizeof(float));
    add_moments(layer, host_input_.data(), T);
  }
}

void CountingDevice::add_moments(size_t layer, const float* host_input, int64_t T) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  std::vector<float>& moments = statistics_.layers[layer].moments;
  moments.resize(static_cast<size_t>(n_embd_ * n_embd_));
  const Eigen::Map<const RowMajor> x(host_input, T, n_embd_);
  Eigen::Map<RowMajor> sum(moments.data(), n_embd_, n_embd_);
  sum.noalias() += x.transpose() * x;
}

}  // namespace hearth::offline
