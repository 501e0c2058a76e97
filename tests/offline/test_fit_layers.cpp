// Fitting many layers: in groups as room allows, interrupted and taken up again, with the same result every time.
#include <gtest/gtest.h>

#include <fstream>

#include "core/error.h"
#include "cpu/cpu.h"
#include "model/sidecar.h"
#include "offline/predictor/fit_layers.h"
#include "predictor/products.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

constexpr size_t kLayers = 3;

// Counts what happens, and stops when it is told to.
class Script final : public FitListener {
 public:
  void gathering(size_t first, size_t n, const SampleProgress& p) override {
    ++sequences;
    if (groups.empty() || groups.back() != std::pair(first, n)) groups.emplace_back(first, n);
    tokens_before = p.tokens_before;
  }
  void fitted(size_t layer, const ChosenPredictor&) override { layers.push_back(layer); }
  bool keep_going() override { return sequences != stop_after_sequences && layers.size() != stop_after_layers; }
  size_t stop_after_sequences = SIZE_MAX, stop_after_layers = SIZE_MAX;
  size_t sequences = 0;
  int64_t tokens_before = 0;
  std::vector<std::pair<size_t, size_t>> groups;
  std::vector<size_t> layers;
};

class FitLayers : public testing::Test {
 protected:
  void SetUp() override {
    test::write_tiny_gguf(path_, {.n_layer = kLayers});
    model_ = model::Model::load(path_);
    std::mt19937 rng(3);
    for (int d = 0; d < 12; ++d) {
      std::vector<int32_t> ids(40);
      for (int32_t& id : ids) id = static_cast<int32_t>(test::random_int(rng, 0, 63));
      corpus_.sequences.push_back({ids, false});
    }
    corpus_.texts.push_back({"t.txt", "0123456789abcdef", 480});
    plan_.samples.window = 64;
    plan_.fit.recall = 0.95;
    plan_.candidates = {{FitMethod::svd, 32, DType::q8_0}};
    plan_.n_layers = kLayers;
  }
  FitWork work() { return {FitWork::directory_for(dir_ / "m.sparse.gguf"), fit_key(*model_, corpus_, plan_), *model_}; }
  bool run(Script& script) {
    ThreadTeam team(2);
    const auto device = cpu::make_device(team);
    predictor::HostProducts products(*device, team);
    return fit_layers(*model_, corpus_, plan_, work(), {[&] { return cpu::make_device(team); }, products, team},
                      script);
  }
  std::vector<model::PredictorData> results() {
    std::vector<model::PredictorData> all;
    for (size_t l = 0; l < kLayers; ++l) all.push_back(work().load(l));
    return all;
  }
  uint64_t bytes_of_a_layer() { return sample_bytes_per_layer(*model_, corpus_, plan_.samples); }

  test::TempDir dir_;
  std::filesystem::path path_ = dir_ / "tiny.gguf";
  std::optional<model::Model> model_;
  Corpus corpus_;
  FitPlan plan_;
};

void expect_same(const std::vector<model::PredictorData>& a, const std::vector<model::PredictorData>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t l = 0; l < a.size(); ++l) {
    EXPECT_EQ(a[l].method, b[l].method);
    EXPECT_EQ(a[l].input, b[l].input);
    EXPECT_EQ(a[l].fc1.data, b[l].fc1.data);
    EXPECT_EQ(a[l].fc2.data, b[l].fc2.data);
    EXPECT_EQ(a[l].threshold, b[l].threshold);
    EXPECT_EQ(a[l].figures.loss_recall, b[l].figures.loss_recall);
    EXPECT_EQ(a[l].figures.tokens, b[l].figures.tokens);
  }
}

TEST_F(FitLayers, GroupsDoNotChangeTheResult) {
  Script whole;
  ASSERT_TRUE(run(whole));
  EXPECT_EQ(whole.groups, (std::vector<std::pair<size_t, size_t>>{{0, 3}}));
  const auto expected = results();
  EXPECT_EQ(expected[2].method, "svd");
  EXPECT_EQ(expected[2].fc1.rows, 32);
  work().remove();
  EXPECT_FALSE(std::filesystem::exists(work().directory() / "layer-0.gguf"));
  plan_.sample_bytes = 2 * bytes_of_a_layer() + 1;
  Script divided;
  ASSERT_TRUE(run(divided));
  EXPECT_EQ(divided.groups, (std::vector<std::pair<size_t, size_t>>{{0, 2}, {2, 1}}));
  EXPECT_EQ(divided.layers, (std::vector<size_t>{0, 1, 2}));
  EXPECT_FALSE(std::filesystem::exists(work().samples()));
  expect_same(results(), expected);
}

TEST_F(FitLayers, GroupsFromTheResidual) {
  plan_.samples.input = model::PredictorInput::residual;
  Script whole;
  ASSERT_TRUE(run(whole));
  const auto expected = results();
  work().remove();
  plan_.sample_bytes = bytes_of_a_layer();
  Script divided;
  ASSERT_TRUE(run(divided));
  EXPECT_EQ(divided.groups.size(), kLayers);
  expect_same(results(), expected);
}

TEST_F(FitLayers, GoesOnWhereItWasInterrupted) {
  Script whole;
  ASSERT_TRUE(run(whole));
  const auto expected = results();
  const size_t sequences = whole.sequences;
  work().remove();
  plan_.sample_bytes = 2 * bytes_of_a_layer();
  Script gathering;
  gathering.stop_after_sequences = 5;
  EXPECT_FALSE(run(gathering));
  EXPECT_TRUE(gathering.layers.empty());
  Script fitting;
  fitting.stop_after_layers = 1;
  EXPECT_FALSE(run(fitting));
  EXPECT_EQ(fitting.sequences, sequences - 5);
  EXPECT_EQ(fitting.tokens_before, 5 * 40);
  EXPECT_EQ(work().layers_done(), 1u);
  Script rest;
  ASSERT_TRUE(run(rest));
  EXPECT_EQ(rest.layers, (std::vector<size_t>{1, 2}));
  EXPECT_EQ(rest.groups, (std::vector<std::pair<size_t, size_t>>{{2, 1}}));  // the first group's inputs were there
  expect_same(results(), expected);
  Script again;
  ASSERT_TRUE(run(again));
  EXPECT_TRUE(again.layers.empty());
}

TEST_F(FitLayers, WorkForSomethingElseIsThrownAway) {
  Script first;
  first.stop_after_layers = 2;
  EXPECT_FALSE(run(first));
  EXPECT_EQ(work().layers_done(), 2u);
  std::ofstream(work().directory() / "notes") << "mine";
  plan_.fit.recall = 0.9;
  EXPECT_EQ(work().layers_done(), 0u);
  EXPECT_FALSE(std::filesystem::exists(work().samples()));
  plan_.fit.recall = 0.95;
  EXPECT_EQ(work().layers_done(), 0u);
  work().remove();
  EXPECT_TRUE(std::filesystem::exists(FitWork::directory_for(dir_ / "m.sparse.gguf") / "notes"));
}

TEST_F(FitLayers, OnlyTheLayersAskedFor) {
  plan_.first_layer = 1, plan_.n_layers = 1;
  Script one;
  ASSERT_TRUE(run(one));
  EXPECT_EQ(one.groups, (std::vector<std::pair<size_t, size_t>>{{1, 1}}));
  EXPECT_TRUE(work().has(1));
  EXPECT_FALSE(work().has(0));
  const model::PredictorData alone = work().load(1);
  plan_.first_layer = 0, plan_.n_layers = kLayers;
  Script all;
  ASSERT_TRUE(run(all));
  EXPECT_EQ(all.layers, (std::vector<size_t>{0, 2}));
  const model::PredictorData kept = work().load(1);
  EXPECT_EQ(kept.fc2.data, alone.fc2.data);
}

TEST_F(FitLayers, RefusesWhatHasNoRoom) {
  plan_.sample_bytes = bytes_of_a_layer() - 1;
  try {
    layers_at_once(*model_, corpus_, plan_);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("give fewer --tokens"), std::string::npos) << e.what();
  }
}

// Every kind of predictor comes back from its file as it was.
TEST_F(FitLayers, EveryKindIsKeptWhole) {
  plan_.fit.mlp.epochs = 1;
  for (const Candidate& c :
       {Candidate{FitMethod::mlp, 32, DType::f16}, Candidate{FitMethod::gate_bits, 0, DType::q4_0}}) {
    SCOPED_TRACE(c.name());
    plan_.candidates = {c};
    ThreadTeam team(2);
    const auto device = cpu::make_device(team), multiplier = cpu::make_device(team);
    predictor::HostProducts products(*multiplier, team);
    const auto samples =
        gather_samples(*model_, *device, corpus_, plan_.samples, [](const SampleProgress&) { return true; });
    LayerFit fit(*model_, 1, *samples, plan_.fit, products, team);
    const model::PredictorData made = fit.fit(c);
    const FitWork w = work();
    w.keep(1, made);
    const model::PredictorData kept = w.load(1);
    expect_same({made}, {kept});
    EXPECT_EQ(kept.fc1_bias, made.fc1_bias);
    EXPECT_EQ(kept.relu, made.relu);
  }
}

TEST(SampleStore, IsTakenUpByWhomItIsFor) {
  const test::TempDir dir;
  {
    SampleStore store(dir / "s", "one", 1000);
    EXPECT_EQ(store.progress(), 0u);
    store.values()[999] = 77;
    store.set_progress(4);
  }
  {
    SampleStore store(dir / "s", "one", 1000);
    EXPECT_EQ(store.progress(), 4u);
    EXPECT_EQ(store.values()[999], 77);
    EXPECT_EQ(store.bytes(), 2000u);
  }
  EXPECT_EQ(SampleStore(dir / "s", "one", 1001).progress(), 0u);
  SampleStore(dir / "s", "one", 1001).set_progress(3);
  EXPECT_EQ(SampleStore(dir / "s", "two", 1001).progress(), 0u);
  EXPECT_THROW(SampleStore(dir / "none" / "s", "one", 10), Error);
  SampleStore memory(500);
  EXPECT_EQ(memory.values().size(), 500u);
  EXPECT_EQ(memory.values()[499], 0);
}

}  // namespace
}  // namespace hearth::offline
