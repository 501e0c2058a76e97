// ReLU experts whose neurons are divided between a main device and the CPU: the results are those of the undivided model
// at every split. The oracle stands in for the GPU, in a thread of its own.
#include <gtest/gtest.h>

#include <string_view>

#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/errors.h"
#include "support/expert_splits.h"
#include "support/mixture_divisions.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::Placement;
using test::kExpertSplits;
using test::kSplitExperts;

constexpr int64_t kFf = 96, kShared = 64;

struct Case {
  const char* name;
  test::TinyMixtureOptions options;
  bool transpose_at_loading = false;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};
// With rounded activations a rounding may change what is chosen, unless every expert is.
test::TinyMixtureOptions relu_mixture(DType type, bool shared = false) {
  test::TinyMixtureOptions o{.arch = "smallthinker", .type = type, .n_ff = kFf, .n_expert = kSplitExperts};
  if (is_quantized(type)) o.n_used = kSplitExperts, o.n_layer = 2;  // a layer less for roundings to grow
  o.n_ff_shared = shared ? kShared : 0, o.transposed_down = true;
  return o;
}
std::vector<Case> cases() {
  std::vector<Case> all = {{"f32", relu_mixture(DType::f32)},
                           {"f32_shared", relu_mixture(DType::f32, true)},
                           {"f16_shared", relu_mixture(DType::f16, true)},
                           {"q8_0_shared", relu_mixture(DType::q8_0, true)},
                           {"q4_k", relu_mixture(DType::q4_k)},
                           {"f32_biases", relu_mixture(DType::f32)},
                           {"f16_at_loading", relu_mixture(DType::f16), true},
                           {"q8_0_at_loading", relu_mixture(DType::q8_0), true}};
  all[4].options.n_embd = 256;
  all[5].options.expert_biases = true;
  for (Case& c : all) c.options.transposed_down = !c.transpose_at_loading;
  return all;
}

class CutExperts : public testing::TestWithParam<Case> {
 protected:
  model::Model load() {
    const auto path = dir_ / "m.gguf";
    if (!std::filesystem::exists(path)) test::write_tiny_mixture(path, GetParam().options);
    auto m =
        model::Model::load(path, {.activation = {}, .transpose_down = {.wanted = GetParam().transpose_at_loading}});
    EXPECT_EQ(m.prepare_sparse(), std::nullopt);
    return m;
  }
  test::TempDir dir_;
};

TEST_P(CutExperts, EqualTheUndividedModel) {
  auto m = load();
  // A prompt in two batches, then one and several tokens at a time.
  const test::Script script{test::random_ids(m.config(), 31, 3), {18, 1, 3, 1, 8}};
  const EngineOptions options{.n_batch = 13};
  test::ErrorLimits limits(dir_ / "m.gguf", script, test::kCpuArithmetic, options);
  limits.expect_not_vacuous();
  ThreadTeam team(3);
  const auto whole_device = cpu::make_device(team);
  Engine whole(m, *whole_device, options);
  const test::Logits expected = test::run(whole, script);
  if (!GetParam().transpose_at_loading) limits.expect_within(expected, "undivided");
  for (const test::ExpertSplit& split : kExpertSplits) {
    if (std::string_view(split.name) == "the_shared_one" && GetParam().options.n_ff_shared == 0) continue;
    SCOPED_TRACE(split.name);
    for (const bool copies : {false, true}) {
      auto divided = load();
      const Placement placement = test::placement_of(split, divided);
      const auto stand_in = cpu::make_reference_device(), host = cpu::make_device(team);
      test::TakesNoDownT like_a_gpu(*stand_in);
      Engine two(divided, like_a_gpu, {.n_batch = 13, .copy_weights = copies}, {*host, placement, team});
      limits.expect_apart(test::run(two, script), expected, "divided");
    }
    // A main device that takes transposed rows leaves out what is zero, too.
    auto divided = load();
    const auto stand_in = cpu::make_reference_device(), host = cpu::make_reference_device();
    Engine two(divided, *stand_in, options, {*host, test::placement_of(split, divided), team});
    limits.expect_apart(test::run(two, script), expected, "divided between two oracles");
  }
  limits.print();
}

INSTANTIATE_TEST_SUITE_P(Types, CutExperts, testing::ValuesIn(cases()), [](const auto& p) { return p.param.name; });

// What each side reads, and the share that the GPU has, where every expert is cut.
TEST(CutExpertsTraffic, CountsTheNeuronsOfEachSide) {
  const test::TempDir dir;
  for (const DType type : {DType::f32, DType::q8_0}) {
    SCOPED_TRACE(traits(type).name);
    auto m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf", relu_mixture(type)));
    ThreadTeam team(2);
    const auto stand_in = cpu::make_reference_device(), host = cpu::make_device(team);
    test::TakesNoDownT main(*stand_in);
    Engine two(m, main, {}, {*host, test::placement_of(kExpertSplits[3], m), team});
    test::run(two, {test::random_ids(m.config(), 12, 3), {9, 1, 2}});
    const engine::DensityStats& d = two.density();
    EXPECT_DOUBLE_EQ(d.host_share(), 64.0 / 96);
    const FfnShard& f = m.weights().layers[0].experts[0].ffn;
    const auto row = static_cast<double>(f.gate.row_size()),
               used = static_cast<double>(m.config().experts.routing.n_used);
    const double down_here =
        type == DType::f32 ? row : 2.0 * static_cast<double>(f.down_t.cols);  // f16 where quantised
    for (const bool counted : {false, true}) {
      const engine::TokenTraffic t = two.traffic(counted ? d : engine::DensityStats{}, 10);
      for (size_t l = 0; l < t.layers.size(); ++l) {
        const double active = counted ? d.active_on_host[l] / d.neurons_on_host[l] : 1;
        EXPECT_NEAR(t.layers[l].ffn.main, used * 32 * (2 * row + down_here), 1e-6 * row);
        EXPECT_NEAR(t.layers[l].ffn.host, used * 64 * row * (1 + 2 * active), 1e-6 * row);
        EXPECT_TRUE(!counted || (active > 0.2 && active < 0.8)) << active;
      }
    }
  }
}

TEST(CutExpertsRefusals, ExpertsThatCannotBeCut) {
  const test::TempDir dir;
  const auto message = [&](const test::TinyMixtureOptions& o, auto&& change) {
    auto m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf", o));
    Placement p = test::placement_of(kExpertSplits[3], m);
    p.n_ctx = p.n_batch = 1, p.layers[0].attention = engine::Where::gpu;
    change(p);
    return test::message_of([&] {
      check_placement(p, m.config(), "");
      layer_facts(m, p);
    });
  };
  const auto nothing = [](Placement&) {};
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  test::TinyMixtureOptions o = relu_mixture(DType::f32, true);
  EXPECT_EQ(message(o, nothing), "no error");
  expect(message(o, [](auto& p) { p.layers[1].gpu_expert_neurons.pop_back(); }), "lists of neurons of 5; plan again");
  expect(message(o, [](auto& p) { p.layers[1].gpu_expert_neurons[2][31] = 96; }),
         "expert 2 of layer 1 names neuron 96, expected 0 to 95");
  expect(message(o, [](auto& p) { p.layers[1].gpu_expert_neurons[5][31] = 64; }),
         "expert 5 of layer 1 names neuron 64, expected 0 to 63");
  expect(message(o, [](auto& p) { p.layers[1].gpu_expert_neurons[2][1] = p.layers[1].gpu_expert_neurons[2][0]; }),
         "not ascending");
  expect(message(o, [](auto& p) { p.layers[1].gpu_expert_neurons[2].pop_back(); }), "expected whole blocks of 32");
  expect(message(o, [](auto& p) { p.layers[1].gpu_expert_neurons[2].clear(); }),
         "96 neurons of expert 2 of layer 1 on the GPU and 32 of another one");
  EXPECT_EQ(message(o, [](auto& p) { p.layers[1].gpu_expert_neurons.back().clear(); }), "no error");  // the shared one
  o.transposed_down = false;
  expect(message(o, nothing), "expert 0 of layer 0, whose down projection is not stored transposed");
  expect(message({.n_ff = kFf, .n_ff_shared = kShared}, nothing), "computed whole");
  expect(message({.arch = "qwen2moe", .n_ff = kFf, .n_ff_shared = kShared, .n_dense_layers = 0}, nothing), "SwiGLU");
}

}  // namespace
}  // namespace hearth
