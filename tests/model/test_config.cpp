// What keys, descriptions of architectures and tensors make of a file's attention; and what contradicts itself.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/error.h"
#include "model/architectures.h"
#include "model/model.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_model.h"

namespace hearth::model {
namespace {

using Keys = std::map<std::string, gguf::Value>;

// A file of metadata alone, with six layers; a key without a dot has the architecture's prefix.
Config config_of(const std::string& arch, const Keys& keys = {}) {
  const test::TempDir dir;
  gguf::Writer w(dir / "m.gguf");
  w.set("general.architecture", arch);
  const auto set = [&](const char* key, uint32_t value) { w.set(arch + "." + key, value); };
  set("block_count", 6), set("embedding_length", 64), set("feed_forward_length", 96), set("context_length", 512);
  set("attention.head_count", 4), set("attention.head_count_kv", 2), set("attention.key_length", 32);
  w.set(arch + ".attention.layer_norm_rms_epsilon", 1e-6f);
  w.set(arch + ".attention.layer_norm_epsilon", 1e-5f);
  for (const auto& [key, value] : keys) w.set(key.starts_with("hearth.") ? key : arch + "." + key, value);
  w.add_tensor("blk.0.ffn_gate.weight", DType::f32, {1});
  w.begin();
  w.write(0, 0, std::vector<std::byte>(4));
  w.finish();
  return read_config(gguf::File::open(dir / "m.gguf"));
}

std::vector<bool> windowed(const Config& c) {
  std::vector<bool> layers;
  for (const LayerAttention& l : c.layers) layers.push_back(l.window > 0);
  return layers;
}
gguf::Value flags(std::vector<bool> values) {
  return gguf::Array(std::move(values));
}
constexpr bool T = true, F = false;

TEST(Config, EveryArchitectureReads) {
  for (const Architecture& a : architectures()) {
    const Keys latent = {{"attention.kv_lora_rank", uint32_t{24}},
                         {"attention.value_length", uint32_t{16}},
                         {"rope.dimension_count", uint32_t{8}}};
    const Config c = config_of(std::string(a.name), a.latent_attention ? latent : Keys{});
    EXPECT_EQ(c.layers.size(), 6u) << a.name;
    EXPECT_EQ(find_architecture(a.name), &a);
  }
}

TEST(Config, WindowsByKeyByPeriodAndByArchitecture) {
  EXPECT_EQ(windowed(config_of("llama")), std::vector<bool>(6, F));
  EXPECT_EQ(windowed(config_of("llama", {{"attention.sliding_window", uint32_t{8}}})), std::vector<bool>(6, T));
  const Config gemma2 = config_of("gemma2");
  EXPECT_EQ(windowed(gemma2), (std::vector<bool>{T, F, T, F, T, F}));
  EXPECT_EQ(gemma2.layer(0).window, 4096);
  EXPECT_EQ(gemma2.seen(0, 5000), 4096);
  EXPECT_EQ(gemma2.seen(1, 5000), 5000);
  EXPECT_EQ(config_of("starcoder2").layer(5).window, 4096);
  EXPECT_EQ(windowed(config_of("gemma2", {{"attention.sliding_window", uint32_t{0}}})), std::vector<bool>(6, F));
  const gguf::Value window = uint32_t{16};
  EXPECT_EQ(windowed(config_of("gemma3", {{"attention.sliding_window", window}})),
            (std::vector<bool>{T, T, T, T, T, F}));
  EXPECT_EQ(windowed(config_of(
                "gemma3", {{"attention.sliding_window", window}, {"attention.sliding_window_pattern", uint32_t{3}}})),
            (std::vector<bool>{T, T, F, T, T, F}));
  EXPECT_EQ(windowed(config_of("llama", {{"attention.sliding_window", window},
                                         {"attention.sliding_window_pattern", flags({F, T, T, F, F, T})}})),
            (std::vector<bool>{F, T, T, F, F, T}));
}

TEST(Config, RopeByLayer) {
  const Config gemma3 = config_of("gemma3", {{"attention.sliding_window", uint32_t{16}},
                                             {"rope.freq_base", 1e6f},
                                             {"rope.scaling.type", std::string("linear")},
                                             {"rope.scaling.factor", 8.0f}});
  ASSERT_EQ(gemma3.ropes.size(), 2u);
  EXPECT_EQ(gemma3.layer(0).rope, 1);
  EXPECT_EQ(gemma3.layer(5).rope, 0);
  EXPECT_EQ(gemma3.ropes[0].base, 1e6);
  EXPECT_EQ(gemma3.ropes[0].linear_factor, 8);
  EXPECT_EQ(gemma3.ropes[1].base, 10000);
  EXPECT_EQ(gemma3.ropes[1].linear_factor, 1);
  const auto rotated = [](const Config& c) {
    std::vector<bool> layers;
    for (const LayerAttention& l : c.layers) layers.push_back(l.rope >= 0);
    return layers;
  };
  EXPECT_EQ(rotated(config_of("smollm3")), (std::vector<bool>{T, T, T, F, T, T}));
  EXPECT_EQ(rotated(config_of("smollm3", {{"hearth.rope.layers", flags({F, T, T, T, T, F})}})),
            (std::vector<bool>{F, T, T, T, T, F}));
  // Where others have windows, layers that see everything are not rotated.
  const Config windows = config_of("smallthinker", {{"attention.sliding_window", uint32_t{16}}});
  EXPECT_EQ(rotated(windows), (std::vector<bool>{F, T, T, T, F, T}));
  EXPECT_EQ(windowed(windows), rotated(windows));
  EXPECT_EQ(rotated(config_of("smallthinker")), std::vector<bool>(6, T));
}

TEST(Config, ScalesAndCaps) {
  const Config granite = config_of(
      "granite",
      {{"embedding_scale", 12.0f}, {"residual_scale", 0.25f}, {"logit_scale", 8.0f}, {"attention.scale", 0.5f}});
  EXPECT_FLOAT_EQ(granite.embedding_scale, 48);
  EXPECT_FLOAT_EQ(granite.norm_eps, 16e-6f);
  EXPECT_FLOAT_EQ(granite.logit_scale, 0.125f);
  EXPECT_FLOAT_EQ(granite.attention_scale, 0.5f);
  const Config gemma2 = config_of("gemma2");
  EXPECT_FLOAT_EQ(gemma2.embedding_scale, 8);
  EXPECT_FLOAT_EQ(gemma2.attention_scale, 1 / std::sqrt(32.0f));
  EXPECT_FLOAT_EQ(gemma2.attention_soft_cap, 50);
  EXPECT_FLOAT_EQ(gemma2.logit_soft_cap, 30);
  EXPECT_EQ(config_of("gemma2", {{"attn_logit_softcapping", 0.0f}}).attention_soft_cap, 0);
  // The size of 46 layers divides by the width of a head if heads shared the embedding.
  EXPECT_FLOAT_EQ(config_of("gemma2", {{"block_count", uint32_t{46}}}).attention_scale, 0.25f);
}

TEST(Config, ContradictionsAreRefused) {
  struct Case {
    std::string arch;
    Keys keys;
    const char* expected;
  };
  const gguf::Value yarn = std::string("yarn");
  const std::vector<Case> cases = {
      {"gemma2",
       {{"attention.sliding_window_pattern", flags({T, F})}},
       "gemma2.attention.sliding_window_pattern has 2 entries, expected one for each of 6 layers"},
      {"gemma2", {{"attention.sliding_window_pattern", uint32_t{0}}}, "sliding_window_pattern is 0, expected 1 to"},
      {"gemma2", {{"attention.sliding_window", int32_t{-4}}}, "gemma2.attention.sliding_window is -4, expected 0"},
      {"gemma2", {{"attn_logit_softcapping", -50.0f}}, "attn_logit_softcapping is -50, expected a positive number"},
      {"gemma2", {{"attn_logit_softcapping", NAN}}, "attn_logit_softcapping is nan, expected a positive number"},
      {"smollm3", {{"hearth.rope.layers", uint32_t{4}}}, "hearth.rope.layers is not a list of true and false"},
      {"granite", {{"residual_scale", 0.0f}}, "granite.residual_scale is 0, expected a positive number"},
      {"granite", {{"logit_scale", INFINITY}}, "granite.logit_scale is inf, expected a positive number"},
      {"qwen3", {{"rope.scaling.type", yarn}}, "qwen3.rope.scaling.factor"},
      {"qwen3", {{"rope.scaling.type", yarn}, {"rope.scaling.factor", 0.5f}}, "expected 1 or more"},
      {"qwen3",
       {{"rope.scaling.type", yarn}, {"rope.scaling.factor", 4.0f}},
       "qwen3.rope.scaling.original_context_length"},
      {"qwen3", {{"rope.scaling.type", std::string("longrope")}}, "needs the tensor rope_factors_long.weight"},
      {"qwen3", {{"rope.scaling.type", std::string("ntk")}}, "RoPE scaling 'ntk' is not supported"},
      {"qwen3", {{"rope.scaling.type", std::string("linear")}}, "qwen3.rope.scaling.factor is missing"},
      {"glm4moe", {{"nextn_predict_layers", uint32_t{6}}}, "every layer predicts tokens farther ahead"},
      {"nemotron", {{"rope.dimension_count", uint32_t{7}}}, "is 7, expected an even number up to the head's 32"},
  };
  for (const Case& c : cases) {
    const std::string error = test::message_of([&] { config_of(c.arch, c.keys); });
    EXPECT_NE(error.find(c.expected), std::string::npos) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

// Pairs that turn often keep their frequency, slow ones are divided by the factor, and between lies a ramp.
TEST(Rope, YarnBlendsFromFastToSlowPairs) {
  Rope plain{.base = 10000}, yarn = plain;
  yarn.yarn = Yarn{.factor = 8, .original_context = 1024, .truncates = false};
  constexpr int64_t kRot = 64;
  const auto f = rope_frequencies(plain, kRot, {}), g = rope_frequencies(yarn, kRot, {});
  EXPECT_EQ(g.front(), f.front());
  EXPECT_FLOAT_EQ(g.back(), f.back() / 8);
  for (size_t i = 0; i < f.size(); ++i) {
    const double turns = 1024 * static_cast<double>(f[i]) / (2 * M_PI), ratio = f[i] / g[i];
    if (turns > 32) {
      EXPECT_NEAR(ratio, 1, 1e-6) << i;
    } else if (turns < 1) {
      EXPECT_NEAR(ratio, 8, 1e-5) << i;
    } else {
      EXPECT_GT(ratio, 1) << i;
      EXPECT_LT(ratio, 8) << i;
    }
  }
  // At whole pairs the ramp is wider, never narrower.
  yarn.yarn->truncates = true;
  const auto whole = rope_frequencies(yarn, kRot, {});
  EXPECT_NE(whole, g);
}

TEST(Model, TensorsOfRopeFactorsAreChecked) {
  const test::TempDir dir;
  const auto error_with = [&](std::map<std::string, std::vector<float>> vectors) {
    test::TinyModelOptions o;
    o.keys = {{"llama.rope.scaling.original_context_length", uint32_t{16}}};
    o.vectors = std::move(vectors);
    return test::message_of([&] { Model::load(test::write_tiny_model(dir / "m.gguf", o)); });
  };
  const std::vector<float> ones(8, 1.0f), zero(8, 0.0f);
  EXPECT_EQ(error_with({{"rope_factors_long.weight", ones}, {"rope_factors_short.weight", ones}}), "no error");
  EXPECT_NE(error_with({{"rope_factors_long.weight", ones}}).find("tensor rope_factors_short.weight is missing"),
            std::string::npos);
  EXPECT_NE(error_with({{"rope_factors_long.weight", zero}, {"rope_factors_short.weight", ones}})
                .find("rope_factors_long.weight[0] is 0, expected a positive number"),
            std::string::npos);
  EXPECT_NE(error_with({{"rope_factors_long.weight", {1, 1}}, {"rope_factors_short.weight", ones}})
                .find("tensor rope_factors_long.weight is [2, 1], expected [8, 1]"),
            std::string::npos);
}

}  // namespace
}  // namespace hearth::model
