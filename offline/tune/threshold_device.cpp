#include "offline/tune/threshold_device.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace hearth::offline {
namespace {

constexpr int64_t kPiece = 512;  // neurons handed to a thread at once

// `down` [n_embd][n_ff] of a layer that stores it transposed: exact as f32; in f16, which quantised values are rounded
// to, half as large.
Matrix untranspose(const Matrix& down_t, HostBuffer& storage) {
  const DType type = down_t.type == DType::f32 || down_t.type == DType::bf16 ? DType::f32 : DType::f16;
  Matrix down{type, down_t.cols, down_t.rows};
  storage = HostBuffer(down.bytes());
  std::vector<float> row(static_cast<size_t>(down_t.cols));
  for (int64_t r = 0; r < down_t.rows; ++r) {
    traits(down_t.type).to_float(down_t.row(r), row.data(), down_t.cols);
    for (int64_t c = 0; c < down_t.cols; ++c) {
      std::byte* const to = storage.data() + static_cast<size_t>(c) * down.row_size() + row_bytes(type, r);
      traits(type).from_float(&row[static_cast<size_t>(c)], to, 1);
    }
  }
  down.data = storage.data();
  return down;
}

}  // namespace

ThresholdDevice::ThresholdDevice(Device& inner, ThreadTeam& team, const model::Model& model)
    : FfnProbe(inner, model),
      team_(team),
      experts_(inner, model.config(), model.quantized()),
      down_norms_(model.weights().layers.size()),
      untransposed_(model.weights().layers.size()),
      own_down_(model.weights().layers.size()) {
  for (const model::LayerWeights& l : model.weights().layers) {
    const FfnShard& ffn = l.some_ffn();
    rules_.push_back({ffn.act, ffn.act_threshold, ffn.up_relu, 0.0f});
    if (l.router) continue;
    if (!l.ffn.down_t && is_quantized(l.ffn.down.type)) {
      fail(
          "'{}' stores its down projections quantised and not transposed, so that no neuron can be left out; "
          "--transpose-down quantises them again, `hearth quantize --transposed-down` makes a file of it",
          model.file().path().string());
    }
  }
  if (const auto reason = model.why_experts_are_whole()) {
    fail("no neuron of the experts of '{}' can be left out: {}", model.file().path().string(), *reason);
  }
}

void ThresholdDevice::reserve(const Limits& limits) {
  FfnProbe::reserve(limits);
  if (model_.config().experts) experts_.reserve(limits);
}

void ThresholdDevice::set_thresholds(std::vector<float> by_layer, bool count) {
  HEARTH_CHECK(by_layer.empty() || by_layer.size() == rules_.size(), "{} thresholds", by_layer.size());
  thresholds_ = std::move(by_layer);
  count_active_ = count;
  active_ = neurons_ = 0;
}

double ThresholdDevice::density() const {
  return neurons_ > 0 ? static_cast<double>(active_) / static_cast<double>(neurons_) : NAN;
}

const Matrix& ThresholdDevice::down_of(size_t layer, const FfnShard& shard) {
  if (shard.down) return shard.down;
  std::optional<Matrix>& down = own_down_[layer];
  if (!down) down = inner_.adopt(untranspose(model_.weights().layers[layer].ffn.down_t, untransposed_[layer]));
  if (!is_host()) untransposed_[layer] = {};
  return *down;
}

void ThresholdDevice::activate(size_t layer, int64_t T, std::vector<float>& gate, const std::vector<float>* up,
                               bool with_values) {
  const int64_t n = T * n_neurons(layer);
  const NeuronRule& rule = rules_[layer];
  if (with_values) value_.resize(static_cast<size_t>(n));
  team_.for_chunks(n, kPiece, [&](int64_t begin, int64_t end, int) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      gate[i] = rule.activate(gate[i]);
      if (with_values) value_[i] = up != nullptr ? gate[i] * rule.up_factor((*up)[i]) : gate[i];
    }
  });
}

void ThresholdDevice::count_active(size_t layer, int64_t T, const std::vector<float>& gate) {
  const int64_t n = T * n_neurons(layer);
  piece_active_.assign(static_cast<size_t>((n + kPiece - 1) / kPiece), 0);
  team_.for_chunks(n, kPiece, [&](int64_t begin, int64_t end, int) {
    uint64_t active = 0;
    for (int64_t i = begin; i < end; ++i) active += std::fabs(gate[static_cast<size_t>(i)]) > threshold(layer) ? 1 : 0;
    piece_active_[static_cast<size_t>(begin / kPiece)] = active;
  });
  for (const uint64_t active : piece_active_) active_ += active;
  neurons_ += static_cast<uint64_t>(n);
}

void ThresholdDevice::look(size_t layer, int64_t T, const std::vector<float>& gate, const float* norms,
                           int64_t norm_stride) {
  const int64_t n = n_neurons(layer);
  if (count_active_) count_active(layer, T, gate);
  if (histograms_ != nullptr) {
    for (int64_t i = 0; i < T * n; ++i) (*histograms_)[layer].add(std::fabs(gate[static_cast<size_t>(i)]));
  }
  if (counts_ == nullptr) return;
  ThresholdCounts& counts = (*counts_)[layer];
  team_.for_chunks(n, kPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = 0; t < T; ++t) {
      counts.add(gate.data() + t * n, value_.data() + t * n, norms + t * norm_stride, begin, end);
    }
  });
  counts.add_tokens(T);
}

// y += Wd · value of the neurons above the threshold.
void ThresholdDevice::add_masked(size_t layer, const FfnShard& shard, int64_t T, Vector y_bias, float* y) {
  const float threshold = thresholds_[layer];
  team_.for_chunks(T * n_ff_, kPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const auto n = static_cast<size_t>(i);
      if (!(std::fabs(gate_[n]) > threshold)) value_[n] = 0.0f;
    }
  });
  const size_t bytes = value_.size() * sizeof(float);
  if (device_value_.bytes() < bytes) device_value_ = inner_.allocate(bytes, Purpose::scratch);
  inner_.upload(device_value_.as<float>(), value_.data(), bytes);
  const MatmulPart down{.w = down_of(layer, shard), .bias = y_bias, .y = y, .accumulate = true};
  inner_.matmul({&down, 1}, Act{device_value_.as<float>(), nullptr}, T);
}

void ThresholdDevice::ffn_dense(const FfnShard& shard, const Input& input, int64_t T, Vector y_bias, float* y,
                                const NextNorm* next) {
  const Act in = rows_of(input, T);
  const size_t layer = layer_of(shard);
  const bool masked = threshold(layer) > 0, values = masked || counts_ != nullptr;
  if (values || looks()) {
    evaluate(shard, in, T, values);
    activate(layer, T, gate_, values && shard.up ? &up_ : nullptr, values);
  }
  auto& norms = down_norms_[layer];
  if (counts_ != nullptr && norms.empty()) norms = {down_row_norms(model_.weights().layers[layer].ffn)};
  if (looks()) look(layer, T, gate_, counts_ != nullptr ? norms.front().data() : nullptr, 0);
  if (!masked) return inner_.ffn_dense(shard, in, T, y_bias, y, next);
  add_masked(layer, shard, T, y_bias, y);
}

void ThresholdDevice::ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& input, int64_t T,
                                  float* y) {
  const Act in = rows_of(input, T);
  const size_t layer = layer_of(set.experts.front().ffn);
  if (looks()) look_at_experts(layer, set, choice, in, T);
  ExpertSet own = set;
  own.threshold = threshold(layer);
  inner_.expert_ffn()->ffn_experts(own, choice, in, T, y);
}

void ThresholdDevice::look_at_experts(size_t layer, const ExpertSet& set, const ExpertChoice& choice, Act in,
                                      int64_t T) {
  const bool values = counts_ != nullptr;
  experts_.evaluate(set, choice, in, T, values);
  activate(layer, T, experts_.gate, values && set.experts.front().ffn.up ? &experts_.up : nullptr, values);
  if (values) weigh_experts(layer, T), (*counts_)[layer].add_choice(experts_.ids);
  look(layer, T, experts_.gate, norms_.data(), experts_.n());
}

void ThresholdDevice::weigh_experts(size_t layer, int64_t T) {
  const std::vector<Expert>& experts = model_.weights().layers[layer].experts;
  auto& norms = down_norms_[layer];
  if (norms.empty()) {
    norms.resize(experts.size());
    team_.for_chunks(std::ssize(experts), 1, [&](int64_t e, int64_t, int) {
      norms[static_cast<size_t>(e)] = down_row_norms(experts[static_cast<size_t>(e)].ffn);
    });
  }
  norms_.resize(value_.size());
  const auto n_named = static_cast<size_t>(std::ssize(experts_.offsets));
  team_.for_chunks(T, 1, [&](int64_t t, int64_t, int) {
    for (size_t slot = 0; slot < n_named; ++slot) {
      const size_t i = static_cast<size_t>(t) * n_named + slot;
      const std::vector<float>& rows = norms[static_cast<size_t>(experts_.ids[i])];
      const int64_t at = t * experts_.n() + experts_.offsets[slot];
      std::copy(rows.begin(), rows.end(), norms_.begin() + at);
      for (size_t k = 0; k < rows.size(); ++k) value_[static_cast<size_t>(at) + k] *= experts_.weights[i];
    }
  });
}

}  // namespace hearth::offline
