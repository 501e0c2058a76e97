// Mixtures of experts from files: the same experts in every form, and one clear line for files that contradict
// themselves.
#include <gtest/gtest.h>

#include <cstring>

#include "core/error.h"
#include "model/model.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"

namespace hearth {
namespace {

using test::TinyMixtureOptions;
using Form = TinyMixtureOptions::Form;

class MixtureFiles : public testing::Test {
 protected:
  model::Model load(const TinyMixtureOptions& o) {
    return model::Model::load(test::write_tiny_mixture(dir_ / "m.gguf", o));
  }
  std::string error_of(const TinyMixtureOptions& o) {
    const auto path = test::write_tiny_mixture(dir_ / "m.gguf", o);
    std::string text = test::message_of([&] { model::Model::load(path); });
    const std::string where = fmt::format("'{}': ", path.string());
    EXPECT_TRUE(text.starts_with(where.substr(0, where.size() - 2))) << text;  // the file is named first
    return text.starts_with(where) ? text.substr(where.size()) : text;
  }
  test::TempDir dir_;
};

bool same(const Matrix& a, const Matrix& b) {
  return a.rows == b.rows && a.cols == b.cols && std::memcmp(a.data, b.data, a.bytes()) == 0;
}

TEST_F(MixtureFiles, EveryFormHoldsTheSameExperts) {
  const model::Model stacked = load({.arch = "llama"});
  const model::ExpertsDescription& e = stacked.config().experts;
  EXPECT_EQ(e.routing.n_expert, 6);
  EXPECT_EQ(e.routing.n_used, 2);
  EXPECT_TRUE(e.routing.normalize);
  EXPECT_EQ(stacked.config().ffn.family, "SwiGLU");
  for (const Form form : {Form::merged, Form::one_tensor_each}) {
    const auto path = dir_ / (form == Form::merged ? "merged.gguf" : "each.gguf");
    const model::Model other = model::Model::load(test::write_tiny_mixture(path, {.form = form, .arch = "llama"}));
    EXPECT_EQ(other.parameters(), stacked.parameters());
    for (size_t l = 0; l < 3; ++l) {
      const auto &a = stacked.weights().layers[l].experts, &b = other.weights().layers[l].experts;
      ASSERT_EQ(a.size(), 6u);
      ASSERT_EQ(b.size(), 6u);
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_TRUE(same(a[i].ffn.gate, b[i].ffn.gate) && same(a[i].ffn.up, b[i].ffn.up) &&
                    same(a[i].ffn.down, b[i].ffn.down))
            << "layer " << l << ", expert " << i;
      }
    }
  }
}

TEST_F(MixtureFiles, DownProjectionsMayBeTransposed) {
  for (const Form form : {Form::stacked, Form::one_tensor_each}) {
    test::TinyMixtureOptions o{.form = form, .arch = "smallthinker", .n_ff_shared = 64};
    o.transposed_down = true;
    const auto stored = model::Model::load(test::write_tiny_mixture(dir_ / "t.gguf", o));
    EXPECT_FALSE(stored.why_experts_are_whole().has_value());
    o.transposed_down = false;
    const auto path = test::write_tiny_mixture(dir_ / "s.gguf", o);
    auto whole = model::Model::load(path);
    EXPECT_FALSE(whole.prepare_sparse().has_value());
    EXPECT_NE(whole.why_experts_are_whole().value_or("").find("blk.0.ffn_down_exps is stored untransposed"),
              std::string::npos);
    auto made = model::Model::load(path, {.activation = {}, .transpose_down = {.wanted = true}});
    EXPECT_FALSE(made.prepare_sparse().has_value());
    EXPECT_FALSE(made.why_experts_are_whole().has_value());
    EXPECT_EQ(made.weight_bytes(), whole.weight_bytes());
    const auto as_stored = [&](size_t l, size_t e) { return whole.weights().layers[l].experts[e].ffn.down; };
    for (size_t l = 0; l < 3; ++l) {
      for (size_t e = 0; e < 7; ++e) {
        const FfnShard& f = made.weights().layers[l].experts[e].ffn;
        EXPECT_TRUE(!f.down && made.owns(f.down_t) && same(f.down_t, stored.weights().layers[l].experts[e].ffn.down_t));
        EXPECT_TRUE(same(made.stored_down(l, e), as_stored(l, e)));
        EXPECT_FALSE(whole.stored_down(l, e));
      }
    }
    made.release_ffn(1);
    EXPECT_TRUE(same(made.weights().layers[1].experts[6].ffn.down, as_stored(1, 6)));
    EXPECT_FALSE(made.weights().layers[1].experts[6].ffn.down_t);
    EXPECT_TRUE(made.weights().layers[2].experts[6].ffn.down_t);
    // Of experts that are never zero only for thresholds.
    auto silu = model::Model::load(path, {.activation = "silu", .transpose_down = {.wanted = true}});
    EXPECT_FALSE(silu.prepare_sparse().has_value());
    EXPECT_TRUE(silu.weights().layers[0].experts[0].ffn.down);
    EXPECT_FALSE(silu.prepare_sparse(true).has_value());
    EXPECT_TRUE(same(silu.weights().layers[0].experts[0].ffn.down_t, stored.weights().layers[0].experts[0].ffn.down_t));
    EXPECT_FALSE(silu.why_experts_are_whole().has_value());
  }
}

// Quantised ones are kept beside the model.
TEST_F(MixtureFiles, TransposedOnesAreKeptBesideTheModel) {
  const auto path =
      test::write_tiny_mixture(dir_ / "m.gguf", {.arch = "smallthinker", .type = DType::q8_0, .n_ff_shared = 64});
  const auto prepared = [&] {
    auto m = model::Model::load(path, {.activation = {}, .transpose_down = {.wanted = true, .cached = true}});
    EXPECT_FALSE(m.prepare_sparse().has_value());
    return m;
  };
  const auto made = prepared(), mapped = prepared();
  EXPECT_TRUE(std::filesystem::exists(model::transposed_path(path)));
  EXPECT_GT(mapped.requantization_error().relative(), 0);
  EXPECT_EQ(mapped.requantization_error().relative(), made.requantization_error().relative());
  for (size_t e = 0; e < 7; ++e) {
    const Matrix &a = made.weights().layers[2].experts[e].ffn.down_t,
                 &b = mapped.weights().layers[2].experts[e].ffn.down_t;
    EXPECT_TRUE(made.owns(a) && !mapped.owns(b) && same(a, b)) << e;
    EXPECT_TRUE(mapped.stored_down(2, e));
  }
}

TEST_F(MixtureFiles, SharedExpertsAndDenseLayers) {
  const model::Model m = load({.arch = "qwen2moe", .n_ff_shared = 96, .n_dense_layers = 1});
  EXPECT_EQ(m.config().experts.n_ff_shared, 96);
  EXPECT_EQ(m.config().experts.n_named(), 3);
  EXPECT_FALSE(m.config().experts.routing.normalize);
  const auto& layers = m.weights().layers;
  EXPECT_FALSE(layers[0].router);
  EXPECT_EQ(layers[0].ffn.n(), 96);
  EXPECT_EQ(layers[1].experts.size(), 7u);
  EXPECT_TRUE(layers[1].router.shared && layers[1].router.shared_gate);
  EXPECT_EQ(layers[1].experts.back().ffn.n(), 96);
}

TEST_F(MixtureFiles, MissingKeysAreNamed) {
  EXPECT_NE(error_of({.without = {"expert_used_count"}}).find("qwen3moe.expert_used_count"), std::string::npos);
  EXPECT_EQ(error_of({.without = {"expert_count"}}),
            "tensor blk.0.ffn_gate_inp.weight is there, and qwen3moe.expert_count is missing");
  EXPECT_NE(error_of({.without = {"expert_feed_forward_length"}}).find("qwen3moe.feed_forward_length"),
            std::string::npos);
}

TEST_F(MixtureFiles, NumbersOutOfRangeAreRefused) {
  EXPECT_EQ(error_of({.other = {{"expert_used_count", 7}}}), "qwen3moe.expert_used_count is 7, expected 1 to 6");
  EXPECT_EQ(error_of({.other = {{"expert_count", 5000}}}), "qwen3moe.expert_count is 5000, expected 0 to 1024");
  EXPECT_EQ(error_of({.other = {{"expert_group_count", 4}}}),
            "6 experts do not divide into the 4 groups of qwen3moe.expert_group_count");
  EXPECT_NE(error_of({.other = {{"expert_group_count", 6}, {"expert_group_used_count", 1}}}).find("fewer than"),
            std::string::npos);
  EXPECT_NE(error_of({.other = {{"expert_gating_func", 4}}}).find("1 to 3 are"), std::string::npos);
}

TEST_F(MixtureFiles, CountsThatDoNotMatchTensorsAreRefused) {
  EXPECT_NE(error_of({.other = {{"expert_count", 5}}}).find("ffn_gate_inp.weight is [64, 6], expected [64, 5]"),
            std::string::npos);
  EXPECT_NE(error_of({.other = {{"expert_feed_forward_length", 16}}}).find("blk.0.ffn_gate_exps.weight is [64, 32, 6]"),
            std::string::npos);
  EXPECT_NE(error_of({.without = {"blk.1.ffn_down_exps.weight"}}).find("blk.1.ffn_down_exps.weight is missing"),
            std::string::npos);
  EXPECT_NE(error_of({.form = Form::one_tensor_each, .without = {"blk.2.ffn_up.5.weight"}})
                .find("blk.2.ffn_up.5.weight is missing"),
            std::string::npos);
}

TEST_F(MixtureFiles, QuantisedRoutersAreRefused) {
  EXPECT_EQ(error_of({.router_type = DType::q8_0}),
            "tensor blk.0.ffn_gate_inp.weight is q8_0; a router is f32, f16 or bf16: quantise the model again");
  EXPECT_EQ(load({.router_type = DType::bf16}).weights().layers[0].router.w.type, DType::bf16);
}

TEST_F(MixtureFiles, DenseLayersAndSharedExpertsThatTheKeysContradictAreRefused) {
  EXPECT_EQ(error_of({.n_dense_layers = 1, .without = {"leading_dense_block_count"}}),
            "the first layer with experts is 1, and qwen3moe.leading_dense_block_count is 0");
  EXPECT_EQ(error_of({.other = {{"expert_shared_count", 1}}}),
            "the keys tell of a shared expert, and tensor blk.0.ffn_up_shexp.weight is missing");
  EXPECT_EQ(error_of({.n_ff_shared = 96, .other = {{"expert_shared_feed_forward_length", 64}}}),
            "tensor blk.0.ffn_up_shexp.weight has 96 rows, and the keys say 64");
  EXPECT_NE(error_of({.arch = "qwen2"}).find("mixtures of experts of the architecture 'qwen2' are not supported"),
            std::string::npos);
}

}  // namespace
}  // namespace hearth
