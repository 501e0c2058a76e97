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
      down_norms_(model.weights().layers.size()),
      untransposed_(model.weights().layers.size()),
      own_down_(model.weights().layers.size()) {
  for (const model::LayerWeights& l : model.weights().layers) {
    rules_.push_back({l.ffn.act, l.ffn.act_threshold, l.ffn.up_relu, 0.0f});
    if (!l.ffn.down_t && is_quantized(l.ffn.down.type)) {
      fail(
          "'{}' stores its down projections quantised and not transposed, so that no neuron can be left out; "
          "--transpose-down quantises them again, `hearth quantize --transposed-down` makes a file of it",
          model.file().path().string());
    }
  }
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

// act(gate) of T tokens into gate_, and on request the neurons' values, act(gate) * up, into value_.
void ThresholdDevice::evaluate_values(size_t layer, const FfnShard& shard, Act in, int64_t T, bool with_up) {
  evaluate(shard, in, T, with_up);
  const bool up = with_up && shard.up;
  const NeuronRule& rule = rules_[layer];
  if (with_up) value_.resize(static_cast<size_t>(T * n_ff_));
  team_.for_chunks(T * n_ff_, kPiece, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const auto n = static_cast<size_t>(i);
      gate_[n] = rule.activate(gate_[n]);
      if (!with_up) continue;
      const float factor = !up ? 1.0f : rule.up_relu ? std::max(0.0f, up_[n]) : up_[n];
      value_[n] = gate_[n] * factor;
    }
  });
}

void ThresholdDevice::count_active(size_t layer, int64_t T) {
  const float threshold = thresholds_[layer];
  piece_active_.assign(static_cast<size_t>((T * n_ff_ + kPiece - 1) / kPiece), 0);
  team_.for_chunks(T * n_ff_, kPiece, [&](int64_t begin, int64_t end, int) {
    uint64_t n = 0;
    for (int64_t i = begin; i < end; ++i) n += std::fabs(gate_[static_cast<size_t>(i)]) > threshold ? 1 : 0;
    piece_active_[static_cast<size_t>(begin / kPiece)] = n;
  });
  for (const uint64_t n : piece_active_) active_ += n;
  neurons_ += static_cast<uint64_t>(T * n_ff_);
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
  const bool masked = !thresholds_.empty() && thresholds_[layer] > 0;
  const bool values = masked || counts_ != nullptr;
  if (values || count_active_ || histograms_ != nullptr) evaluate_values(layer, shard, in, T, values);
  if (count_active_) count_active(layer, T);
  if (histograms_ != nullptr) {
    for (int64_t i = 0; i < T * n_ff_; ++i) (*histograms_)[layer].add(std::fabs(gate_[static_cast<size_t>(i)]));
  }
  if (counts_ != nullptr) {
    std::vector<float>& norms = down_norms_[layer];
    if (norms.empty()) norms = down_row_norms(model_.weights().layers[layer].ffn);
    ThresholdCounts& counts = (*counts_)[layer];
    team_.for_chunks(n_ff_, kPiece, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = 0; t < T; ++t) {
        counts.add(gate_.data() + t * n_ff_, value_.data() + t * n_ff_, norms.data(), begin, end);
      }
    });
    counts.add_tokens(T);
  }
  if (!masked) return inner_.ffn_dense(shard, in, T, y_bias, y, next);
  add_masked(layer, shard, T, y_bias, y);
}

}  // namespace hearth::offline
