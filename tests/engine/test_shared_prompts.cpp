// Prompts of a divided mixture whose cold experts are shared out: whoever computes them, results are those of the
// undivided model. The oracle stands in for the GPU, in a thread of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/errors.h"
#include "support/mixture_divisions.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::ShareRates;

// Experts by the addresses of their weights, which are the same for the CPU and for what visits the stand-in.
using Computed = std::multiset<const void*>;

// A main device that writes down what visits it.
class Visited final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  using ForwardingDevice::stage;
  ExpertSet stage(int slot, const ExpertSet& host, std::span<const int32_t> ids) override {
    visitors.insert(visitors.end(), ids.begin(), ids.end());
    for (const int32_t id : ids) experts.insert(host.experts[static_cast<size_t>(id)].ffn.gate.data);
    return ForwardingDevice::stage(slot, host, ids);
  }
  std::vector<int32_t> visitors;  // ids
  Computed experts;
};

// A CPU that writes down what it computes of prompts.
class Stayed final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) override {
    std::set<int32_t> chosen(choice.ids, choice.ids + T * choice.n_named);
    for (const int32_t id : chosen) {
      const Expert& e = set.experts[static_cast<size_t>(id)];
      if (e && T > kFewTokens) experts.insert(e.ffn.gate.data);
    }
    ForwardingDevice::ffn_experts(set, choice, in, T, y);
  }
  Computed experts;
};

struct Case {
  const char* name;
  test::TinyMixtureOptions model;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};
class SharedPrompts : public testing::TestWithParam<Case> {};

// A case's experts take 1 a byte over the link; the CPU takes as long for the bytes, or for so many tokens' products.
constexpr ShareRates kByTokens{0, 1, 0, 0.1};

TEST_P(SharedPrompts, EqualTheUndividedModel) {
  const test::TempDir dir;
  const auto path = test::write_tiny_mixture(dir / "m.gguf", GetParam().model);
  auto m = model::Model::load(path);
  ThreadTeam team(2);
  int64_t visited = 0, stayed = 0;
  for (const size_t T : {9, 17, 100, 512}) {
    SCOPED_TRACE(T);
    const test::Script script = test::prompt_then_decode(test::random_ids(m.config(), T + 3, 3), T);
    EngineOptions options{.n_ctx = 520, .n_batch = 512};
    test::ErrorLimits limits(path, script, test::kCpuArithmetic, options);
    limits.expect_not_vacuous();
    const auto whole_device = cpu::make_device(team);
    Engine whole(m, *whole_device, options);
    const test::Logits expected = test::run(whole, script);
    limits.expect_within(expected, "undivided");
    for (const test::MixtureDivision& d : test::kMixtureDivisions) {
      if (d.main_without_experts) continue;
      SCOPED_TRACE(d.name);
      const auto run = [&](const ShareRates& rates, Computed& on_main, Computed& on_cpu, const char* what) {
        options.stream_tokens = 9, options.copy_weights = true, options.share_rates = rates;
        const auto oracle = cpu::make_reference_device(), simd = cpu::make_device(team);
        Visited main(*oracle);
        Stayed host(*simd);
        Engine two(m, main, options, {host, test::placement_of(d, m), team});
        const test::Logits logits = test::run(two, script);
        limits.expect_apart(logits, expected, what);
        if (T < 100) {
          EXPECT_EQ(test::run(two, script), logits) << "the same bits";
        }
        on_main = std::move(main.experts), on_cpu = std::move(host.experts);
      };
      // Where the CPU attends and has all of a layer's experts, it chooses and computes them.
      Computed all, never, nothing, none, some[2];
      run(test::kAllVisit, all, never, "all visit");
      run(test::kNoneVisits, nothing, none, "none visits");
      EXPECT_TRUE(nothing.empty());
      EXPECT_EQ(never.empty(), !d.host_attends(1));
      EXPECT_EQ(all.size() + never.size(), none.size());
      for (const ShareRates& rates : {test::kHalfVisit, kByTokens}) {
        run(rates, some[0], some[1], "shared");
        EXPECT_EQ(some[0].size() + some[1].size(), none.size());
        visited += std::ssize(some[0]), stayed += std::ssize(some[1]) - std::ssize(never);
      }
    }
    limits.print();
  }
  EXPECT_GT(visited, 0);
  EXPECT_GT(stayed, 0);
}

std::vector<Case> cases() {
  return {
      {"odd_experts", {.n_expert = 7, .n_used = 3}},
      {"shared_expert", {.n_ff_shared = 96, .n_dense_layers = 1}},
      {"early_router", {.arch = "smallthinker", .n_ff = 64}},
      // With 8-bit activations a rounding may change what is chosen, unless every expert is.
      {"q8_0", {.arch = "qwen2moe", .type = DType::q8_0, .n_layer = 2, .n_expert = 5, .n_used = 5, .n_ff_shared = 32}},
  };
}
INSTANTIATE_TEST_SUITE_P(Mixtures, SharedPrompts, testing::ValuesIn(cases()),
                         [](const auto& p) { return std::string(p.param.name); });

// Half of a layer's cold experts that were chosen: those with the most tokens.
TEST(SharedPrompt, TheMostTokensVisit) {
  const test::TempDir dir;
  auto m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf", {.n_layer = 1, .n_expert = 40, .n_used = 3}));
  const test::Script script{test::random_ids(m.config(), 50, 3), {50}};

  class Counts final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
      ForwardingDevice::route(router, in, T, choice);
      for (int64_t i = 0; i < T * choice.n_named; ++i) ++tokens[choice.ids[i]];
    }
    std::map<int32_t, int> tokens;
  };
  ThreadTeam team(2);
  const auto oracle = cpu::make_reference_device(), simd = cpu::make_device(team);
  Counts counts(*oracle);
  Visited main(counts);
  Stayed host(*simd);
  engine::Placement placement = test::placement_of(test::kMixtureDivisions[0], m);
  placement.layers[0].gpu_experts = {3, 4, 20};
  Engine two(m, main, {.stream_tokens = 9, .share_rates = test::kHalfVisit, .copy_weights = true},
             {host, placement, team});
  test::run(two, script);
  EXPECT_TRUE(std::ranges::is_sorted(main.visitors));
  EXPECT_GE(std::ssize(host.experts), std::ssize(main.experts));
  std::vector<int> cold, visiting;
  for (const auto& [id, n] : counts.tokens) {
    if (std::ranges::count(placement.layers[0].gpu_experts, id) == 0) cold.push_back(n);
  }
  ASSERT_GT(cold.size(), 20u);
  for (const int32_t id : main.visitors) visiting.push_back(counts.tokens.at(id));
  std::ranges::sort(cold, std::greater()), std::ranges::sort(visiting, std::greater());
  cold.resize(cold.size() / 2);
  EXPECT_EQ(visiting, cold);
}

// A side that fails in the middle of a layer tells why, and the other does not wait for it.
TEST(SharedPrompt, ASideThatFailsEndsThePass) {
  class FailsToStage final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    using ForwardingDevice::stage;
    ExpertSet stage(int, const ExpertSet&, std::span<const int32_t>) override { fail("no such slot"); }
  };
  class FailsToCompute final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void ffn_experts(const ExpertSet&, const ExpertChoice&, const Input&, int64_t, float*) override {
      fail("no such expert");
    }
  };
  const test::TempDir dir;
  auto m = model::Model::load(test::write_tiny_mixture(dir / "m.gguf"));
  ThreadTeam team(1);
  const auto oracle = cpu::make_reference_device(), another_oracle = cpu::make_reference_device();
  const auto simd = cpu::make_device(team), another_simd = cpu::make_device(team);
  FailsToStage main(*another_oracle);
  FailsToCompute host(*another_simd);
  const auto error = [&](Device& on_main, Device& on_host) {
    Engine two(m, on_main, {.stream_tokens = 9, .share_rates = test::kHalfVisit, .copy_weights = true},
               {on_host, test::placement_of(test::kMixtureDivisions[0], m), team});
    engine::Sequence text = two.sequence();
    return test::message_of([&] { two.eval(text, test::random_ids(m.config(), 20, 3)); });
  };
  EXPECT_EQ(error(main, *simd), "no such slot");
  EXPECT_EQ(error(*oracle, host), "no such expert");
}

}  // namespace
}  // namespace hearth
