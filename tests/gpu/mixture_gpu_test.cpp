// Mixtures of experts on a GPU, alone and beside the CPU, wherever their experts are.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <optional>

#include "cuda/cuda.h"
#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/expert_splits.h"
#include "support/mixture_divisions.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;

struct Case {
  const char* name;
  test::TinyMixtureOptions model;
  float threshold = 0;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

class GpuMixture : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
  }
  test::TempDir dir_;
};

// A prompt in two batches, then one and several tokens at a time.
TEST_P(GpuMixture, EqualsTheOracleWhereverExpertsAre) {
  const auto path = test::write_tiny_mixture(dir_ / "m.gguf", GetParam().model);
  auto m = model::Model::load(path);
  const auto ids = test::random_ids(m.config(), 30, 3);
  const test::Script script{ids, {18, 1, 3, 8}};
  const EngineOptions options{.n_batch = 16, .sparse_threshold = GetParam().threshold};
  test::ErrorLimits limits(path, script, test::kGpuArithmetic, options);
  limits.expect_not_vacuous();
  ThreadTeam team(2);
  test::Logits alone;
  {
    const auto gpu = cuda::make_device(0);
    Engine whole(m, *gpu, options);
    alone = test::run(whole, script);
    limits.expect_within(alone, "on the GPU");
  }
  struct Way {
    const char* name;
    std::optional<engine::ShareRates> rates;  // where the prompt is streamed
  };
  const Way ways[] = {{"by the CPU", std::nullopt}, {"streamed", test::kAllVisit}, {"shared", test::kHalfVisit}};
  for (const test::MixtureDivision& d : test::kMixtureDivisions) {
    if (d.main_without_experts) continue;
    for (const Way& way : ways) {
      SCOPED_TRACE(fmt::format("{}, {}", d.name, way.name));
      auto divided = model::Model::load(path);
      const auto gpu = cuda::make_device(0);
      const auto host = cpu::make_device(team);
      EngineOptions own = options;
      if (way.rates) own.stream_tokens = 9, own.copy_weights = true, own.share_rates = *way.rates;
      Engine two(divided, *gpu, own, {*host, test::placement_of(d, divided), team});
      limits.expect_apart(test::run(two, script), alone, "divided");
    }
  }
  limits.print();
}

// The GPU has some neurons of ReLU experts, and the CPU the others.
TEST_P(GpuMixture, EqualsTheOracleWhereverNeuronsOfExpertsAre) {
  if (!GetParam().model.transposed_down) GTEST_SKIP() << "experts are whole";
  test::TinyMixtureOptions o = GetParam().model;
  o.n_ff = 96, o.n_ff_shared = 64, o.n_expert = test::kSplitExperts;
  if (o.n_used > 2) o.n_used = test::kSplitExperts;
  if (is_quantized(o.type)) o.n_layer = 2;  // after a third layer the roundings of 8-bit activations leave no bound
  const auto path = test::write_tiny_mixture(dir_ / "m.gguf", o);
  auto m = model::Model::load(path);
  const test::Script script{test::random_ids(m.config(), 30, 3), {18, 1, 3, 8}};
  const EngineOptions options{.n_batch = 16};
  test::ErrorLimits limits(path, script, test::kGpuArithmetic, options);
  limits.expect_not_vacuous();
  ThreadTeam team(2);
  for (const test::ExpertSplit& split : test::kExpertSplits) {
    SCOPED_TRACE(split.name);
    auto divided = model::Model::load(path);
    const auto gpu = cuda::make_device(0);
    const auto host = cpu::make_device(team);
    Engine two(divided, *gpu, options, {*host, test::placement_of(split, divided), team});
    limits.expect_within(test::run(two, script), "divided");
  }
  limits.print();
}

// With 8-bit activations a rounding may change what is chosen, unless every expert is.
std::vector<Case> cases() {
  return {
      {"f32", {.n_ff_shared = 96, .n_dense_layers = 1}},
      {"f16", {.type = DType::f16, .n_expert = 4, .n_used = 4, .n_ff_shared = 32}},
      {"q8_0", {.arch = "qwen2moe", .type = DType::q8_0, .n_expert = 4, .n_used = 4, .n_ff_shared = 32}},
      {"q4_0", {.type = DType::q4_0, .n_expert = 3, .n_used = 3}},
      {"q4_k", {.type = DType::q4_k, .n_embd = 256, .n_ff = 256, .n_expert = 3, .n_used = 3}},
      // The GPU's experts are transposed back; the CPU's leave out what is zero.
      {"transposed_f16",
       {.arch = "smallthinker", .type = DType::f16, .n_expert = 4, .n_used = 4, .transposed_down = true}},
      {"transposed_f32", {.arch = "smallthinker", .transposed_down = true, .expert_biases = true}},
      {"transposed_q8_0",
       {.arch = "smallthinker", .type = DType::q8_0, .n_expert = 4, .n_used = 4, .transposed_down = true}},
      // Neurons below a threshold are zero on the GPU, too.
      {"threshold", {.n_ff_shared = 96, .transposed_down = true}, 0.1f},
      {"threshold_f16", {.type = DType::f16, .n_expert = 4, .n_used = 4, .transposed_down = true}, 0.1f},
      {"latent", {.arch = "deepseek2", .n_ff_shared = 32, .n_dense_layers = 1, .n_q_latent = 48}},
      {"latent_f16", {.arch = "deepseek2", .type = DType::f16, .n_expert = 4, .n_used = 4, .joint_kv_b = true}},
  };
}

INSTANTIATE_TEST_SUITE_P(Mixtures, GpuMixture, testing::ValuesIn(cases()),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace hearth
