// Plans of a real model's shape: every budget, every condition, and what they say about themselves.
#include <gtest/gtest.h>

#include <numeric>

#include "core/error.h"
#include "engine/page_pool.h"
#include "offline/plan/explain.h"
#include "offline/plan/planner.h"
#include "offline/profile/import.h"
#include "plan_cases.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

using engine::Selection;
using engine::Sparsity;
using engine::Where;
using test::message_of;

constexpr double kGiB = 1024.0 * 1024 * 1024;
uint64_t gib(double n) {
  return static_cast<uint64_t>(n * kGiB);
}

PlanRequest request(Sparsity sparsity = Sparsity::auto_, int64_t n_ctx = 2048) {
  PlanRequest r;
  r.sparsity = sparsity;
  r.n_ctx = n_ctx;
  return r;
}

double rows_on_gpu(const CostModel& c, const LayerReport& l) {
  return c.gpu_reads(c.ffn_kernels, l.ffn.gpu_sparse, c.gpu_sparse(l.ffn.gpu_sparse));
}

// What a plan says about itself must follow from its lists of neurons.
void check_accounts(const Planner& planner, const Plan& plan) {
  const ModelShape& s = planner.shape();
  uint64_t attention = 0, kv = 0, neurons = 0, predictors = 0;
  double hot = 0, all = 0;
  for (size_t l = 0; l < s.layers.size(); ++l) {
    const engine::LayerPlacement& p = plan.placement.layers[l];
    const LayerShape& shape = s.layers[l];
    ASSERT_TRUE(std::is_sorted(p.gpu_bucket.begin(), p.gpu_bucket.end()));
    if (p.attention == Where::gpu) {
      attention += shape.attention_bytes;
      kv += shape.kv_token_bytes * static_cast<uint64_t>(engine::pages_of(plan.placement.n_ctx) * kPagePositions);
    }
    neurons += shape.neuron_bytes() * p.gpu_bucket.size();
    if (p.selection == Selection::predictor && p.predictor == Where::gpu) predictors += shape.predictor_bytes;
    for (const double f : planner.frequencies().p[l]) all += f;
    for (const int32_t id : p.gpu_bucket) hot += planner.frequencies().p[l][static_cast<size_t>(id)];
    EXPECT_EQ(plan.placement.cpu_rows(l, shape.n_ff).size() + p.gpu_bucket.size(), static_cast<size_t>(shape.n_ff));
  }
  // Beyond the tensors themselves: an id per neuron and the alignment of each tensor, less than a thousandth.
  const auto close = [](uint64_t planned, uint64_t tensors) {
    EXPECT_GE(planned, tensors);
    EXPECT_LE(static_cast<double>(planned - tensors), 1e-3 * static_cast<double>(tensors) + 1e5);
  };
  close(plan.gpu.attention, attention);
  close(plan.gpu.neurons, neurons);
  close(plan.gpu.predictors, predictors);
  EXPECT_EQ(plan.gpu.kv_cache, kv);
  EXPECT_NEAR(plan.hit_rate, hot / all, 1e-9);
  EXPECT_LE(plan.gpu.total(), plan.placement.vram_budget);
  EXPECT_EQ(plan.gpu.total(), plan.placement.planned_bytes());
  // Every weight is somewhere.
  const uint64_t weights_on_gpu = plan.placement.planned.empty() ? 0 : plan.placement.planned[0].bytes - plan.gpu.norms;
  EXPECT_GE(weights_on_gpu + plan.host_bytes + plan.gpu.norms + 1000, s.weight_bytes());
}

TEST(Plan, EveryBudgetFromNothingToAll) {
  ModelShape shape = test::llama_7b();
  for (const bool predictor : {false, true}) {
    for (LayerShape& l : shape.layers) l.predictor_bytes = predictor ? 31'000'000 : 0;
    const Planner planner(shape, typical_frequencies(shape, 0.11), request());
    double before = 0;
    const double smallest = static_cast<double>(planner.smallest_budget()) / (1 << 30) + 1e-6;
    for (double budget = smallest; budget <= 15; budget += budget < 1.5 ? 0.25 : 0.75) {
      SCOPED_TRACE(fmt::format("{} GiB, {}", budget, predictor ? "predictor" : "gates"));
      const Plan plan = planner.plan(gib(budget));
      check_accounts(planner, plan);
      EXPECT_LE(plan.bound, plan.seconds);
      // The bound is that of the linear relaxation, which may take a part of one layer's attention (2.3 ms of the
      // token's 30 to 150 on this CPU): no plan can be expected to reach it.
      EXPECT_LE(plan.seconds, plan.bound + 2.3e-3);
      EXPECT_LE(plan.seconds, 1.02 * plan.bound);
      EXPECT_GE(plan.tokens_per_second(), 0.995 * before);
      before = plan.tokens_per_second();
    }
    const Plan all = planner.plan(planner.largest_useful_budget());
    EXPECT_DOUBLE_EQ(all.hit_rate, 1.0);
    EXPECT_EQ(all.traffic.cpu(), 0.0);
    EXPECT_EQ(all.placement.output, Where::gpu);
    EXPECT_FALSE(explain(planner, all).one_more_gib.has_value());
  }
}

TEST(Plan, WithoutAGpu) {
  const ModelShape shape = test::llama_7b();
  const Planner planner(shape, typical_frequencies(shape, 0.11), request());
  const Plan plan = planner.plan(0);
  EXPECT_FALSE(plan.placement.uses_gpu());
  EXPECT_EQ(plan.gpu.total(), 0u);
  EXPECT_EQ(plan.traffic.gpu(), 0.0);
  for (const auto& l : plan.placement.layers) EXPECT_TRUE(l.gpu_bucket.empty());
  // All attention, gates and head, and a ninth of the up and down rows, at the shares of 70 GB/s that kernels reach.
  const double dense =
      static_cast<double>(shape.output_bytes) + 32 * (4.0 * 4096 * 4096 * 2 + 1024.0 * 4096 * 4 + 11008.0 * 8192);
  double rows = 0;
  for (const double p : planner.frequencies().p[0]) rows += 32 * p * 2 * 8192;
  const CostModel planner_cost = request().cost;
  EXPECT_NEAR(plan.seconds,
              32 * planner_cost.cpu_layer_seconds + planner_cost.cpu_dense(dense) + planner_cost.cpu_sparse(rows),
              1e-6);
}

TEST(Plan, DenseFamiliesAndFilesThatCannotBeSplit) {
  ModelShape shape = test::llama_7b();
  shape.sparse_family = false;
  const Planner dense(shape, frequencies_of(shape, nullptr), request());
  const Plan plan = dense.plan(gib(6));
  check_accounts(dense, plan);
  for (const auto& l : plan.layers) EXPECT_EQ(l.choice.selection, Selection::all);
  // Without sparsity a byte on the GPU saves the same wherever it is: nothing is left unused.
  EXPECT_GT(plan.gpu.total(), gib(5.99));

  for (LayerShape& l : shape.layers) l.by_neuron = false;
  const Planner whole(shape, frequencies_of(shape, nullptr), request());
  const Plan coarse = whole.plan(gib(6));
  check_accounts(whole, coarse);
  for (const auto& l : coarse.layers) EXPECT_TRUE(l.choice.hot == 0 || l.choice.hot == l.n_ff);
  EXPECT_GT(coarse.hit_rate, 0.2);
  EXPECT_NE(plan_table(whole, coarse, explain(whole, coarse)).find("hearth quantize"), std::string::npos);
}

TEST(Plan, UngatedGroupedTiedAndUnequal) {
  std::mt19937 rng(4);
  for (int round = 0; round < 40; ++round) {
    const ModelShape shape = test::random_shape(rng, 5, 600);  // also layers too large to be listed neuron by neuron
    const Planner planner(shape, test::random_frequencies(rng, shape), test::random_request(rng));
    for (const double share : {0.0, 0.3, 0.7, 1.0}) {
      const auto budget = planner.smallest_budget() +
                          static_cast<uint64_t>(
                              share * static_cast<double>(planner.largest_useful_budget() - planner.smallest_budget()));
      const Plan plan = planner.plan(budget);
      if (plan.placement.uses_gpu()) check_accounts(planner, plan);
      EXPECT_LE(plan.bound, plan.seconds * (1 + 1e-9));
    }
  }
}

// A rule of thumb to check the machinery against: with predictors, where rows are all that is left to place, the hot
// set is the globally best one: no cold neuron of any layer is more frequent than a hot one by more than a group's
// width.
TEST(Plan, HotSetsAreThoseOfAGlobalSort) {
  ModelShape shape = test::llama_7b();
  for (LayerShape& l : shape.layers) l.predictor_bytes = 31'000'000;
  std::mt19937 rng(6);
  Frequencies f = typical_frequencies(shape, 0.11);
  std::uniform_real_distribution<double> scale(0.6, 1.0);
  for (auto& p : f.p) {
    std::shuffle(p.begin(), p.end(), rng);
    const double s = scale(rng);
    for (double& x : p) x *= s;
  }
  const Planner planner(shape, f, request(Sparsity::predict));
  const Plan plan = planner.plan(gib(9));
  double coldest_hot = 1, hottest_cold = 0;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    const std::vector<int32_t>& hot = plan.placement.layers[l].gpu_bucket;
    // The straightforward computation: sort by frequency, take as many, sort by id.
    std::vector<int32_t> expected(f.p[l].size());
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
      return f.p[l][static_cast<size_t>(a)] > f.p[l][static_cast<size_t>(b)];
    });
    coldest_hot = std::min(coldest_hot, f.p[l][static_cast<size_t>(expected[hot.size() - 1])]);
    hottest_cold = std::max(hottest_cold, f.p[l][static_cast<size_t>(expected[hot.size()])]);
    expected.resize(hot.size());
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ(hot, expected) << "layer " << l;
  }
  EXPECT_GT(plan.hit_rate, 0.6);
  EXPECT_GT(coldest_hot, 0.95 * hottest_cold);
}

// Written from cost_model.h's description. What is foreseen of the CPU's rows, and fetched in the time before, counts a
// third; the GPU reads a second predictor beside its rows.
TEST(Plan, LooksAheadWhereThatPays) {
  ModelShape shape = test::llama_7b();
  for (LayerShape& l : shape.layers) l.predictor_bytes = 31'000'000, l.can_look_ahead = &l != &shape.layers.front();
  const Frequencies f = typical_frequencies(shape, 0.11);
  PlanRequest r = request(Sparsity::predict);
  const CostModel& c = r.cost;
  for (const double budget : {3.0, 6.0, 8.0}) {
    SCOPED_TRACE(budget);
    r.cost.look_ahead = false;
    const Plan without = Planner(shape, f, r).plan(gib(budget));
    r.cost.look_ahead = true;
    const Plan plan = Planner(shape, f, r).plan(gib(budget));
    EXPECT_LT(plan.seconds, without.seconds);
    size_t n_ahead = 0;
    for (size_t l = 0; l < shape.layers.size(); ++l) {
      EXPECT_FALSE(without.placement.layers[l].look_ahead);
      const LayerReport& layer = plan.layers[l];
      EXPECT_EQ(plan.placement.layers[l].look_ahead, layer.choice.look_ahead);
      if (!layer.choice.look_ahead) continue;
      ++n_ahead;
      ASSERT_GT(l, 0u);
      ASSERT_EQ(plan.placement.layers[l].predictor, Where::gpu);
      ASSERT_LT(layer.choice.hot, layer.n_ff);
      const double attention =
          c.on_gpu(c.attention_kernels, layer.attention.gpu_dense, c.gpu_dense(layer.attention.gpu_dense));
      const double predictor = c.gpu_predictor(31e6);
      const double cpu = c.cpu_sparse(layer.ffn.cpu_sparse);
      const double fetched = std::min(c.foreseen_share * cpu, attention + predictor);
      ASSERT_GT(cpu, 0) << "for nothing";
      const double answer = c.handoff_seconds - c.asking_seconds + cpu - fetched + fetched / c.fetched_speedup;
      const double cold = c.asking_seconds + std::max(answer, predictor + c.linked(layer.ffn.link, false));
      EXPECT_NEAR(layer.seconds,
                  attention + predictor + c.ffn_kernels * c.kernel_seconds +
                      c.overlapped(c.gpu_dense(31e6) + rows_on_gpu(c, layer), cold),
                  1e-9 * layer.seconds);
      EXPECT_DOUBLE_EQ(layer.ffn.gpu_dense, 2 * 31e6) << "read twice";
    }
    EXPECT_GT(n_ahead, 0u);
  }
  const Plan all_hot = Planner(shape, f, r).plan(gib(20));
  for (const engine::LayerPlacement& l : all_hot.placement.layers) EXPECT_FALSE(l.look_ahead);
}

// The cold neurons that the GPU reads over the link: of every frequency, a share that makes both sides equally long.
TEST(Plan, LinkedNeuronsBalanceTheCold) {
  ModelShape shape = test::llama_7b();
  for (LayerShape& l : shape.layers) l.predictor_bytes = 31'000'000;
  const Frequencies f = typical_frequencies(shape, 0.11);
  PlanRequest r = request(Sparsity::predict);
  const Plan automatic = Planner(shape, f, r).plan(gib(8));
  r.cost.link_share = 0.0;
  const Plan without = Planner(shape, f, r).plan(gib(8));
  r.cost.link_share = 0.3;
  const Plan given = Planner(shape, f, r).plan(gib(8));
  EXPECT_LT(automatic.seconds, without.seconds);
  EXPECT_LE(automatic.seconds, given.seconds);
  EXPECT_EQ(without.traffic.link, 0);
  for (const LayerReport& l : automatic.layers) {
    const double link = r.cost.linked(l.ffn.link, false);
    EXPECT_NEAR(link, r.cost.handoff_seconds - r.cost.asking_seconds + r.cost.cpu_sparse(l.ffn.cpu_sparse),
                1e-4 * link);
  }
  EXPECT_NEAR(given.traffic.link, 0.3 * (given.traffic.link + given.traffic.cpu_sparse), 1e-6 * given.traffic.link);
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    const engine::LayerPlacement& p = given.placement.layers[l];
    const std::vector<int32_t> cold = given.placement.cpu_rows(l, shape.layers[l].n_ff);
    if (p.gpu_bucket.empty()) continue;
    EXPECT_NEAR(static_cast<double>(p.gpu_linked.size()), 0.3 * static_cast<double>(cold.size()), 1);
    EXPECT_TRUE(std::equal(p.gpu_linked.begin(), p.gpu_linked.end(), cold.begin())) << "the first of the CPU's rows";
    double linked = 0, all = 0;
    for (const int32_t id : p.gpu_linked) linked += f.p[l][static_cast<size_t>(id)];
    for (const int32_t id : cold) all += f.p[l][static_cast<size_t>(id)];
    EXPECT_NEAR(linked / all, 0.3, 0.01);
    EXPECT_TRUE(without.placement.layers[l].gpu_linked.empty());
  }
  for (LayerShape& l : shape.layers) l.copies_linked = true;
  const Plan copied = Planner(shape, f, r).plan(gib(8));
  uint64_t copies = 0;
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    copies += copied.placement.layers[l].gpu_linked.size() * shape.layers[l].neuron_bytes();
  }
  EXPECT_GT(copies, 0);
  EXPECT_EQ(copied.linked_copy_bytes, copies);
  EXPECT_EQ(copied.host_bytes, given.host_bytes + copies);
  // With too little memory for all copies there are fewer, or none; not where their share is given.
  r.host_memory = copied.host_bytes - copies / 2;
  EXPECT_NE(message_of([&] { Planner(shape, f, r).plan(gib(8)); }).find("use a smaller --link-share"),
            std::string::npos);
  r.cost.link_share.reset();
  const Plan fewer = Planner(shape, f, r).plan(gib(8));
  EXPECT_LE(fewer.host_bytes, r.host_memory);
  EXPECT_GT(fewer.link_share, 0);
  EXPECT_LT(fewer.link_share, automatic.link_share);
  EXPECT_GT(fewer.traffic.link, 0);
  r.host_memory = given.host_bytes;
  const Plan none = Planner(shape, f, r).plan(gib(8));
  EXPECT_EQ(none.traffic.link, 0);
  EXPECT_EQ(none.linked_copy_bytes, 0);
  r.host_memory = 0;
  r.cost.link_share = 1.5;
  EXPECT_NE(message_of([&] { Planner(shape, f, r); }).find("expected 0 to 1"), std::string::npos);
}

// Where little is cold, the GPU reads all of it sooner over the link than the CPU hands its sum over: no neuron is the
// CPU's then. With a slow link, or an exchange that takes no time, the CPU keeps its part.
TEST(Plan, TheCpuRestsWhereTheLinkIsSooner) {
  ModelShape shape = test::llama_7b();
  for (LayerShape& l : shape.layers) l.predictor_bytes = 31'000'000;
  const Frequencies f = typical_frequencies(shape, 0.11);
  PlanRequest r = request(Sparsity::predict);
  const uint64_t budget = Planner(shape, f, r).largest_useful_budget() * 199 / 200;
  const auto linked_share = [&](const Plan& plan, size_t l) {
    const engine::LayerPlacement& p = plan.placement.layers[l];
    const auto cold = static_cast<double>(shape.layers[l].n_ff) - static_cast<double>(p.gpu_bucket.size());
    return cold > 0 ? static_cast<double>(p.gpu_linked.size()) / cold : 1;
  };
  const Plan plan = Planner(shape, f, r).plan(budget);
  EXPECT_LT(plan.hit_rate, 1);
  int asking = 0;  // the layer at which the budget ends may have more cold neurons than the others
  for (size_t l = 0; l < shape.layers.size(); ++l) {
    const LayerReport& layer = plan.layers[l];
    const CostModel& c = r.cost;
    if (c.linked(layer.ffn.link + layer.ffn.cpu_sparse, true) >= c.handoff_seconds) {
      ++asking;
      continue;
    }
    EXPECT_DOUBLE_EQ(linked_share(plan, l), 1) << "layer " << l;
    EXPECT_EQ(layer.ffn.cpu_sparse, 0);
    if (layer.choice.hot == layer.n_ff) continue;
    EXPECT_NEAR(layer.seconds,
                c.on_gpu(c.attention_kernels, layer.attention.gpu_dense, c.gpu_dense(layer.attention.gpu_dense)) +
                    c.gpu_predictor(31e6) + c.ffn_kernels * c.kernel_seconds +
                    c.overlapped(rows_on_gpu(c, layer), c.linked(layer.ffn.link, true)),
                1e-9 * layer.seconds);
  }
  EXPECT_LE(asking, 1);
  const uint64_t smaller = budget * 19 / 20;  // which takes more than the embedding
  r.cost.pcie_bandwidth /= 50;
  const Plan slow_link = Planner(shape, f, r).plan(smaller);
  r = request(Sparsity::predict), r.cost.handoff_seconds = 0;
  const Plan quick_cpu = Planner(shape, f, r).plan(smaller);
  for (const Plan* p : {&slow_link, &quick_cpu}) {
    EXPECT_GT(p->traffic.cpu_sparse, 0);
    EXPECT_LT(p->link_share, 1);
  }
}

TEST(Plan, ErrorsSayWhatWouldWork) {
  const ModelShape shape = test::llama_7b();
  const Frequencies f = typical_frequencies(shape, 0.11);
  const Planner planner(shape, f, request());
  const std::string small = message_of([&] { planner.plan(gib(0.5)); });
  EXPECT_NE(small.find("a budget of 0.50 GiB is too small"), std::string::npos) << small;
  // What it advises works.
  const size_t at = small.find("--vram-budget ");
  ASSERT_NE(at, std::string::npos);
  const double advised = std::stod(small.substr(at + 14));
  EXPECT_LT(advised, 1.0);
  EXPECT_NO_THROW(planner.plan(gib(advised)));

  PlanRequest r = request(Sparsity::auto_, 4096);
  r.host_memory = gib(14);
  const Planner tight(shape, f, r);
  EXPECT_NO_THROW(tight.plan(gib(4)));
  const std::string context = message_of([&] { tight.plan(0); });
  EXPECT_NE(context.find("a context of 4096 does not fit"), std::string::npos) << context;
  const size_t c = context.find("-c ");
  ASSERT_NE(c, std::string::npos);
  r.n_ctx = std::stoll(context.substr(c + 3));
  EXPECT_NO_THROW(Planner(shape, f, r).plan(0));
  r.host_memory = gib(8);
  EXPECT_NE(message_of([&] { Planner(shape, f, r).plan(0); }).find("the model does not fit"), std::string::npos);

  ModelShape learned = shape;
  learned.learned_positions = true;
  EXPECT_NE(message_of([&] { Planner(learned, f, request(Sparsity::auto_, 5000)); }).find("use -c 4096"),
            std::string::npos);
  EXPECT_NE(message_of([&] { Planner(shape, f, request(Sparsity::predict)); }).find("needs predictors"),
            std::string::npos);
  r = request();
  r.cost.cpu_bandwidth = 0;
  EXPECT_NE(message_of([&] { Planner(shape, f, r); }).find("bandwidth"), std::string::npos);
  EXPECT_THROW(engine::parse_sparsity("sometimes"), Error);
}

TEST(Plan, SaysWhatAProfileWouldGain) {
  const ModelShape shape = test::llama_7b();
  const Planner planner(shape, frequencies_of(shape, nullptr), request());
  const Plan plan = planner.plan(gib(10));
  const Explanation e = explain(planner, plan);
  ASSERT_TRUE(e.typical_profile_tps.has_value());
  EXPECT_GT(*e.typical_profile_tps, 1.1 * plan.tokens_per_second());
  ASSERT_TRUE(e.one_more_gib.has_value());
  EXPECT_GT(e.one_more_gib->tokens_per_second, plan.tokens_per_second());
  const std::string table = plan_table(planner, plan, e);
  for (const char* part : {"no profile", "one more GiB", "KV cache", "hot neurons", "hit rate", "tok/s", "why"}) {
    EXPECT_NE(table.find(part), std::string::npos) << part;
  }
  const nlohmann::json j = plan_json(planner, plan, e);
  EXPECT_EQ(j["layers"].size(), 32u);
  EXPECT_FALSE(j["profiled"]);
  uint64_t sum = 0;
  for (const auto& [purpose, bytes] : j["gpu_bytes_by_purpose"].items()) sum += bytes.get<uint64_t>();
  EXPECT_EQ(sum, plan.gpu.total());
}

TEST(Plan, ReluLlamaSevenBFromItsRealCounts) {
  HEARTH_NEEDS_SHARED("profiles/relullama-7b-activation");
  const auto directory = test::shared_dir() / "profiles" / "relullama-7b-activation";
  ModelShape shape = test::llama_7b();
  model::Sidecar sidecar(shape.fingerprint, shape.name, shape.config.n_embd, std::vector<int64_t>(32, 11008));
  import_powerinfer(directory, std::nullopt, sidecar);
  const auto counts = read_powerinfer_counts(directory);
  for (const bool predictor : {false, true}) {
    for (LayerShape& l : shape.layers) l.predictor_bytes = predictor ? 1024 * (4096 + 11008) * 2 : 0;
    const Planner planner(shape, frequencies_of(shape, &sidecar), request());
    double before = -1;
    for (const double budget : {4.0, 8.0, 12.0}) {
      const Plan plan = planner.plan(gib(budget));
      check_accounts(planner, plan);
      std::printf("    %s, %2.0f GiB: hit rate %.1f %%, %.1f tok/s, %.0f MB/token on the GPU, %.0f on the CPU\n",
                  predictor ? "predictor" : "exact    ", budget, 100 * plan.hit_rate, plan.tokens_per_second(),
                  plan.traffic.gpu() / 1e6, plan.traffic.cpu() / 1e6);
      // Not the hit rate: other tensors may be worth more than neurons.
      EXPECT_GT(plan.tokens_per_second(), before);
      before = plan.tokens_per_second();
      for (size_t l = 0; l < 32; ++l) {
        // Independent of sorting: a neuron is hot exactly when fewer neurons than the bucket holds go before it.
        const std::vector<int32_t>& bucket = plan.placement.layers[l].gpu_bucket;
        const std::vector<uint64_t>& c = counts[l];
        std::vector<uint64_t> falling = c;
        std::sort(falling.rbegin(), falling.rend());
        std::vector<int32_t> expected;
        const uint64_t least = bucket.empty() ? 0 : falling[bucket.size() - 1];
        auto ties = static_cast<int64_t>(bucket.size()) -
                    std::count_if(c.begin(), c.end(), [&](uint64_t x) { return x > least; });
        for (size_t i = 0; i < c.size() && !bucket.empty(); ++i) {
          if (c[i] > least || (c[i] == least && ties-- > 0)) expected.push_back(static_cast<int32_t>(i));
        }
        ASSERT_EQ(bucket, expected) << "layer " << l;
      }
    }
  }
}

TEST(Plan, OfAFile) {
  const test::TempDir dir;
  test::TinyGguf tiny;
  tiny.predictor_rank = 4, tiny.type = DType::f16;
  test::write_tiny_gguf(dir / "m.gguf", tiny);
  const model::Model m = model::Model::load(dir / "m.gguf");
  const ModelShape s = shape_of(m);
  const uint64_t matrices = (4 * 32 + 96 * 4) * 2u;  // fc1 and fc2
  EXPECT_EQ(s.weight_bytes() + 2 * matrices, m.weight_bytes() + s.small_bytes + 2 * s.layers[0].small_bytes);
  EXPECT_EQ(s.layers[0].gate_bytes, 64u);
  EXPECT_EQ(s.layers[0].up_down_bytes, 128u);
  EXPECT_EQ(s.layers[0].predictor_bytes, matrices + 96 * sizeof(float));  // and a threshold for each neuron
  EXPECT_EQ(s.layers[0].kv_token_bytes, 2 * 2 * 8 * 2u);
  EXPECT_TRUE(s.tied_head);
  EXPECT_TRUE(s.layers[0].by_neuron);
  EXPECT_EQ(s.fingerprint, model::fingerprint(m.file()));

  tiny.type = DType::q8_0, tiny.transposed_down = false, tiny.predictor_rank = 0;
  test::write_tiny_gguf(dir / "q.gguf", tiny);
  const model::Model q = model::Model::load(dir / "q.gguf");
  EXPECT_FALSE(shape_of(q).layers[0].by_neuron);
  EXPECT_EQ(shape_of(q).layers[0].gate_bytes, 34u);
}

}  // namespace
}  // namespace hearth::offline
