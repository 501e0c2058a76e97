// Checkpoints of gpt-oss: experts in one tensor, transposed, gate and up in turn; or in MXFP4, as they were published.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "core/dtype.h"
#include "gguf/gguf.h"
#include "hf_checkpoint.h"
#include "support/errors.h"
#include "support/paths.h"

namespace hearth {
namespace {

using nlohmann::json;
using test::bytes_of, test::f32;
using Tensor = test::HfTensor;

constexpr int64_t kEmbd = 64, kFf = 32, kExperts = 3, kVocab = 300, kHeads = 2, kHeadDim = 32;

// The matrices [rows][cols] of all experts, in MXFP4 as the OCP standard has it (element 2 i is the low nibble of byte i
// of its block) and as the numbers that they are.
struct Codes {
  std::vector<uint8_t> blocks, scales;
  std::vector<float> values;
  int64_t rows, cols;
  Codes(int64_t n_rows, int64_t n_cols, std::mt19937& rng) : rows(n_rows), cols(n_cols) {
    constexpr std::array<float, 8> kLevels = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int64_t b = 0; b < kExperts * rows * cols / 32; ++b) {
      scales.push_back(static_cast<uint8_t>(118 + rng() % 6));
      for (int i = 0; i < 16; ++i) {
        const auto byte = static_cast<uint8_t>(rng());
        blocks.push_back(byte);
        for (const int code : {byte & 15, byte >> 4}) {
          const float level = kLevels[static_cast<size_t>(code & 7)];
          values.push_back(std::ldexp((code & 8) != 0 ? -level : level, scales.back() - 127));
        }
      }
    }
  }
  float at(int64_t e, int64_t r, int64_t c) const { return values[static_cast<size_t>((e * rows + r) * cols + c)]; }
  Tensor block_tensor() const {
    return {"U8", {kExperts, rows, cols / 32, 16}, bytes_of(blocks.data(), blocks.size())};
  }
  Tensor scale_tensor() const { return {"U8", {kExperts, rows, cols / 32}, bytes_of(scales.data(), scales.size())}; }
  Tensor transposed() const {
    std::vector<float> t;
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t c = 0; c < cols; ++c) {
        for (int64_t r = 0; r < rows; ++r) t.push_back(at(e, r, c));
      }
    }
    return f32({kExperts, cols, rows}, t);
  }
};

class GptOss : public testing::Test {
 protected:
  GptOss() {
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      tensors_[name] = test::random_f32(rng_, std::move(shape));
    };
    add("model.embed_tokens.weight", {kVocab, kEmbd}), add("lm_head.weight", {kVocab, kEmbd});
    add("model.norm.weight", {kEmbd});
    const std::string p = "model.layers.0.";
    for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) add(p + norm + ".weight", {kEmbd});
    for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
      add(p + "self_attn." + name + ".weight", {kHeads * kHeadDim, kEmbd});
      add(p + "self_attn." + name + ".bias", {kHeads * kHeadDim});
    }
    add(p + "self_attn.o_proj.weight", {kEmbd, kHeads * kHeadDim}), add(p + "self_attn.o_proj.bias", {kEmbd});
    add(p + "self_attn.sinks", {kHeads});
    add(p + "mlp.router.weight", {kExperts, kEmbd}), add(p + "mlp.router.bias", {kExperts});
    add(kGateUp + "_bias", {kExperts, 2 * kFf}), add(kDown + "_bias", {kExperts, kEmbd});
    config_ = {{"architectures", {"GptOssForCausalLM"}},
               {"hidden_size", kEmbd},
               {"intermediate_size", kFf},
               {"num_hidden_layers", 1},
               {"num_attention_heads", kHeads},
               {"num_key_value_heads", kHeads},
               {"head_dim", kHeadDim},
               {"num_local_experts", kExperts},
               {"num_experts_per_tok", 2},
               {"attention_bias", true},
               {"hidden_act", "silu"},
               {"swiglu_limit", 6.5},
               {"sliding_window", 128},
               {"rope_theta", 150000},
               {"rope_scaling",
                {{"rope_type", "yarn"},
                 {"factor", 32.0},
                 {"beta_fast", 32.0},
                 {"beta_slow", 1.0},
                 {"original_max_position_embeddings", 4096},
                 {"truncate", false}}},
               {"max_position_embeddings", 131072},
               {"rms_norm_eps", 1e-5},
               {"vocab_size", kVocab}};
  }
  void add_dense_experts() { tensors_[kGateUp] = gate_up_.transposed(), tensors_[kDown] = down_.transposed(); }
  void add_published_experts() {
    tensors_[kGateUp + "_blocks"] = gate_up_.block_tensor(), tensors_[kGateUp + "_scales"] = gate_up_.scale_tensor();
    tensors_[kDown + "_blocks"] = down_.block_tensor(), tensors_[kDown + "_scales"] = down_.scale_tensor();
    config_["quantization_config"] = {{"quant_method", "mxfp4"}};
  }
  gguf::File convert(DType type) {
    return test::convert_tensors(dir_, config_, tensors_, type,
                                 [&](std::string_view text) { notices_.emplace_back(text); });
  }
  static std::vector<float> floats(const gguf::File& file, const std::string& name) {
    return test::floats_of(file, "blk.0." + name);
  }
  // The experts of a file are the numbers of the checkpoint: gates in the even rows of gate_up, up in the odd ones.
  void expect_experts(const gguf::File& file) {
    std::vector<float> gate, up;
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t i = 0; i < kFf * kEmbd; ++i) {
        gate.push_back(gate_up_.at(e, 2 * (i / kEmbd), i % kEmbd));
        up.push_back(gate_up_.at(e, 2 * (i / kEmbd) + 1, i % kEmbd));
      }
    }
    EXPECT_EQ(floats(file, "ffn_gate_exps.weight"), gate);
    EXPECT_EQ(floats(file, "ffn_up_exps.weight"), up);
    EXPECT_EQ(floats(file, "ffn_down_exps.weight"), down_.values);
    EXPECT_EQ(file.find_tensor("blk.0.ffn_down_exps.weight")->ne, (std::vector<int64_t>{kFf, kEmbd, kExperts}));
    const std::string& bytes = tensors_[kGateUp + "_bias"].bytes;
    std::vector<float> both(bytes.size() / sizeof(float)), gates, ups;
    std::memcpy(both.data(), bytes.data(), bytes.size());
    for (size_t i = 0; i < both.size(); ++i) (i % 2 == 0 ? gates : ups).push_back(both[i]);
    EXPECT_EQ(floats(file, "ffn_gate_exps.bias"), gates);
    EXPECT_EQ(floats(file, "ffn_up_exps.bias"), ups);
    EXPECT_EQ(file.find_tensor("blk.0.ffn_up_exps.bias")->ne, (std::vector<int64_t>{kFf, kExperts}));
  }

  const std::string kGateUp = "model.layers.0.mlp.experts.gate_up_proj", kDown = "model.layers.0.mlp.experts.down_proj";
  std::mt19937 rng_{7};
  Codes gate_up_{2 * kFf, kEmbd, rng_}, down_{kEmbd, kFf, rng_};
  test::HfTensors tensors_;
  json config_;
  std::vector<std::string> notices_;
  test::TempDir dir_;
};

TEST_F(GptOss, TransposedExpertsAreDividedIntoGateAndUp) {
  add_dense_experts();
  const gguf::File file = convert(DType::f32);
  expect_experts(file);
  EXPECT_EQ(file.require<std::string>("hearth.ffn.activation"), "clamped_silu");
  EXPECT_EQ(file.require<float>("hearth.ffn.activation_threshold"), 6.5f);
  EXPECT_FALSE(file.require<bool>("hearth.rope.yarn_truncates"));
  EXPECT_EQ(file.require<int64_t>("gpt-oss.expert_gating_func"), 3);
}

TEST_F(GptOss, PublishedMxfp4StaysAsItIs) {
  add_published_experts();
  for (const DType type : {DType::f32, DType::q8_0}) {
    const gguf::File file = convert(type);
    expect_experts(file);
    for (const char* name : {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}) {
      EXPECT_EQ(file.find_tensor(fmt::format("blk.0.{}.weight", name))->traits->type, DType::mxfp4);
    }
    ASSERT_EQ(notices_.size(), 1u);
    EXPECT_NE(notices_[0].find("mxfp4"), std::string::npos);
    notices_.clear();
  }
}

TEST_F(GptOss, WhatIsNotAsPublishedIsRefused) {
  const auto message = [&](const std::function<void()>& damage) {
    tensors_.erase(kGateUp), add_published_experts();
    const auto tensors = tensors_;
    const auto config = config_;
    damage();
    const std::string text = test::message_of([&] { convert(DType::f16); });
    tensors_ = tensors, config_ = config;
    return text;
  };
  const auto expect = [&](const std::function<void()>& damage, const char* expected) {
    const std::string text = message(damage);
    EXPECT_NE(text.find(expected), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  };
  expect([&] { tensors_.erase(kDown + "_scales"); }, "down_proj_scales is missing from the checkpoint");
  expect([&] { tensors_.erase(kGateUp + "_bias"); }, "gate_up_proj_bias is missing from the checkpoint");
  expect([&] { tensors_[kDown + "_scales"].dtype = "I8"; }, "down_proj_scales has dtype I8, expected U8");
  expect([&] { tensors_[kDown] = down_.transposed(); }, "is not one that GptOssForCausalLM is known to have");
  expect([&] { config_["quantization_config"]["quant_method"] = "fp8"; }, "the weights are quantised (fp8)");
  expect([&] { config_["swiglu_alpha"] = 1.5; }, "another swiglu_alpha is not supported");
  expect([&] { config_["swiglu_limit"] = 0; }, "swiglu_limit is 0, expected a positive number");
  expect([&] { config_["hidden_act"] = "relu"; }, "gpt-oss with relu is not supported");
}

}  // namespace
}  // namespace hearth
