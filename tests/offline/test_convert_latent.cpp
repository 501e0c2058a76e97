// Checkpoints of DeepSeek (multi-head latent attention) and SmallThinker, made up: keys, and where tensors go.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "hf_checkpoint.h"
#include "model/model.h"
#include "support/errors.h"

namespace hearth {
namespace {

using nlohmann::json;

constexpr int64_t kEmbd = 64, kVocab = 300, kHeads = 3, kFf = 32, kExperts = 4;

class MadeUp : public testing::Test {
 protected:
  void add(const std::string& name, std::vector<int64_t> shape) {
    tensors_[name] = test::random_f32(rng_, std::move(shape));
  }
  void add_model(const json& config) {
    config_ = {{"hidden_size", kEmbd},        {"num_hidden_layers", 2}, {"num_attention_heads", kHeads},
               {"vocab_size", kVocab},        {"rms_norm_eps", 1e-6},   {"max_position_embeddings", 512},
               {"tie_word_embeddings", false}};
    config_.update(config);
    add("model.embed_tokens.weight", {kVocab, kEmbd}), add("lm_head.weight", {kVocab, kEmbd});
    add("model.norm.weight", {kEmbd});
  }
  void add_experts(const std::string& prefix, const char* gate, const char* up, const char* down) {
    for (int64_t e = 0; e < kExperts; ++e) {
      const std::string p = prefix + "experts." + std::to_string(e) + ".";
      add(p + gate + ".weight", {kFf, kEmbd}), add(p + up + ".weight", {kFf, kEmbd});
      add(p + down + ".weight", {kEmbd, kFf});
    }
  }
  gguf::File convert() {
    return test::convert_tensors(dir_, config_, tensors_, DType::f32,
                                 [&](std::string_view text) { notices_.emplace_back(text); });
  }
  std::vector<float> values(const std::string& name) const {
    const std::string& bytes = tensors_.at(name).bytes;
    std::vector<float> v(bytes.size() / sizeof(float));
    std::memcpy(v.data(), bytes.data(), bytes.size());
    return v;
  }

  std::mt19937 rng_{11};
  test::HfTensors tensors_;
  json config_;
  std::vector<std::string> notices_;
  test::TempDir dir_;
};

class DeepSeek : public MadeUp {
 protected:
  static constexpr int64_t kLatent = 24, kPlain = 16, kRotated = 8, kValue = 12, kQLatent = 40;
  DeepSeek() {
    add_model({{"architectures", {"DeepseekV3ForCausalLM"}},
               {"kv_lora_rank", kLatent},
               {"q_lora_rank", kQLatent},
               {"qk_nope_head_dim", kPlain},
               {"qk_rope_head_dim", kRotated},
               {"v_head_dim", kValue},
               {"intermediate_size", 96},
               {"moe_intermediate_size", kFf},
               {"n_routed_experts", kExperts},
               {"n_shared_experts", 2},
               {"num_experts_per_tok", 2},
               {"n_group", 2},
               {"topk_group", 1},
               {"first_k_dense_replace", 1},
               {"routed_scaling_factor", 2.5},
               {"num_nextn_predict_layers", 1},
               {"rope_scaling",
                {{"type", "yarn"},
                 {"factor", 40},
                 {"original_max_position_embeddings", 64},
                 {"mscale", 1.0},
                 {"mscale_all_dim", 0.5}}}});
    for (int64_t l = 0; l < 3; ++l) {  // the last one predicts another token
      const std::string p = "model.layers." + std::to_string(l) + ".", a = p + "self_attn.";
      add(p + "input_layernorm.weight", {kEmbd}), add(p + "post_attention_layernorm.weight", {kEmbd});
      add(a + "q_a_proj.weight", {kQLatent, kEmbd}), add(a + "q_a_layernorm.weight", {kQLatent});
      add(a + "q_b_proj.weight", {kHeads * (kPlain + kRotated), kQLatent});
      add(a + "kv_a_proj_with_mqa.weight", {kLatent + kRotated, kEmbd}), add(a + "kv_a_layernorm.weight", {kLatent});
      add(a + "kv_b_proj.weight", {kHeads * (kPlain + kValue), kLatent});
      add(a + "o_proj.weight", {kEmbd, kHeads * kValue});
      const std::string dense = l == 0 ? "mlp." : "mlp.shared_experts.";
      const int64_t n = l == 0 ? 96 : 2 * kFf;
      add(p + dense + "gate_proj.weight", {n, kEmbd}), add(p + dense + "up_proj.weight", {n, kEmbd});
      add(p + dense + "down_proj.weight", {kEmbd, n});
      if (l == 0) continue;
      add(p + "mlp.gate.weight", {kExperts, kEmbd}), add(p + "mlp.gate.e_score_correction_bias", {kExperts});
      add_experts(p + "mlp.", "gate_proj", "up_proj", "down_proj");
    }
    add("model.layers.2.eh_proj.weight", {kEmbd, 2 * kEmbd});
  }
};

TEST_F(DeepSeek, KeysAreLlamaCpps) {
  const gguf::File file = convert();
  const auto integer = [&](const char* key) { return file.require<int64_t>(std::string("deepseek2.") + key); };
  EXPECT_EQ(integer("attention.kv_lora_rank"), kLatent);
  EXPECT_EQ(integer("attention.q_lora_rank"), kQLatent);
  EXPECT_EQ(integer("attention.key_length"), kLatent + kRotated);
  EXPECT_EQ(integer("attention.value_length"), kLatent);
  EXPECT_EQ(integer("attention.key_length_mla"), kPlain + kRotated);
  EXPECT_EQ(integer("attention.value_length_mla"), kValue);
  EXPECT_EQ(integer("attention.head_count_kv"), 1);
  EXPECT_EQ(integer("rope.dimension_count"), kRotated);
  EXPECT_EQ(integer("expert_gating_func"), 2);
  EXPECT_EQ(integer("expert_group_count"), 2);
  EXPECT_EQ(integer("expert_group_used_count"), 1);
  EXPECT_EQ(file.require<int64_t>("hearth.expert_best_of_group"), 2);
  EXPECT_FLOAT_EQ(file.require<float>("deepseek2.rope.scaling.yarn_log_multiplier"), 0.05f);
  EXPECT_EQ(file.find("hearth.attention.latent_norm_epsilon"), nullptr);
  const model::Model m = model::Model::load(dir_ / "m.gguf");
  // The softmax is corrected by mscale_all_dim, the rotation by what mscale has more.
  const double all = 0.1 * 0.5 * std::log(40.0) + 1, rotation = (0.1 * std::log(40.0) + 1) / all;
  EXPECT_NEAR(m.config().attention_scale, all * all / std::sqrt(24.0), 1e-6);
  EXPECT_NEAR(m.config().ropes[0].attention_factor, rotation, 1e-6);
}

// V2 limits tokens to groups, and ranks them by their best expert, only where it says so.
TEST_F(DeepSeek, GroupsOfV2) {
  config_["architectures"] = {"DeepseekV2ForCausalLM"};
  for (int64_t l = 1; l < 3; ++l) {
    tensors_.erase("model.layers." + std::to_string(l) + ".mlp.gate.e_score_correction_bias");
  }
  const auto routing = [&] {
    convert();
    return model::Model::load(dir_ / "m.gguf").config().experts.routing;
  };
  config_["topk_method"] = "group_limited_greedy";
  const Routing limited = routing();
  EXPECT_EQ(limited.gating, Gating::softmax);
  EXPECT_FALSE(limited.normalize);
  EXPECT_EQ(limited.scale, 2.5f);
  EXPECT_EQ(limited.n_groups, 2);
  EXPECT_EQ(limited.n_groups_used, 1);
  EXPECT_EQ(limited.n_best_of_group, 1);
  config_["topk_method"] = "greedy";
  EXPECT_EQ(routing().n_groups, 1);
  config_.erase("topk_method");
  EXPECT_EQ(routing().n_groups, 1);
}

TEST_F(DeepSeek, RowsThatMakeKeysAreTransposed) {
  const gguf::File file = convert();
  const std::vector<float> joint = values("model.layers.1.self_attn.kv_b_proj.weight");
  std::vector<float> k, v;
  for (int64_t h = 0; h < kHeads; ++h) {
    const float* const head = joint.data() + h * (kPlain + kValue) * kLatent;
    for (int64_t i = 0; i < kLatent * kPlain; ++i) k.push_back(head[i % kPlain * kLatent + i / kPlain]);
    v.insert(v.end(), head + kPlain * kLatent, head + (kPlain + kValue) * kLatent);
  }
  EXPECT_EQ(test::floats_of(file, "blk.1.attn_k_b.weight"), k);
  EXPECT_EQ(test::floats_of(file, "blk.1.attn_v_b.weight"), v);
  EXPECT_EQ(file.find_tensor("blk.1.attn_k_b.weight")->ne, (std::vector<int64_t>{kPlain, kLatent, kHeads}));
  EXPECT_EQ(file.find_tensor("blk.1.attn_v_b.weight")->ne, (std::vector<int64_t>{kLatent, kValue, kHeads}));
  EXPECT_EQ(test::floats_of(file, "blk.0.attn_q_b.weight"), values("model.layers.0.self_attn.q_b_proj.weight"));
  EXPECT_EQ(test::floats_of(file, "blk.1.exp_probs_b.bias"), values("model.layers.1.mlp.gate.e_score_correction_bias"));
}

TEST_F(DeepSeek, TheLayerThatPredictsAnotherTokenIsLeftOut) {
  const gguf::File file = convert();
  EXPECT_EQ(file.require<int64_t>("deepseek2.block_count"), 2);
  ASSERT_EQ(notices_.size(), 1u);
  EXPECT_NE(notices_[0].find("tensors of a layer that predicts one token more are left out"), std::string::npos);
  config_.erase("num_nextn_predict_layers");
  EXPECT_NE(test::message_of([&] { convert(); }).find("is not one that DeepseekV3ForCausalLM is known to have"),
            std::string::npos);
}

TEST_F(DeepSeek, WhatItCannotBeIsRefused) {
  const auto expect = [&](const char* key, const json& value, const char* part) {
    const json before = config_;
    config_[key] = value;
    const std::string text = test::message_of([&] { convert(); });
    config_ = before;
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  };
  expect("attention_bias", true, "attention_bias beside latent attention is not supported");
  expect("rope_interleave", false, "rope_interleave = false is not supported");
  expect("kv_lora_rank", nullptr, "kv_lora_rank is missing");
  expect("v_head_dim", 16, "kv_b_proj.weight has the shape");
  expect("topk_method", "group_limited_greedy", "topk_method group_limited_greedy is not supported");
}

class SmallThinker : public MadeUp {
 protected:
  SmallThinker() {
    add_model({{"architectures", {"SmallThinkerForCausalLM"}},
               {"num_key_value_heads", 1},
               {"head_dim", 16},
               {"moe_num_primary_experts", kExperts},
               {"moe_num_active_primary_experts", 2},
               {"moe_ffn_hidden_size", kFf},
               {"moe_primary_router_apply_softmax", false},
               {"sliding_window_size", 8},
               {"sliding_window_layout", {0, 1}},
               {"rope_layout", {0, 1}},
               {"rope_theta", 1.5e6}});
    for (int64_t l = 0; l < 2; ++l) {
      const std::string p = "model.layers." + std::to_string(l) + ".", a = p + "self_attn.";
      add(p + "input_layernorm.weight", {kEmbd}), add(p + "post_attention_layernorm.weight", {kEmbd});
      add(a + "q_proj.weight", {kHeads * 16, kEmbd}), add(a + "k_proj.weight", {16, kEmbd});
      add(a + "v_proj.weight", {16, kEmbd}), add(a + "o_proj.weight", {kEmbd, kHeads * 16});
      add(p + "block_sparse_moe.primary_router.weight", {kExperts, kEmbd});
      add_experts(p + "block_sparse_moe.", "gate", "up", "down");
    }
  }
};

TEST_F(SmallThinker, LayoutsAndRouting) {
  convert();
  const model::Model m = model::Model::load(dir_ / "m.gguf");
  const model::Config& c = m.config();
  EXPECT_TRUE(c.early_router);
  EXPECT_EQ(c.ffn.activation, "relu");
  EXPECT_EQ(c.layer(0).window, 0);
  EXPECT_EQ(c.layer(0).rope, -1);
  EXPECT_EQ(c.layer(1).window, 8);
  EXPECT_EQ(c.layer(1).rope, 0);
  EXPECT_EQ(c.experts.routing.gating, Gating::sigmoid);
  EXPECT_TRUE(c.experts.routing.normalize);
  EXPECT_EQ(c.experts.routing.n_used, 2);
  config_["moe_primary_router_apply_softmax"] = true;
  config_["sliding_window_layout"] = {0, 0};
  config_["rope_layout"] = {1, 1};
  convert();
  const model::Model other = model::Model::load(dir_ / "m.gguf");
  EXPECT_EQ(other.config().experts.routing.gating, Gating::softmax);
  EXPECT_EQ(other.config().layer(0).rope, 0);
  EXPECT_EQ(other.config().layer(1).window, 0);
  config_["rope_layout"] = {1, 0};  // not what follows from the windows
  convert();
  EXPECT_EQ(model::Model::load(dir_ / "m.gguf").config().layer(1).rope, -1);
}

}  // namespace
}  // namespace hearth
