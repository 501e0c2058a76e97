#pragma once
// The small checkpoints of every supported family, converted once per test process.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "core/device.h"
#include "cpu/cpu.h"
#include "model/model.h"
#include "offline/convert/convert.h"
#include "offline/convert/hf_config.h"
#include "offline/quantize/quantize.h"
#include "support/goldens.h"
#include "support/paths.h"
#include "support/tiny_model.h"

namespace hearth::test {

struct ZooModel {
  std::string name;
  std::filesystem::path directory;
  friend void PrintTo(const ZooModel& z, std::ostream* out) { *out << z.name; }
};

// Today's dense architectures in the shared material.
inline constexpr const char* kTodays[] = {"gemma2", "gemma3", "phi3", "smollm3", "olmo2", "granite", "nemotron"};
inline bool is_todays(const ZooModel& model) {
  return std::any_of(std::begin(kTodays), std::end(kTodays),
                     [&](const std::string name) { return model.name == "shared_" + name; });
}

// Whether its neurons are exactly zero for many tokens.
inline bool is_sparse(const ZooModel& model) {
  if (!std::filesystem::exists(model.directory / "config.json")) return false;
  return convert::read_hf_config(model.directory, std::nullopt).activation.find("relu") != std::string::npos;
}

// The project's own fixtures (always there), then those of the shared material, by name, so that a test of one that is
// absent is skipped and not forgotten.
inline std::vector<ZooModel> zoo() {
  std::vector<ZooModel> models;
  for (const auto& entry : std::filesystem::directory_iterator(data_dir() / "zoo")) {
    if (entry.is_directory()) models.push_back({"own_" + entry.path().filename().string(), entry.path()});
  }
  std::sort(models.begin(), models.end(), [](const ZooModel& a, const ZooModel& b) { return a.name < b.name; });
  for (const char* name : {"llama-relu-gqa", "llama-silu-rope3", "mistral-silu", "qwen2-relu", "qwen3-silu", "opt-relu",
                           "falcon-relu", "bamboo-drelu"}) {
    models.push_back({std::string("shared_") + name, shared_dir() / "models" / "zoo-hf" / name});
  }
  for (const char* name : kTodays) {
    models.push_back({std::string("shared_") + name, shared_dir() / "models" / "zoo2-hf" / name});
  }
  for (ZooModel& m : models) std::replace(m.name.begin(), m.name.end(), '-', '_');
  return models;
}

// Mixtures of experts of the shared material.
inline std::vector<ZooModel> mixtures() {
  std::vector<ZooModel> models;
  for (const char* name : {"mixtral-silu", "qwen2moe", "qwen3moe", "olmoe", "glm4moe", "gpt-oss", "deepseek-v2-lite"}) {
    models.push_back({std::string("shared_") + name, shared_dir() / "models" / "zoo2-hf" / name});
  }
  for (ZooModel& m : models) std::replace(m.name.begin(), m.name.end(), '-', '_');
  return models;
}

// Not a checkpoint: a random llama whose rows hold whole super-blocks of 256, with the down projection transposed;
// "mixed": that and attn_v in Q6_K, as the usual mixes have them.
inline std::vector<ZooModel> wide_models() {
  return {{"wide", {}}, {"wide_mixed", {}}};
}
inline constexpr DType kWideTypes[] = {DType::q4_k, DType::q6_k, DType::q2_k, DType::iq4_xs};

// The GGUF of a checkpoint at a type; quantised ones with ffn_down transposed, as `hearth quantize` writes them.
inline std::filesystem::path gguf_of(const ZooModel& model, DType type) {
  static const TempDir dir;
  const auto path = dir / (model.name + "-" + traits(type).name + ".gguf");
  if (std::filesystem::exists(path)) return path;
  if (model.directory.empty()) {
    TinyModelOptions o{.type = type, .transposed_down = true, .n_embd = 256, .n_ff = 256};
    if (model.name == "wide_mixed") o.down_type = DType::q6_k;
    return write_tiny_model(path, o);
  }
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
  for (size_t i = 0; i < a.size(); ++i) worst = worse_difference(worst, a[i], b[i]);
  return worst;
}

}  // namespace hearth::test
