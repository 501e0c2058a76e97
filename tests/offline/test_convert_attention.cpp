// What config.json says of attention, in today's keys and in those of older releases: both lead to the same
// configuration, and what contradicts itself is refused with one line.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "offline/convert/hf_config.h"
#include "support/errors.h"

namespace hearth {
namespace {

using convert::HfConfig;
using convert::Json;
using convert::RopeScaling;

Json config_of(const char* architecture) {
  return {{"architectures", {architecture}}, {"hidden_size", 64},
          {"intermediate_size", 96},         {"num_hidden_layers", 6},
          {"num_attention_heads", 4},        {"num_key_value_heads", 2},
          {"head_dim", 16},                  {"max_position_embeddings", 512},
          {"rms_norm_eps", 1e-6},            {"norm_eps", 1e-6},
          {"vocab_size", 100}};
}
HfConfig parse(const Json& config) {
  return convert::parse_hf_config(config, "config.json", {});
}

TEST(ConvertAttention, Gemma3InKeysOfTodayAndOfBefore) {
  Json today = config_of("Gemma3ForCausalLM"), before = today;
  today["sliding_window"] = before["sliding_window"] = 16;
  today["layer_types"] = {"sliding_attention", "sliding_attention", "full_attention",
                          "sliding_attention", "sliding_attention", "full_attention"};
  today["rope_parameters"]["full_attention"] = {{"rope_theta", 5e5}, {"rope_type", "linear"}, {"factor", 8.0}};
  today["rope_parameters"]["sliding_attention"] = {{"rope_theta", 2e4}, {"rope_type", "default"}};
  before["sliding_window_pattern"] = 3;
  before["rope_theta"] = 5e5, before["rope_local_base_freq"] = 2e4;
  before["rope_scaling"] = {{"type", "linear"}, {"factor", 8.0}};
  for (const Json& json : {today, before}) {
    const HfConfig c = parse(json);
    EXPECT_EQ(c.sliding_window, 16);
    EXPECT_EQ(c.window_layers, (std::vector<bool>{true, true, false, true, true, false}));
    EXPECT_EQ(c.rope_theta, 5e5);
    EXPECT_EQ(c.window_rope_theta, 2e4);
    EXPECT_EQ(c.rope.kind, RopeScaling::Kind::linear);
    EXPECT_EQ(c.rope.factor, 8.0);
    EXPECT_TRUE(c.tied_head);
    EXPECT_EQ(c.activation, "gelu_tanh");
    EXPECT_DOUBLE_EQ(c.attention_scale, 1.0 / 16);  // query_pre_attn_scalar is 256 where it is absent
  }
}

// An absent cap is the class's, a null one is none.
TEST(ConvertAttention, NullIsNotAbsent) {
  Json json = config_of("Gemma2ForCausalLM");
  EXPECT_EQ(parse(json).attn_soft_cap, 50);
  EXPECT_EQ(parse(json).logit_soft_cap, 30);
  json["attn_logit_softcapping"] = json["final_logit_softcapping"] = nullptr;
  EXPECT_EQ(parse(json).attn_soft_cap, 0);
  EXPECT_EQ(parse(json).logit_soft_cap, 0);
}

TEST(ConvertAttention, Phi3LongFactors) {
  Json json = config_of("Phi3ForCausalLM");
  json["original_max_position_embeddings"] = 64;
  const std::vector<double> small(8, 1.0), large(8, 4.0);
  for (const char* type : {"longrope", "su"}) {
    json["rope_scaling"] = {{"type", type}, {"short_factor", small}, {"long_factor", large}};
    const HfConfig c = parse(json);
    EXPECT_EQ(c.rope.kind, RopeScaling::Kind::longrope);
    EXPECT_EQ(c.rope.original_context, 64);
    EXPECT_EQ(c.rope.long_factors, std::vector<float>(8, 4.0f));
    EXPECT_NEAR(c.rope.attention_factor, std::sqrt(1 + std::log(8.0) / std::log(64.0)), 1e-12);
    EXPECT_EQ(convert::rope_factors(c).size(), 2u);
  }
}

TEST(ConvertAttention, Yarn) {
  Json json = config_of("Qwen3ForCausalLM");
  json["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 8}, {"original_max_position_embeddings", 64},
                             {"truncate", false}};
  const HfConfig c = parse(json);
  EXPECT_EQ(c.rope.kind, RopeScaling::Kind::yarn);
  EXPECT_FALSE(c.rope.truncate);
  EXPECT_NEAR(c.rope.attention_factor, 0.1 * std::log(8.0) + 1, 1e-12);
}

TEST(ConvertAttention, WindowsFromALayerOn) {
  Json json = config_of("Qwen2ForCausalLM");
  json["use_sliding_window"] = true, json["sliding_window"] = 16, json["max_window_layers"] = 4;
  const HfConfig c = parse(json);
  EXPECT_EQ(c.window_layers, (std::vector<bool>{false, false, false, false, true, true}));
  json["max_window_layers"] = 6;
  EXPECT_EQ(parse(json).sliding_window, 0);
}

TEST(ConvertAttention, LayersWithoutRope) {
  Json json = config_of("SmolLM3ForCausalLM");
  EXPECT_EQ(parse(json).rotated_layers, (std::vector<bool>{true, true, true, false, true, true}));
  json["no_rope_layer_interval"] = 2;
  EXPECT_EQ(parse(json).rotated_layers, (std::vector<bool>{true, false, true, false, true, false}));
  json["no_rope_layers"] = {0, 1, 1, 1, 1, 0};
  EXPECT_EQ(parse(json).rotated_layers, (std::vector<bool>{false, true, true, true, true, false}));
}

struct RefusalCase {
  const char* architecture;
  std::function<void(Json&)> edit;
  const char* expected;
};

TEST(ConvertAttention, ContradictionsAreRefused) {
  const auto set = [](const char* key, Json value) { return [=](Json& c) { c[key] = value; }; };
  const auto rope = [set](Json value) { return set("rope_parameters", std::move(value)); };
  const std::vector<RefusalCase> cases = {
      {"Qwen3ForCausalLM", rope({{"rope_type", "yarn"}}), "factor is missing"},
      {"Qwen3ForCausalLM", rope({{"rope_type", "longrope"}}), "original_max_position_embeddings is missing"},
      {"Qwen3ForCausalLM", rope({{"rope_type", "longrope"}, {"original_max_position_embeddings", 64}}),
       "short_factor is missing, expected a list of 8 numbers"},
      {"Qwen3ForCausalLM",
       rope({{"full_attention", {{"rope_theta", 1e6}}}, {"sliding_attention", {{"rope_theta", 1e4}}}}),
       "RoPE that differs between layers is not supported"},
      {"Gemma3ForCausalLM",
       rope({{"full_attention", {{"rope_theta", 1e6}}}, {"sliding_attention", {{"rope_type", "linear"}}}}),
       "a scaling of layers with a window is not supported"},
      {"Gemma2ForCausalLM", set("layer_types", {"full_attention"}), "layer_types has 1 entries, expected one for each"},
      {"Gemma2ForCausalLM", set("query_pre_attn_scalar", 0), "query_pre_attn_scalar is 0, expected a positive number"},
      {"Gemma2ForCausalLM", set("attn_logit_softcapping", -1), "attn_logit_softcapping is -1, expected a positive"},
      {"Gemma3ForCausalLM", set("use_bidirectional_attention", true), "use_bidirectional_attention is not supported"},
      {"NemotronForCausalLM", set("partial_rotary_factor", 0), "partial_rotary_factor is 0, expected a number above 0"},
      {"NemotronForCausalLM", set("partial_rotary_factor", 0.2), "a rotation of 3 elements of a head is not supported"},
      {"GraniteForCausalLM", set("residual_multiplier", 0), "residual_multiplier is 0, expected a positive number"},
      {"SmolLM3ForCausalLM", set("no_rope_layers", {1, 2, 1, 1, 1, 1}), "expected 0 or 1 for each of 6 layers"},
  };
  for (const RefusalCase& c : cases) {
    Json json = config_of(c.architecture);
    c.edit(json);
    const std::string error = test::message_of([&] { parse(json); });
    EXPECT_NE(error.find(c.expected), std::string::npos) << c.architecture << ": " << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace hearth
