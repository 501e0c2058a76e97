// A mixture of experts divided between a main device and the CPU gives the results of the undivided one, wherever its
// experts are. The oracle stands in for the GPU, in a thread of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/errors.h"
#include "support/mixture_divisions.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"
#include "support/zoo.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::Placement;

// A device that has no kernels for experts.
class WithoutExperts final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  ExpertFfn* expert_ffn() override { return nullptr; }
};

// A device whose slots have room for two experts each, which writes down what visits it.
class SmallSlots final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  using ForwardingDevice::stage, ForwardingDevice::staged_bytes;
  size_t staged_bytes(const ExpertSet&, std::span<const int32_t> ids) const override {
    return ids.size() * (engine::ColdStream::kSlotBytes * 2 / 5);
  }
  ExpertSet stage(int slot, const ExpertSet& host, std::span<const int32_t> ids) override {
    EXPECT_LE(ids.size(), 2u);
    staged.insert(staged.end(), ids.begin(), ids.end());
    return ForwardingDevice::stage(slot, host, ids);
  }
  std::vector<int32_t> staged;  // of all layers and batches
};

struct Case {
  std::string name;
  std::optional<test::ZooModel> zoo;
  test::TinyMixtureOptions tiny = {};
  float threshold = 0;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};
std::vector<Case> cases() {
  std::vector<Case> all = {
      {"tiny", std::nullopt, {.n_ff_shared = 96, .n_dense_layers = 1}},
      // With 8-bit activations a rounding may change what is chosen, unless every expert is.
      {"tiny_q8_0",
       std::nullopt,
       {.arch = "qwen2moe", .type = DType::q8_0, .n_expert = 4, .n_used = 4, .n_ff_shared = 32}},
  };
  all.push_back(
      {"tiny_latent", std::nullopt, {.arch = "deepseek2", .n_ff_shared = 32, .n_dense_layers = 1, .n_q_latent = 48}});
  // Windows of 8 but in the first layer, and a router that reads what is before attention.
  all.push_back(
      {"tiny_early_router", std::nullopt, {.arch = "smallthinker", .other = {{"attention.sliding_window", 8}}}});
  // Neurons that are zero are skipped.
  all.push_back({"tiny_transposed", std::nullopt, {.arch = "smallthinker", .transposed_down = true}});
  all.push_back({"tiny_transposed_q8_0",
                 std::nullopt,
                 {.arch = "smallthinker", .type = DType::q8_0, .n_expert = 4, .n_used = 4, .transposed_down = true}});
  // Neurons below a threshold are left out: the CPU skips them, the main device takes them as zero.
  all.push_back({"tiny_threshold", std::nullopt, {.n_ff_shared = 96, .transposed_down = true}, 0.1f});
  all.push_back({"tiny_threshold_q8_0",
                 std::nullopt,
                 {.type = DType::q8_0, .n_layer = 2, .n_expert = 4, .n_used = 4, .transposed_down = true},
                 0.1f});
  for (const test::ZooModel& m : test::mixtures()) all.push_back({m.name, m});
  return all;
}

class DividedMixture : public testing::TestWithParam<Case> {
 protected:
  std::filesystem::path file() {
    const Case& c = GetParam();
    return c.zoo ? test::gguf_of(*c.zoo, DType::f32) : test::write_tiny_mixture(dir_ / "m.gguf", c.tiny);
  }
  test::TempDir dir_;
};

TEST_P(DividedMixture, EqualsTheUndividedModel) {
  if (GetParam().zoo && !std::filesystem::exists(GetParam().zoo->directory)) {
    GTEST_SKIP() << "needs " << GetParam().zoo->directory << ", which is absent";
  }
  const auto path = file();
  auto m = model::Model::load(path);
  // A prompt in two batches, then one and several tokens at a time. Where experts are streamed they are for 13 and 9.
  const auto ids = test::random_ids(m.config(), 30, 3);
  const test::Script script{ids, {18, 1, 2, 9}};
  const EngineOptions options{.n_batch = 13, .sparse_threshold = GetParam().threshold};
  test::ErrorLimits limits(path, script, test::kCpuArithmetic, options);
  limits.expect_not_vacuous();
  ThreadTeam team(2);
  const auto whole_device = cpu::make_device(team);
  Engine whole(m, *whole_device, options);
  const test::Logits expected = test::run(whole, script);
  limits.expect_within(expected, "undivided");
  for (const test::MixtureDivision& d : test::kMixtureDivisions) {
    SCOPED_TRACE(d.name);
    if (d.main_without_experts && m.config().early_router) continue;  // refused: MixtureEngine.TellsWhatItCannotDoYet
    const Placement placement = test::placement_of(d, m);
    const auto stand_in = cpu::make_reference_device();
    WithoutExperts without(*stand_in);
    test::TakesNoDownT like_a_gpu(*stand_in);
    Device& main = d.main_without_experts ? static_cast<Device&>(without) : like_a_gpu;
    const auto host = cpu::make_device(team);
    Engine two(m, main, options, {*host, placement, team});
    const test::Logits divided = test::run(two, script);
    limits.expect_apart(divided, expected, "divided");
    SmallSlots visited(main);
    const auto streaming_host = cpu::make_device(team);
    EngineOptions streaming = options;
    streaming.stream_tokens = 9, streaming.share_rates = test::kAllVisit, streaming.copy_weights = true;
    Engine streams(m, visited, streaming, {*streaming_host, placement, team});
    limits.expect_apart(test::run(streams, script), expected, "streamed");
    const auto& facts = streams.schedule().facts();
    EXPECT_EQ(visited.staged.empty(), std::ranges::none_of(facts, &engine::LayerFacts::streamable));
    const auto sharing_host = cpu::make_device(team);
    EngineOptions sharing = streaming;
    sharing.share_rates = test::kHalfVisit;
    Engine shares(m, main, sharing, {*sharing_host, placement, team});
    limits.expect_apart(test::run(shares, script), expected, "shared");
    // Of the passes over few tokens it is counted who had the chosen experts.
    const auto whose = {d.hot(0, 0), d.hot(0, 1), d.hot(1, 0), d.hot(1, 1), d.hot(2, 0), d.hot(2, 1)};
    const double share = two.density().host_share();
    EXPECT_GE(share, std::ranges::none_of(whose, std::identity()) ? 1.0 : 0.0);
    EXPECT_LE(share, std::ranges::all_of(whose, std::identity()) ? 0.0 : 1.0);
  }
  limits.print();
}

INSTANTIATE_TEST_SUITE_P(Mixtures, DividedMixture, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.name; });

// Neurons that are zero are left out of experts whose down projections are transposed, in the file or at loading, and
// only there; what is left out is counted, and shows in the bytes of a token.
TEST(SparseMixture, LeavesOutWhatIsZero) {
  const test::TempDir dir;
  const auto standard = test::write_tiny_mixture(dir / "s.gguf", {.arch = "smallthinker", .n_ff_shared = 64});
  const auto transposed =
      test::write_tiny_mixture(dir / "t.gguf", {.arch = "smallthinker", .n_ff_shared = 64, .transposed_down = true});
  const test::Script script{test::random_ids(model::Model::load(standard).config(), 30, 3), {18, 1, 3, 8}};
  const EngineOptions options{.n_batch = 16};
  test::ErrorLimits limits(standard, script, test::kCpuArithmetic, options);
  limits.expect_not_vacuous();
  ThreadTeam team(3);
  const auto run = [&](model::Model& m, engine::Sparsity asked, engine::Sparsity expected, test::Logits& logits) {
    const auto device = cpu::make_device(team);
    EngineOptions o = options;
    o.sparsity = asked;
    Engine e(m, *device, o);
    EXPECT_EQ(e.sparsity(), expected);
    logits = test::run(e, script);
    const double bytes = e.traffic(e.density(), 1).total().total(), most = e.traffic({}, 1).total().total();
    if (expected == engine::Sparsity::off) {
      EXPECT_TRUE(std::isnan(e.density().density()));
      EXPECT_EQ(bytes, most);
    } else {
      EXPECT_GT(e.density().density(), 0.25);
      EXPECT_LT(e.density().density(), 0.75);
      double saved = 0;  // of a token's two experts and the shared one
      for (const model::LayerWeights& l : m.weights().layers) {
        const FfnShard& f = l.experts.front().ffn;
        saved += static_cast<double>(f.up.bytes() + f.down_t.bytes()) / static_cast<double>(f.n()) * (2 * 32 + 64);
      }
      EXPECT_NEAR(most - bytes, saved * (1 - e.density().density()), 1e-6 * most);
    }
  };
  using engine::Sparsity;
  test::Logits dense, sparse, off;
  auto as_stored = model::Model::load(standard), in_file = model::Model::load(transposed);
  run(as_stored, Sparsity::auto_, Sparsity::off, dense);
  run(in_file, Sparsity::auto_, Sparsity::exact, sparse);
  run(in_file, Sparsity::off, Sparsity::off, off);
  limits.expect_apart(sparse, dense, "sparse");
  limits.expect_apart(off, dense, "transposed, every neuron");
  auto at_loading = model::Model::load(standard, {.activation = {}, .transpose_down = {.wanted = true}});
  test::Logits loaded;
  run(at_loading, Sparsity::exact, Sparsity::exact, loaded);
  EXPECT_EQ(loaded, sparse);
  const auto device = cpu::make_device(team);
  const std::string error = test::message_of([&] { Engine(as_stored, *device, {.sparsity = Sparsity::exact}); });
  EXPECT_NE(error.find("--transpose-down"), std::string::npos) << error;
}

// Of experts that are never exactly zero neurons are left out by thresholds alone, and by those whatever device has
// them.
TEST(SparseMixture, LeavesOutWhatIsBelowAThreshold) {
  using engine::Sparsity;
  const test::TempDir dir;
  const auto standard = test::write_tiny_mixture(dir / "s.gguf", {.n_ff_shared = 64});
  const auto transposed = test::write_tiny_mixture(dir / "t.gguf", {.n_ff_shared = 64, .transposed_down = true});
  const test::Script script{test::random_ids(model::Model::load(standard).config(), 28, 3), {16, 1, 3, 8}};
  EngineOptions options{.n_batch = 16};
  ThreadTeam team(3);
  const auto run = [&](model::Model& m, Device& device, float threshold, Sparsity asked, Sparsity expected) {
    EngineOptions o = options;
    o.sparsity = asked, o.sparse_threshold = threshold;
    Engine e(m, device, o);
    EXPECT_EQ(e.sparsity(), expected);
    const test::Logits logits = test::run(e, script);
    if (expected == Sparsity::exact && device.expert_ffn()->takes_down_t()) {
      EXPECT_LT(e.density().density(), 0.9);
      EXPECT_LT(e.traffic(e.density(), 1).total().total(), e.traffic({}, 1).total().total());
    } else {
      EXPECT_TRUE(std::isnan(e.density().density()));
    }
    return logits;
  };
  auto as_stored = model::Model::load(standard), in_file = model::Model::load(transposed);
  auto at_loading = model::Model::load(standard, {.activation = {}, .transpose_down = {.wanted = true}});
  const auto cpu = cpu::make_device(team);
  const test::Logits dense = run(in_file, *cpu, 0, Sparsity::auto_, Sparsity::off),
                     sparse = run(in_file, *cpu, 0.1f, Sparsity::auto_, Sparsity::exact);
  EXPECT_NE(sparse, dense);
  EXPECT_EQ(sparse.front(), dense.front()) << "prompts compute every neuron";
  EXPECT_EQ(run(in_file, *cpu, 0.1f, Sparsity::off, Sparsity::off), dense);
  EXPECT_EQ(run(at_loading, *cpu, 0.1f, Sparsity::exact, Sparsity::exact), sparse);

  // A device that computes whole experts.
  const auto reference = cpu::make_reference_device();
  test::TakesNoDownT like_a_gpu(*reference);
  test::ErrorLimits limits(transposed, script, test::kCpuArithmetic, {.n_batch = 16, .sparse_threshold = 0.1f});
  limits.expect_not_vacuous();
  limits.expect_apart(run(as_stored, like_a_gpu, 0.1f, Sparsity::auto_, Sparsity::exact), sparse, "whole experts");

  const std::string error = test::message_of([&] { Engine(as_stored, *cpu, {.sparse_threshold = 0.1f}); });
  EXPECT_NE(error.find("a threshold cannot leave out neurons of these experts: blk.0.ffn_down_exps is stored "
                       "untransposed; --transpose-down"),
            std::string::npos)
      << error;
  EXPECT_THROW(Engine(in_file, *cpu, {.sparsity = Sparsity::exact}), Error) << "silu is never exactly zero";
}

// Of a layer with many experts, of which a batch uses some: all of those are the CPU's, or none.
TEST(MixtureEngine, OnlyChosenExpertsAreStreamed) {
  const test::TempDir dir;
  const auto path = test::write_tiny_mixture(dir / "m.gguf", {.n_layer = 1, .n_expert = 40, .n_used = 2});
  auto m = model::Model::load(path);
  const auto ids = test::random_ids(m.config(), 11, 3);
  const test::Script script{ids, {11}};

  class Watches final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
      ForwardingDevice::route(router, in, T, choice);
      chosen.insert(choice.ids, choice.ids + T * choice.n_named);
    }
    std::set<int32_t> chosen;
  };
  ThreadTeam team(2);
  const auto oracle = cpu::make_reference_device();
  Watches watches(*oracle);
  Engine whole(m, watches, {});
  const test::Logits expected = test::run(whole, script);
  ASSERT_LT(watches.chosen.size(), 23u);
  ASSERT_GT(watches.chosen.size(), 4u);
  for (const bool chosen_are_hot : {false, true}) {
    Placement placement = test::placement_of(test::kMixtureDivisions[0], m);
    for (int32_t id = 0; id < 40; ++id) {
      if (watches.chosen.contains(id) == chosen_are_hot) placement.layers[0].gpu_experts.push_back(id);
    }
    const auto stand_in = cpu::make_reference_device(), host = cpu::make_device(team);
    SmallSlots main(*stand_in);
    Engine two(m, main, {.stream_tokens = 9, .share_rates = test::kAllVisit, .copy_weights = true},
               {*host, placement, team});
    const test::Logits streamed = test::run(two, script);
    for (size_t i = 0; i < expected[0].size(); ++i) ASSERT_NEAR(streamed[0][i], expected[0][i], 1e-4);
    if (chosen_are_hot) {
      EXPECT_TRUE(main.staged.empty());
    } else {
      EXPECT_EQ(main.staged, std::vector<int32_t>(watches.chosen.begin(), watches.chosen.end()));
    }
  }
}

// Where a file is mapped, experts may be on disk.
TEST(MixtureEngine, MappedExpertsAreNotStreamed) {
  const test::TempDir dir;
  auto m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf"));
  const auto device = cpu::make_reference_device(), host = cpu::make_reference_device();
  ThreadTeam team(1);
  const Placement cold = test::placement_of(test::kMixtureDivisions[0], m);
  for (const bool copy : {false, true}) {
    const Engine e(m, *device, {.stream_tokens = 9, .copy_weights = copy}, {*host, cold, team});
    EXPECT_EQ(e.schedule().facts()[0].streamable, copy);
    const std::string list = e.schedule().print(engine::BatchKind::streamed);
    const bool streams = list.find("post(FFN input, experts), fetch, stream(normed), collect") != std::string::npos;
    EXPECT_EQ(streams, copy) << list;
    EXPECT_EQ(list.find("experts(normed, that stay)") != std::string::npos, copy) << list;
  }
}

TEST(MixtureEngine, TellsWhatItCannotDoYet) {
  const test::TempDir dir;
  auto m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf"));
  const auto device = cpu::make_reference_device(), host = cpu::make_reference_device();
  WithoutExperts without(*device);
  ThreadTeam team(1);
  EXPECT_THROW(Engine(m, without, {}), Error);
  EXPECT_THROW(Engine(m, *device, {.sparsity = engine::Sparsity::exact}), Error);
  const Placement hot = test::placement_of(test::kMixtureDivisions[1], m);
  EXPECT_THROW(Engine(m, without, {}, {*host, hot, team}), Error);
  // A router on the CPU would have to be asked before the attention of the GPU.
  auto early = model::Model::load(test::write_tiny_mixture(dir / "e.gguf", {.arch = "smallthinker"}));
  const Placement cold = test::placement_of(test::kMixtureDivisions[0], early);
  EXPECT_THROW(Engine(early, without, {}, {*host, cold, team}), Error);

  class WithoutLatents final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    LatentAttention* latent_attention() override { return nullptr; }
  } no_latents(*device);
  auto latent = model::Model::load(test::write_tiny_mixture(dir / "l.gguf", {.arch = "deepseek2"}));
  const std::string error = test::message_of([&] { Engine(latent, no_latents, {}); });
  EXPECT_NE(error.find("cannot compute the latent attention of 'deepseek2' models yet"), std::string::npos) << error;
}

// Of the first layer that is the embedding, whatever the attention adds to it.
TEST(MixtureEngine, EarlyRoutersReadTheirLayersInput) {
  const test::TempDir dir;
  auto m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf", {.arch = "smallthinker"}));
  const auto oracle = cpu::make_reference_device();

  class Watches final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
      if (first.empty()) first.assign(in.act.x, in.act.x + T * router.w.cols);
      EXPECT_FALSE(in.normed());
      ForwardingDevice::route(router, in, T, choice);
    }
    std::vector<float> first;
  } device(*oracle);
  Engine e(m, device, {});
  engine::Sequence text = e.sequence();
  const std::vector<int32_t> ids = {5, 9, 1};
  e.eval(text, ids);
  std::vector<float> embeddings;
  for (const int32_t id : ids) {
    const auto* const row = reinterpret_cast<const float*>(m.weights().tok_embd.row(id));
    embeddings.insert(embeddings.end(), row, row + m.config().n_embd);
  }
  EXPECT_EQ(device.first, embeddings);
}

TEST(MixtureEngine, NaNInARouterShowsInTheLogits) {
  const test::TempDir dir;
  const auto path = test::write_tiny_mixture(dir / "m.gguf");
  auto m = model::Model::load(path);
  ThreadTeam team(2);
  const auto simd = cpu::make_device(team);

  class Poisons final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
      Router poisoned = router;
      poisoned.bias = {nan_.data(), router.routing.n_expert};
      ForwardingDevice::route(poisoned, in, T, choice);
    }
    std::vector<float> nan_ = std::vector<float>(6, 0.0f);
  } device(*simd);
  device.nan_[4] = NAN;
  Engine e(m, device, {});
  engine::Sequence text = e.sequence();
  const std::vector<int32_t> ids = {1, 2, 3};
  for (const float x : e.eval(text, ids)) ASSERT_TRUE(std::isnan(x));
}

}  // namespace
}  // namespace hearth
