// Multi-head latent attention from files: sizes and tensors in the forms of today and of before April 2025, and one line
// for what is missing or contradicts itself.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "model/model.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"

namespace hearth {
namespace {

using test::TinyMixtureOptions;

class LatentFiles : public testing::Test {
 protected:
  model::Model load(TinyMixtureOptions o) {
    o.arch = "deepseek2";
    return model::Model::load(test::write_tiny_mixture(dir_ / "m.gguf", o));
  }
  std::string error_of(const TinyMixtureOptions& o) {
    return test::message_of([&] { load(o); });
  }
  test::TempDir dir_;
};

std::vector<float> floats(const Matrix& m) {
  const auto* const first = static_cast<const float*>(m.data);
  return {first, first + m.rows * m.cols};
}

TEST_F(LatentFiles, SizesOfHeadsAndOfTheCache) {
  const model::Model m = load({.n_q_latent = 48});
  const model::Config& c = m.config();
  EXPECT_EQ(c.latent.n_latent, 32);
  EXPECT_EQ(c.latent.n_q_latent, 48);
  EXPECT_EQ(c.latent.n_plain, 16);
  EXPECT_EQ(c.latent.n_value, 16);
  EXPECT_EQ(c.n_rot, 8);
  EXPECT_EQ(c.n_head_kv, 1);
  EXPECT_EQ(c.head_dim, 40);
  EXPECT_EQ(c.n_cached(), 40);  // and nothing else
  EXPECT_EQ(c.n_queries(), 4 * 24);
  EXPECT_EQ(c.n_attended(), 4 * 16);
  EXPECT_NEAR(c.attention_scale, 1 / std::sqrt(24.0), 1e-7);
  const model::LayerWeights& l = m.weights().layers[0];
  EXPECT_EQ(l.wk.rows, 32);
  EXPECT_EQ(l.latent.k_rotated.rows, 8);
  EXPECT_EQ(l.attention()[0], &l.latent.q_a);
  EXPECT_FALSE(l.wv);
}

TEST_F(LatentFiles, JointAndSplitTensorsAreOneModel) {
  const model::Model split = load({});
  const auto other = dir_ / "joint.gguf";
  const model::Model joint =
      model::Model::load(test::write_tiny_mixture(other, {.arch = "deepseek2", .joint_kv_b = true}));
  EXPECT_EQ(joint.config().latent.n_plain, 16);
  EXPECT_EQ(joint.config().latent.n_value, 16);
  for (size_t l = 0; l < 3; ++l) {
    const model::LatentWeights &a = split.weights().layers[l].latent, &b = joint.weights().layers[l].latent;
    EXPECT_EQ(floats(a.k_b), floats(b.k_b));
    EXPECT_EQ(floats(a.v_b), floats(b.v_b));
    EXPECT_TRUE(joint.owns(b.k_b) && joint.owns(b.v_b));
  }
}

TEST_F(LatentFiles, QuantisedJointTensorsAreNotRounded) {
  const TinyMixtureOptions options{.arch = "deepseek2", .type = DType::q8_0, .joint_kv_b = true};
  const model::Model m = load(options);
  const gguf::TensorInfo* t = m.file().find_tensor("blk.1.attn_kv_b.weight");
  const Matrix joint{t->traits->type, t->rows(), t->cols(), m.file().data(*t).data()};
  const model::LatentWeights& l = m.weights().layers[1].latent;
  ASSERT_EQ(l.k_b.type, DType::f32);
  ASSERT_EQ(l.v_b.type, DType::q8_0);
  const std::vector<float> k = floats(l.k_b);
  std::vector<float> row(32);
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t r = 0; r < 16; ++r) {
      traits(joint.type).to_float(joint.row(h * 32 + r), row.data(), 32);
      for (int64_t c = 0; c < 32; ++c)
        ASSERT_EQ(k[static_cast<size_t>((h * 32 + c) * 16 + r)], row[static_cast<size_t>(c)]);
      ASSERT_EQ(std::memcmp(l.v_b.row(h * 16 + r), joint.row(h * 32 + 16 + r), joint.row_size()), 0);
    }
  }
}

TEST_F(LatentFiles, WhatIsMissingOrContradictsIsNamed) {
  const auto expect = [&](const TinyMixtureOptions& o, const char* part) {
    const std::string text = error_of(o);
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  };
  expect({.without = {"attention.kv_lora_rank"}}, "deepseek2.attention.kv_lora_rank");
  expect({.without = {"rope.dimension_count"}}, "deepseek2.rope.dimension_count");
  expect({.n_q_latent = 48, .without = {"attention.q_lora_rank"}}, "deepseek2.attention.q_lora_rank");
  expect({.without = {"blk.1.attn_v_b.weight"}}, "tensor blk.1.attn_v_b.weight is missing");
  expect({.without = {"blk.0.attn_kv_a_norm.weight"}}, "tensor blk.0.attn_kv_a_norm.weight is missing");
  expect({.other = {{"attention.key_length", 44}}}, "deepseek2.attention.key_length is 44, expected 40");
  expect({.other = {{"attention.key_length_mla", 8}}}, "heads of 8 elements, of which 8 are rotated");
  expect({.other = {{"attention.value_length_mla", 20}}},
         "tensor blk.0.attn_v_b.weight is [32, 16, 4], expected [32, 20, 4]");
}

}  // namespace
}  // namespace hearth
