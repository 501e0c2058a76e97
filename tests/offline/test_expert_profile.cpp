// Profiles of mixtures of experts: what is counted equals a computation from first principles, is kept in the sidecar,
// and tells the planner which experts to place.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "offline/plan/layer_choices.h"
#include "offline/plan/planner.h"
#include "offline/profile/expert_counter.h"
#include "offline/profile/expert_summary.h"
#include "offline/profile/import.h"
#include "offline/profile/profile.h"
#include "offline/profile/summary.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_mixture.h"

namespace hearth::offline {
namespace {

template <typename F>
void expect_says(F&& action, const char* said) {
  const std::string message = test::message_of(action);
  EXPECT_NE(message.find(said), std::string::npos) << message;
}

using Sets = std::vector<std::set<int32_t>>;  // of experts, by token

// The statistics the obvious way: sets, one token after another.
void add_straightforward(const Sets& sets, const Sets& foreseen, model::LayerStatistics& s) {
  const auto share = [](const std::set<int32_t>& of, const std::set<int32_t>& in) {
    double n = 0;
    for (const int32_t e : of) n += in.contains(e) ? 1 : 0;
    return n / static_cast<double>(of.size());
  };
  for (size_t t = 0; t < sets.size(); ++t) {
    for (const int32_t e : sets[t]) ++s.active[static_cast<size_t>(e)];
    const auto together = [&](size_t begin, size_t end) {
      std::set<int32_t> all;
      for (size_t i = begin; i < end; ++i) all.insert(sets[i].begin(), sets[i].end());
      return all;
    };
    if (t >= 1) s.previous.sum += share(sets[t], sets[t - 1]), ++s.previous.tokens;
    if (t >= 64) s.recent.sum += share(sets[t], together(t - 64, t)), ++s.recent.tokens;
    if (!foreseen.empty()) s.foreseen.sum += share(sets[t], foreseen[t]), ++s.foreseen.tokens;
    for (size_t k = 0; k < s.unions.size(); ++k) {
      const auto n = static_cast<size_t>(model::kUnionTokens[k]);
      if (t + 1 >= n) s.unions[k].neurons += together(t + 1 - n, t + 1).size(), ++s.unions[k].windows;
    }
  }
}

void expect_same(const model::LayerStatistics& a, const model::LayerStatistics& b) {
  EXPECT_EQ(a.active, b.active);
  EXPECT_EQ(a.active_heldout, b.active_heldout);
  EXPECT_EQ(a.unions, b.unions);
  EXPECT_EQ(a.inside_counts, b.inside_counts);
  for (const auto field : {&model::LayerStatistics::previous, &model::LayerStatistics::recent,
                           &model::LayerStatistics::foreseen, &model::LayerStatistics::inside}) {
    EXPECT_EQ((a.*field).tokens, (b.*field).tokens);
    EXPECT_NEAR((a.*field).sum, (b.*field).sum, 1e-9);
  }
}

TEST(ExpertCounter, EqualsSetsWhateverTheBatches) {
  constexpr int32_t kExperts = 12, kUsed = 3, kTokens = 150;
  std::mt19937 rng(4);
  const auto draw = [&] {
    std::vector<int32_t> all(kExperts);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), rng);
    return std::set<int32_t>(all.begin(), all.begin() + kUsed);
  };
  Sets sets, foreseen;
  std::vector<int32_t> ids, foreseen_ids;  // with the shared expert behind each token's
  for (int32_t t = 0; t < kTokens; ++t) {
    for (auto* to : {&sets, &foreseen}) to->push_back(draw());
    ids.insert(ids.end(), sets.back().begin(), sets.back().end()), ids.push_back(kExperts);
    foreseen_ids.insert(foreseen_ids.end(), foreseen.back().begin(), foreseen.back().end());
    foreseen_ids.push_back(kExperts);
  }
  model::LayerStatistics expected;
  expected.active.resize(kExperts);
  add_straightforward(sets, foreseen, expected);
  for (const int64_t batch : {int64_t{150}, int64_t{7}, int64_t{1}}) {
    ExpertCounter counter(kExperts, kUsed);
    counter.begin_sequence();
    model::LayerStatistics s;
    s.active.resize(kExperts);
    for (int64_t t = 0; t < kTokens; t += batch) {
      const int64_t n = std::min<int64_t>(batch, kTokens - t);
      const auto part = [&](std::span<const int32_t> all) {
        return all.subspan(static_cast<size_t>(t * (kUsed + 1)), static_cast<size_t>(n * (kUsed + 1)));
      };
      counter.add(part(ids), part(foreseen_ids), n, false, s);
    }
    expect_same(s, expected);
  }
}

TEST(ExpertCounter, RefusesARouterThatNamesAnExpertTwice) {
  ExpertCounter counter(4, 2);
  model::LayerStatistics s;
  s.active.resize(4);
  const std::vector<int32_t> twice = {1, 1}, negative = {-1, 2}, few = {1, 4};
  for (const auto* ids : {&twice, &negative, &few}) EXPECT_THROW(counter.add(*ids, {}, 1, false, s), Error);
}

// What routers read and chose, layer by layer and token by token.
class RoutesSeen final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void ffn_dense(const FfnShard& shard, const Input& in, int64_t T, Vector bias, float* y,
                 const NextNorm* next) override {
    keep(in, T, shard.gate.cols);  // before the residual stream moves on
    ForwardingDevice::ffn_dense(shard, in, T, bias, y, next);
    choices.emplace_back();
  }
  void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) override {
    ForwardingDevice::route(router, in, T, choice);
    keep(in, T, router.w.cols);
    Sets& sets = choices.emplace_back();
    for (int64_t t = 0; t < T; ++t) {
      const int32_t* ids = choice.ids + t * choice.n_named;
      sets.emplace_back(ids, ids + router.routing.n_used);  // ascending: the shared one is the last
    }
  }
  std::vector<std::vector<float>> inputs;  // [T][n_embd]
  std::vector<Sets> choices;               // empty for dense layers

 private:
  void keep(const Input& in, int64_t T, int64_t n) {
    if (in.normed()) inner_.norm(in.norm, in.x, T, in.act);
    inputs.emplace_back(in.act.x, in.act.x + T * n);
  }
};

// What `router` chooses of an input, in double.
Sets choose(const Router& router, const std::vector<float>& input) {
  const int64_t n = router.w.cols, n_expert = router.routing.n_expert;
  Sets sets;
  for (size_t at = 0; at < input.size(); at += static_cast<size_t>(n)) {
    std::vector<float> logits;
    for (int64_t e = 0; e < n_expert; ++e) {
      const auto* w = reinterpret_cast<const float*>(router.w.row(e));
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(w[i]) * input[at + static_cast<size_t>(i)];
      logits.push_back(static_cast<float>(sum));
    }
    std::vector<int32_t> ids(static_cast<size_t>(router.routing.n_used));
    std::vector<float> weights(ids.size());
    choose_experts(router.routing, logits.data(), router.correction, ids.data(), weights.data());
    sets.emplace_back(ids.begin(), ids.end());
  }
  return sets;
}

// Counts the neurons of one token's experts whose gate a ReLU lets through, in double.
void add_above_zero(const model::LayerWeights& l, std::set<int32_t> ids, std::span<const float> input,
                    model::LayerStatistics& s) {
  const int64_t n_expert = l.router.routing.n_expert, n_ff = l.experts[0].ffn.n();
  if (!s.inside_counts) s.inside_counts = {n_expert, n_ff};
  for (const int32_t id : ids) ++s.inside_counts.used[static_cast<size_t>(id)];
  if (l.router.shared) ids.insert(static_cast<int32_t>(n_expert));
  double above = 0, all = 0;
  for (const int32_t id : ids) {
    const Matrix& w = l.experts[static_cast<size_t>(id)].ffn.gate;
    for (int64_t r = 0; r < w.rows; ++r, ++all) {
      const auto* row = reinterpret_cast<const float*>(w.row(r));
      if (std::inner_product(input.begin(), input.end(), row, 0.0) <= 0) continue;
      ++above;
      if (id < n_expert) ++s.inside_counts.active[static_cast<size_t>(id * n_ff + r)];
    }
  }
  s.inside.sum += above / all, ++s.inside.tokens;
}

class ExpertProfile : public testing::Test {
 protected:
  void load(const test::TinyMixtureOptions& o, std::optional<std::string> activation = {}) {
    model_ = model::Model::load(test::write_tiny_mixture(dir_ / "mixture.gguf", o), {std::move(activation)});
  }
  // Three texts of 40 tokens, the last one held out.
  static Corpus corpus() {
    Corpus c;
    std::mt19937 rng(9);
    for (int i = 0; i < 3; ++i) {
      Sequence s;
      for (int t = 0; t < 40; ++t) s.ids.push_back(static_cast<int32_t>(test::random_int(rng, 0, 63)));
      s.heldout = i == 2;
      c.sequences.push_back(std::move(s));
    }
    c.texts = {{"made", "0123456789abcdef", 120}};
    return c;
  }
  model::Sidecar profiled(int threads = 2, int stop_after = 1 << 30, std::optional<model::Sidecar> from = {}) {
    model::Sidecar s = from ? std::move(*from) : model::Sidecar::empty_for(model_->file(), model_->config());
    ThreadTeam team(threads);
    const auto device = cpu::make_reference_device(), host = cpu::make_reference_device();
    ProfileOptions o;
    o.corpus.window = 48;
    profile(*model_, *device, *host, team, corpus(), o, s, [&](const ProfileProgress&) { return --stop_after > 0; });
    return s;
  }
  // By the engine and sets.
  std::vector<model::LayerStatistics> straightforward() {
    std::vector<model::LayerStatistics> all;
    for (const int64_t n : model::Sidecar::empty_for(model_->file(), model_->config()).n_ff)
      all.emplace_back().active.resize(static_cast<size_t>(n));
    for (const Sequence& s : corpus().sequences) {
      const auto oracle = cpu::make_reference_device();
      RoutesSeen seen(*oracle);
      engine::Engine e(*model_, seen, {.n_ctx = 48});
      engine::Sequence text = e.sequence();
      e.eval(text, s.ids);
      EXPECT_EQ(seen.choices.size(), all.size());
      for (size_t l = 0; l < all.size(); ++l) {
        const Router& router = model_->weights().layers[l].router;
        if (!router) continue;
        if (s.heldout) {
          all[l].active_heldout.resize(all[l].active.size());
          for (const auto& set : seen.choices[l])
            for (const int32_t id : set) ++all[l].active_heldout[static_cast<size_t>(id)];
        } else {
          add_straightforward(seen.choices[l], l > 0 ? choose(router, seen.inputs[l - 1]) : Sets(), all[l]);
          const auto n = static_cast<size_t>(model_->config().n_embd);
          for (size_t t = 0; model_->config().ffn.sparse() && t < s.ids.size(); t += 16) {
            add_above_zero(model_->weights().layers[l], seen.choices[l][t], std::span(seen.inputs[l]).subspan(t * n, n),
                           all[l]);
          }
        }
      }
    }
    return all;
  }
  void expect_right(const model::Sidecar& s) {
    const std::vector<model::LayerStatistics> expected = straightforward();
    EXPECT_EQ(s.statistics.tokens, 80u);
    for (size_t l = 0; l < expected.size(); ++l) {
      SCOPED_TRACE(l);
      if (s.is_mixture(l)) expect_same(s.statistics.layers[l], expected[l]);
    }
  }
  test::TempDir dir_;
  std::optional<model::Model> model_;
};

TEST_F(ExpertProfile, CountsWhatRoutersChoose) {
  load({});
  for (const int threads : {1, 3}) expect_right(profiled(threads));
}

TEST_F(ExpertProfile, SharedExpertsAndDenseLayersAreToldApart) {
  load({.arch = "qwen2moe", .n_ff_shared = 64});
  expect_right(profiled());
  load({.n_dense_layers = 1});
  const model::Sidecar s = profiled();
  expect_right(s);
  EXPECT_EQ(s.n_ff, (std::vector<int64_t>{96, 6, 6}));
  EXPECT_EQ(s.n_expert_used, (std::vector<int64_t>{0, 2, 2}));
  uint64_t neurons = 0;
  for (const uint64_t n : s.statistics.layers[0].active) neurons += n;
  EXPECT_GT(neurons, 0u);
  EXPECT_GT(s.statistics.layers[1].foreseen.tokens, 0u);  // tried on the dense layer's input
  const std::string table = summary_table(s);
  for (const char* said : {"80 % made by", "look-ahead"}) EXPECT_NE(table.find(said), std::string::npos) << said;
}

// The CPU's bytes of a token shrink by the up and down rows that it skips; a GPU computes whole experts.
TEST_F(ExpertProfile, NeuronsInsideReluExpertsAreCountedAndPlannedWith) {
  load({.arch = "qwen2moe", .n_ff_shared = 64, .transposed_down = true}, "relu");
  const model::Sidecar s = profiled();
  expect_right(s);
  s.write(dir_ / "mixture.sparse.gguf");
  const model::Sidecar read = *model::Sidecar::find(model_->file(), model_->config());
  for (size_t l = 0; l < 3; ++l) {
    const model::MeanShare& inside = read.statistics.layers[l].inside;
    EXPECT_EQ(inside.tokens, 6u);  // of 2 texts of 40
    EXPECT_EQ(inside.sum, s.statistics.layers[l].inside.sum);
    EXPECT_EQ(read.statistics.layers[l].inside_counts, s.statistics.layers[l].inside_counts);
    EXPECT_GT(*inside.mean(), 0.2);
    EXPECT_LT(*inside.mean(), 0.8);
  }
  const nlohmann::json summary = summary_json(read).at("mean_experts");
  EXPECT_TRUE(summary.at("neurons_active").is_number());
  EXPECT_GE(summary.at("neurons_active_of_hottest_percent").at("25"), 0.25);
  // And goes on from there.
  profiled(2, 1).write(dir_ / "mixture.sparse.gguf");
  expect_right(profiled(2, 1 << 30, model::Sidecar::find(model_->file(), model_->config())));

  ModelShape shape = shape_of(*model_);
  const std::vector<double> even(7, 3.0 / 7);
  const auto traffic = [&](int32_t hot) {
    return LayerCosts(shape.layers[1], even, CostModel{}, GpuReserve{}, 0, 0).ffn_traffic({.hot = hot});
  };
  const Traffic cold = traffic(0), hot = traffic(7);
  set_active_inside(shape, s);
  const LayerShape& l = shape.layers[1];
  const double share = *s.statistics.layers[1].inside.mean(), skippable = 3.0 * static_cast<double>(l.skippable_bytes);
  EXPECT_EQ(3 * l.skippable_bytes, 2 * l.up_down_bytes);  // of f32 gate, up and down
  EXPECT_EQ(cold.cpu_sparse, 0);
  EXPECT_NEAR(traffic(0).cpu_sparse, skippable * share, 1e-6);
  EXPECT_NEAR(traffic(0).cpu_dense, cold.cpu_dense - skippable, 1e-6);
  EXPECT_EQ(traffic(7).gpu_dense, hot.gpu_dense);
}

TEST_F(ExpertProfile, NeuronsInsideExpertsAreCountedOfReluFamiliesAlone) {
  load({});
  for (const model::LayerStatistics& l : profiled().statistics.layers) EXPECT_EQ(l.inside.tokens, 0u);
}

TEST_F(ExpertProfile, GoesOnWhereItStoppedAndComesBackFromTheSidecar) {
  load({});
  const auto path = dir_ / "mixture.sparse.gguf";
  profiled(2, 1).write(path);
  const model::Sidecar first = *model::Sidecar::find(model_->file(), model_->config());
  EXPECT_FALSE(first.statistics.complete);
  profiled(1, 1 << 30, first).write(path);
  const model::Sidecar s = *model::Sidecar::find(model_->file(), model_->config());
  EXPECT_TRUE(s.statistics.complete);
  expect_right(s);
  const std::vector<ExpertSummary> layers = summarize_experts(s);
  ASSERT_EQ(layers.size(), 3u);
  for (const ExpertSummary& l : layers) {
    EXPECT_GT(l.covered[0], 0);
    EXPECT_LE(l.covered[0], l.covered[2]);
    EXPECT_TRUE(l.covered_heldout[1] && l.previous && l.growth[2]);
    EXPECT_GE(*l.growth[1], *l.growth[0]);
    EXPECT_EQ(l.foreseen.has_value(), l.layer > 0);
  }
  const nlohmann::json j = summary_json(s);
  EXPECT_TRUE(j.at("mean").is_null());
  EXPECT_EQ(j.at("layers").at(1).at("experts"), 6);
  EXPECT_EQ(j.at("mean_experts").at("experts_used"), 2);
}

TEST_F(ExpertProfile, CountsThatDoNotAddUpAreRefused) {
  load({});
  const auto path = dir_ / "mixture.sparse.gguf";
  const auto refused = [&](auto&& change, const char* said) {
    model::Sidecar s = profiled();
    change(s);
    s.write(path);
    expect_says([&] { model::Sidecar::find(model_->file(), model_->config()); }, said);
  };
  refused([](auto& s) { --s.statistics.layers[1].active[0]; }, "expected 2 for each");
  refused([](auto& s) { s.statistics.layers[1].active_heldout[0] += 1; }, "expected 2 for each");
  refused([](auto& s) { s.n_expert_used[2] = 7; }, "uses 7 of layer 2's 6 experts");
  refused([](auto& s) { s.n_expert_used.pop_back(); }, "n_expert_used is of 2 layers");
  refused(
      [](auto& s) {
        s.n_expert_used = {1, 1, 1}, s.statistics.tokens *= 2, s.statistics.tokens_heldout *= 2;
      },
      "was made for");
  load({.arch = "qwen2moe", .n_ff_shared = 64, .transposed_down = true}, "relu");
  const auto counts = [](auto& s) -> model::InsideCounts& { return s.statistics.layers[1].inside_counts; };
  refused([&](auto& s) { counts(s).active[3] = 81; }, "inside_active counts 81 of");
  refused([&](auto& s) { counts(s).used[2] = 1000; }, "of 1000 tokens with expert 2");
  refused([&](auto& s) { s.statistics.layers[1].inside.tokens = 5; }, "expected 2 for each of 5 tokens");
  refused([&](auto& s) { counts(s).active.clear(); }, "profile.blk.1.inside_active is missing");
  refused([&](auto& s) { counts(s) = {6, 16}; }, "16 neurons of an expert, and those of 'mixture' have 32");
}

TEST_F(ExpertProfile, WhatIsOfNeuronsIsRefused) {
  load({});
  ThreadTeam team(1);
  const auto device = cpu::make_reference_device();
  model::Sidecar s = model::Sidecar::empty_for(model_->file(), model_->config());
  ProfileOptions o;
  o.moments = true;
  const auto run = [&] { profile(*model_, *device, *device, team, corpus(), o, s, [](auto&) { return true; }); };
  expect_says(run, "--moments");
  Importance importance;
  o.moments = false, o.importance = &importance;
  expect_says(run, "--importance");
  expect_says([&] { import_powerinfer(dir_.path(), {}, s); }, "mixture of experts");
}

TEST_F(ExpertProfile, PlansPlaceTheMostFrequentExperts) {
  load({.arch = "qwen2moe", .n_ff_shared = 64});
  const model::Sidecar s = profiled();
  const ModelShape shape = shape_of(*model_);
  const Frequencies f = frequencies_of(shape, &s);
  EXPECT_TRUE(f.known);
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    ASSERT_EQ(f.p[l].size(), 7u);
    EXPECT_EQ(f.p[l].back(), 1);  // the shared one
    EXPECT_NEAR(std::accumulate(f.p[l].begin(), f.p[l].end(), 0.0), 3, 1e-9);
    for (size_t e = 0; e < 6; ++e)
      EXPECT_DOUBLE_EQ(f.p[l][e], static_cast<double>(s.statistics.layers[l].active[e]) / 80);
  }
  // A GPU that is worth asking, without room for all.
  PlanRequest r;
  r.n_ctx = 48, r.n_batch = 8;
  r.cost.cpu_bandwidth = 1e6, r.cost.gpu_bandwidth = 1e9, r.cost.handoff_seconds = 1e-7, r.cost.kernel_seconds = 1e-9;
  r.cost.token_seconds = 0;
  r.reserve.context_bytes = r.reserve.margin_bytes = r.reserve.staging_bytes = 0, r.reserve.alignment = 16;
  r.reserve.scratch_bytes = [](const Limits&) { return uint64_t{0}; };
  const Planner planner(shape, f, r);
  const uint64_t least = planner.smallest_budget(), most = planner.largest_useful_budget();
  int divided = 0;
  for (uint64_t budget = least + (most - least) / 4; budget < most; budget += (most - least) / 8) {
    const Plan plan = planner.plan(budget);
    for (size_t l = 0; l < shape.layers.size(); ++l) {
      const std::vector<int32_t>& hot = plan.placement.layers[l].gpu_experts;
      double coldest = 2, hottest = -1;
      for (int32_t e = 0; e < 7; ++e) {
        const double p = f.p[l][static_cast<size_t>(e)];
        if (std::ranges::find(hot, e) != hot.end())
          coldest = std::min(coldest, p);
        else
          hottest = std::max(hottest, p);
      }
      EXPECT_GE(coldest, hottest);
      divided += !hot.empty() && hot.size() < 7 ? 1 : 0;
    }
  }
  EXPECT_GT(divided, 0);
}

}  // namespace
}  // namespace hearth::offline
