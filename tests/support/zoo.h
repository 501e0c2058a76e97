#pragma once
// The small checkpoints of every supported family, converted once per test process.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "cpu/cpu.h"
#include "model/model.h"
#include "offline/convert/convert.h"
#include "offline/quantize.h"
#include "support/goldens.h"
#include "support/paths.h"

namespace hearth::test {

struct ZooModel {
  std::string name;
  std::filesystem::path directory;
  friend void PrintTo(const ZooModel& z, std::ostream* out) { *out << z.name; }
};

// The project's own fixtures (always there), then those of the shared material, by name, so that a test of one that is
// absent is skipped and not forgotten.
inline std::vector<ZooModel> zoo() {
  std::vector<ZooModel> models;
  for (const auto& entry : std::filesystem::directory_iterator(data_dir() / "zoo")) {
    if (entry.is_directory()) models.push_back({"own_" + entry.path().filename().string(), entry.path()});
  }
  for (const char* name : {"llama-relu-gqa", "llama-silu-rope3", "mistral-silu", "qwen2-relu", "qwen3-silu", "opt-relu",
                           "falcon-relu", "bamboo-drelu"}) {
    models.push_back({std::string("shared_") + name, shared_dir() / "models" / "zoo-hf" / name});
  }
  for (ZooModel& m : models) std::replace(m.name.begin(), m.name.end(), '-', '_');
  return models;
}

// The GGUF of a checkpoint at a type; quantised ones with ffn_down transposed, as `hearth quantize` writes them.
inline std::filesystem::path gguf_of(const ZooModel& model, DType type) {
  static const TempDir dir;
  const auto path = dir / (model.name + "-" + traits(type).name + ".gguf");
  if (std::filesystem::exists(path)) return path;
  if (is_quantized(type)) {
    ThreadTeam team(1);
    offline::QuantizeOptions options;
    options.type = type;
    offline::quantize(gguf_of(model, DType::f32), path, options, team);
    return path;
  }
  convert::Options options;
  options.type = type;
  options.n_threads = 1;
  if (read_goldens(model.directory).ffn == "relu(gate)*relu(up)") options.ffn = "drelu";
  convert::convert_checkpoint(model.directory, path, options);
  return path;
}

inline double rms(std::span<const float> x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * v;
  return std::sqrt(sum / static_cast<double>(x.size()));
}

inline double worst_difference(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - b[i]);
    worst = std::isnan(d) ? INFINITY : std::max(worst, d);
  }
  return worst;
}

// How far logits may be from those of the same weights in float with an unrounded KV cache. Keys and values are rounded
// to f16: a relative error of at most 2^-11 in each of n_layer attention outputs, which the residual stream carries to
// the head unamplified on average; the factor 4 covers the worst of the n_vocab outputs (4 standard deviations). Float
// rounding (sqrt(n_ff) 2^-24) is far below. The recorded values have 5 decimals.
inline double f16_cache_tolerance(const model::Config& c, double logits_rms) {
  return 4.0 * static_cast<double>(c.n_layer) * 0x1p-11 * logits_rms + 1e-5;
}

// How far apart, relative to the logits' rms, two correct runs may end whose roundings of 8-bit activations differ:
// rounding moves activations across boundaries of their 8-bit form, the residual stream spreads that, and the runs end
// as far apart as two independent draws of the quantisation noise. Its standard deviation is a step / sqrt(12), a step
// being 1/127 of a block's largest of 32 values: 2.3 standard deviations in normed or averaged activations (0.0052 of
// their rms, in three products of a layer and the head), 4.5 in the heavy-tailed values of an FFN (0.0102, in the down
// projection); sqrt(2) for a difference.
inline double quantization_noise(const model::Config& c) {
  const auto n_layer = static_cast<double>(c.n_layer);
  return std::sqrt(2.0 * (n_layer * (3 * 0.0052 * 0.0052 + 0.0102 * 0.0102) + 0.0052 * 0.0052));
}

}  // namespace hearth::test
