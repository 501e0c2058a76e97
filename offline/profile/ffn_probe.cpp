#include "offline/profile/ffn_probe.h"

#include <array>
#include <cmath>
#include <span>

#include "core/error.h"

namespace hearth::offline {

FfnProbe::FfnProbe(Device& inner, const model::Model& model)
    : ForwardingDevice(inner), model_(model), n_embd_(model.config().n_embd), n_ff_(model.config().n_ff) {}

void FfnProbe::reserve(const Limits& limits) {
  inner_.reserve(limits);
  max_values_ = static_cast<size_t>(limits.max_tokens * n_ff_);
}

void FfnProbe::ffn_sparse(const FfnShard&, const SparseArgs&, const Input&, int64_t, Vector, float*, const NextNorm*) {
  HEARTH_CHECK(false, "dense FFNs alone are looked at");
}

size_t FfnProbe::layer_of(const FfnShard& shard) {
  const size_t layer = layers_.try_emplace(shard.gate.data, layers_.size()).first->second;
  HEARTH_CHECK(layer < model_.weights().layers.size(), "more FFNs than layers");
  return layer;
}

Act FfnProbe::rows_of(const Input& in, int64_t T) {
  if (in.normed()) inner_.norm(in.norm, in.x, T, in.act);
  return in.act;
}

void FfnProbe::evaluate(const FfnShard& shard, Act in, int64_t T, bool with_up) {
  const bool up = with_up && shard.up;
  const auto prepare = [&](DeviceBuffer& device, std::vector<float>& host) {
    if (!host.empty()) return;
    device = inner_.allocate(max_values_ * sizeof(float), Purpose::scratch);
    host.resize(max_values_);
  };
  prepare(device_gate_, gate_);
  if (up) prepare(device_up_, up_);
  const std::array parts = {MatmulPart{.w = shard.gate, .bias = shard.gate_bias, .y = device_gate_.as<float>()},
                            MatmulPart{.w = shard.up, .bias = shard.up_bias, .y = device_up_.as<float>()}};
  inner_.matmul(std::span(parts).first(up ? 2 : 1), in, T);
  const size_t bytes = static_cast<size_t>(T * n_ff_) * sizeof(float);
  inner_.download(gate_.data(), device_gate_.as<float>(), bytes);
  if (up) inner_.download(up_.data(), device_up_.as<float>(), bytes);
}

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

}  // namespace hearth::offline
