// Plans that divide ReLU experts by their neurons: where the profile says that it saves time, and within the budget.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "offline/plan/explain.h"
#include "offline/plan/planner.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"

namespace hearth::offline {
namespace {

constexpr double kGreedy = 1.03;  // plans are chosen greedily (knapsack.h): of two layers, so near the best
constexpr int64_t kFf = 256, kExperts = 12, kUsed = 4;

class PlanCuts : public testing::Test {
 protected:
  // Of each expert's neurons a quarter, others in each, is active for `hot` of 1000 tokens, and the others for `cold`.
  static model::InsideCounts counts(uint64_t hot, uint64_t cold) {
    model::InsideCounts c(kExperts, kFf);
    std::ranges::fill(c.used, 1000);
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t i = 0; i < kFf; ++i) c.active[static_cast<size_t>(e * kFf + i)] = (i + e) % 4 == 0 ? hot : cold;
    }
    return c;
  }
  ModelShape shape(const model::InsideCounts& inside) const {
    ModelShape s = shape_of(model_);
    for (LayerShape& l : s.layers) {
      l.inside = inside, l.active_inside = 0.3;
    }
    return s;
  }
  // A GPU that is worth asking.
  static PlanRequest request() {
    PlanRequest r;
    r.n_ctx = 48, r.n_batch = 8;
    r.cost.cpu_bandwidth = 1e8, r.cost.gpu_bandwidth = 1e10, r.cost.kernel_seconds = 1e-8, r.cost.token_seconds = 0;
    r.cost.short_kernel_seconds = 1e-8, r.cost.handoff_seconds = 2e-6, r.cost.asking_seconds = 5e-7;
    r.reserve.context_bytes = r.reserve.margin_bytes = r.reserve.staging_bytes = 0, r.reserve.alignment = 16;
    r.reserve.scratch_bytes = [](const Limits&) { return uint64_t{0}; };
    return r;
  }
  // How often each expert is chosen falls from expert to expert by `skew`.
  static Frequencies frequencies(const ModelShape& s, double skew) {
    Frequencies f{{}, true, "made"};
    for (const LayerShape& l : s.layers) {
      std::vector<double>& p = f.p.emplace_back();
      for (int64_t e = 0; e < kExperts; ++e) p.push_back(std::pow(skew, e));
      const double sum = std::accumulate(p.begin(), p.end(), 0.0);
      for (double& x : p) x = std::min(1.0, x * kUsed / sum);
      if (l.shared_expert) p.push_back(1);
    }
    return f;
  }
  template <typename F>
  void each_budget(const ModelShape& s, const Frequencies& f, F&& visit) const {
    const Planner planner(s, f, request());
    ModelShape whole = s;
    for (LayerShape& l : whole.layers) l.cuts.clear();
    const Planner without(whole, f, request());
    const uint64_t least = planner.smallest_budget(), most = planner.largest_useful_budget();
    EXPECT_EQ(most, without.largest_useful_budget());
    for (int i = 1; i < 16; ++i) {
      const uint64_t budget = least + (most - least) * static_cast<uint64_t>(i) / 16;
      visit(planner, without, planner.plan(budget));
    }
  }
  static int cut_layers(const Plan& plan) {
    return static_cast<int>(std::ranges::count_if(
        plan.placement.layers, [](const engine::LayerPlacement& l) { return !l.gpu_expert_neurons.empty(); }));
  }
  // Bytes of the GPU's parts of experts, from the model's own matrices.
  uint64_t bytes_of(const engine::Placement& p) const {
    uint64_t sum = 0;
    for (size_t l = 0; l < p.layers.size(); ++l) {
      const std::vector<Expert>& experts = model_.weights().layers[l].experts;
      for (size_t id = 0; id < experts.size(); ++id) {
        const FfnShard& f = experts[id].ffn;
        const auto n = static_cast<uint64_t>(p.layers[l].n_on_gpu(id, f.n()));
        const uint64_t down = (is_quantized(f.down_t.type) ? 2 : type_bytes(f.down_t.type)) * 256;
        sum += n * (f.gate.row_size() + f.up.row_size() + down);
      }
    }
    return sum;
  }
  static uint64_t type_bytes(DType type) { return row_bytes(type, 32) / 32; }
  static model::Model load(const std::filesystem::path& path, test::TinyMixtureOptions o = {}) {
    o.arch = "smallthinker", o.n_layer = 2, o.n_embd = 256, o.n_ff = kFf, o.n_expert = kExperts, o.n_used = kUsed;
    o.transposed_down = true;
    return model::Model::load(test::write_tiny_mixture(path, o));
  }
  test::TempDir dir_;
  model::Model model_ = load(dir_ / "m.gguf");
};

TEST_F(PlanCuts, WhereSomeNeuronsAreHotTheGpuHasThose) {
  const ModelShape s = shape(counts(900, 100));
  int cut = 0;
  double most_gained = 0;
  each_budget(s, frequencies(s, 1), [&](const Planner& planner, const Planner& without, const Plan& plan) {
    const Plan whole = without.plan(plan.placement.vram_budget);
    EXPECT_LE(plan.seconds, whole.seconds * kGreedy);
    EXPECT_LE(plan.gpu.total(), plan.placement.vram_budget);
    EXPECT_LE(bytes_of(plan.placement), plan.gpu.neurons);
    EXPECT_NO_THROW(check_placement(plan.placement, model_.config(), model::fingerprint(model_.file())));
    most_gained = std::max(most_gained, whole.seconds / plan.seconds);
    cut += cut_layers(plan);
    for (const engine::LayerPlacement& l : plan.placement.layers) {
      for (size_t k = 0; k < l.gpu_expert_neurons.size(); ++k) {
        // All of the hot quarter, or only such.
        const auto hot =
            std::ranges::count_if(l.gpu_expert_neurons[k], [&](int32_t i) { return (i + l.gpu_experts[k]) % 4 == 0; });
        EXPECT_EQ(hot, std::min(std::ssize(l.gpu_expert_neurons[k]), std::ptrdiff_t{kFf / 4}));
      }
    }
    if (cut_layers(plan) == 0) return;
    const std::string table = plan_table(planner, plan, explain(planner, plan));
    for (const char* said : {"neurons", "/256", "most active neurons of its experts"}) {
      EXPECT_NE(table.find(said), std::string::npos) << said << "\n" << table;
    }
  });
  EXPECT_GT(cut, 10);
  EXPECT_GT(most_gained, 1.1);
}

TEST_F(PlanCuts, WhereAllNeuronsAreAlikeWholeExpertsAreBetter) {
  const ModelShape s = shape(counts(300, 300));
  for (const double skew : {1.0, 0.7}) {
    SCOPED_TRACE(skew);
    each_budget(s, frequencies(s, skew), [&](const Planner& planner, const Planner& without, const Plan& plan) {
      const Plan whole = without.plan(plan.placement.vram_budget);
      // A part may fill what is left of the budget, which is less than an expert.
      EXPECT_LE(plan.seconds, whole.seconds * kGreedy);
      const uint64_t expert = s.layers[0].neuron_on_gpu() + 1000, budget = plan.placement.vram_budget;
      EXPECT_GE(plan.seconds * kGreedy, without.plan(budget + expert).seconds);
      EXPECT_TRUE(plan.seconds != whole.seconds || cut_layers(plan) == 0);
      EXPECT_LE(plan.gpu.total(), plan.placement.vram_budget);
      if (cut_layers(plan) > 0) return;
      const std::string table = plan_table(planner, plan, {});
      EXPECT_EQ(table.find("most active neurons"), std::string::npos) << table;
    });
  }
}

// A GPU has the down projections of cut experts in f16, where they are quantised.
TEST_F(PlanCuts, CountsWhatTheGpuMakesOfTheNeurons) {
  model_ = load(dir_ / "q.gguf", {.type = DType::q8_0, .n_ff_shared = 64});
  const ModelShape s = shape(counts(900, 100));
  const FfnShard& f = model_.weights().layers[0].experts[0].ffn;
  ASSERT_EQ(s.layers[0].cuts.size(), 7u);
  for (const LayerShape::ExpertCut& cut : s.layers[0].cuts) {
    EXPECT_EQ(cut.neurons % 32, 0);
    EXPECT_EQ(cut.gpu_bytes, static_cast<uint64_t>(cut.neurons) * (2 * f.gate.row_size() + 2 * 256));
  }
  int cut = 0;
  each_budget(s, frequencies(s, 1), [&](const Planner&, const Planner&, const Plan& plan) {
    EXPECT_LE(bytes_of(plan.placement), plan.gpu.neurons);
    EXPECT_LE(plan.gpu.total(), plan.placement.vram_budget);
    for (const engine::LayerPlacement& l : plan.placement.layers) {
      for (size_t k = 0; k < l.gpu_expert_neurons.size(); ++k) {
        EXPECT_EQ(l.gpu_expert_neurons[k].empty(), l.gpu_experts[k] == kExperts) << "the shared one is whole";
      }
    }
    cut += cut_layers(plan);
  });
  EXPECT_GT(cut, 0);
}

// Without transposed down projections, counts of neurons, or a sparse family there is nothing to cut.
TEST_F(PlanCuts, WhatCannotBeCutIsWhole) {
  const model::InsideCounts skewed = counts(900, 100);
  ModelShape unknown = shape({});
  each_budget(unknown, frequencies(unknown, 1),
              [&](const Planner&, const Planner&, const Plan& plan) { EXPECT_EQ(cut_layers(plan), 0); });
  test::TinyMixtureOptions o{.arch = "smallthinker", .n_ff = kFf};
  EXPECT_TRUE(shape_of(model::Model::load(test::write_tiny_mixture(dir_ / "s.gguf", o))).layers[0].cuts.empty());
  o.arch = "qwen3moe", o.transposed_down = true;
  EXPECT_TRUE(shape_of(model::Model::load(test::write_tiny_mixture(dir_ / "d.gguf", o))).layers[0].cuts.empty());
  o.arch = "smallthinker", o.n_ff = 32;
  EXPECT_TRUE(shape_of(model::Model::load(test::write_tiny_mixture(dir_ / "f.gguf", o))).layers[0].cuts.empty());
}

}  // namespace
}  // namespace hearth::offline
