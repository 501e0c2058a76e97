// Batches of 1 to 8 tokens, of one sequence or several: each token's results have the bits that it has alone, on every
// device, divided, and whatever of the neurons is computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <random>
#include <utility>

#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/divisions.h"
#include "support/predictors.h"
#include "support/zoo.h"

namespace hearth {
namespace {

using engine::Batch;
using engine::Engine;
using engine::EngineOptions;
using engine::Sequence;
using engine::Sparsity;
using test::copy_of;
using test::random_ids;
using test::random_int;

struct Case {
  test::ZooModel model;
  DType type;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.model.name << "/" << traits(c.type).name; }
};

class FewTokens : public testing::TestWithParam<Case> {
 protected:
  struct Mode {
    const char* name;
    Sparsity sparsity;
    std::optional<model::PredictorInput> predictor = std::nullopt;
  };

  void SetUp() override {
    if (const auto& from = GetParam().model.directory; !from.empty() && !std::filesystem::exists(from)) {
      GTEST_SKIP() << "needs " << from << ", which is absent";
    }
    model_ = model::Model::load(test::gguf_of(GetParam().model, GetParam().type));
    for (size_t s = 0; s < 3; ++s) texts_.push_back(random_ids(model_->config(), 9 + s, static_cast<uint32_t>(s)));
    if (model_->prepare_sparse()) return modes_.push_back({"off", Sparsity::off});
    modes_ = {{"off", Sparsity::off}, {"exact", Sparsity::exact}};
    if (!model_->config().ffn.sparse()) return;
    modes_.push_back({"predict", Sparsity::predict, model::PredictorInput::ffn_input});
    modes_.push_back({"predict from x", Sparsity::predict, model::PredictorInput::residual});
  }
  // Visits every mode that the model has.
  template <typename Visit>
  void for_each_mode(Visit&& visit) {
    for (const Mode& mode : modes_) {
      SCOPED_TRACE(mode.name);
      if (mode.predictor) test::add_predictors(*model_, *mode.predictor);
      visit(EngineOptions{.n_batch = 16, .n_sequences = 3, .sparsity = mode.sparsity}, mode.predictor.has_value());
    }
  }

  // Logits of every token of a text, evaluated one by one.
  static test::Logits alone(Engine& e, std::span<const int32_t> ids) {
    test::Logits all;
    Sequence text = e.sequence();
    for (const int32_t& id : ids) all.push_back(copy_of(e.eval(text, {&id, 1})));
    return all;
  }

  // All texts side by side, in batches of 1 to 8 tokens: each token's logits have the bits that they have alone, its
  // best successor is theirs, and as many neurons are counted.
  void expect_same_bits(Engine& e) {
    std::vector<test::Logits> expected;
    const engine::DensityStats before = e.density();
    for (const auto& ids : texts_) expected.push_back(alone(e, ids));
    const engine::DensityStats between = e.density();
    std::vector<Sequence> sequences;
    for (size_t s = 0; s < texts_.size(); ++s) sequences.push_back(e.sequence(fmt::format("text {}", s)));
    std::mt19937 rng(17);
    const auto left = [&](size_t s) { return std::ssize(texts_[s]) - sequences[s].n_past(); };
    for (;;) {
      std::vector<size_t> open;
      for (size_t s = 0; s < texts_.size(); ++s) {
        if (left(s) > 0) open.push_back(s);
      }
      if (open.empty()) break;
      std::shuffle(open.begin(), open.end(), rng);
      open.resize(static_cast<size_t>(random_int(rng, 1, std::ssize(open))));
      Batch batch;
      std::vector<std::pair<size_t, size_t>> rows;  // text and token
      for (const size_t s : open) {
        const auto first = static_cast<size_t>(sequences[s].n_past());
        const int64_t n = std::min({left(s), random_int(rng, 1, kFewTokens), kFewTokens - batch.size()});
        if (n == 0) continue;
        batch.add(sequences[s], std::span(texts_[s]).subspan(first, static_cast<size_t>(n)), engine::Logits::all);
        for (size_t i = 0; i < static_cast<size_t>(n); ++i) rows.emplace_back(s, first + i);
      }
      e.eval(batch);
      for (size_t r = 0; r < rows.size(); ++r) {
        const auto& [s, token] = rows[r];
        const std::vector<float>& logits = expected[s][token];
        const std::vector<float> got = copy_of(e.logits(static_cast<int64_t>(r)));
        EXPECT_TRUE(got == logits) << "token " << token << " of text " << s << " in a batch of " << rows.size()
                                   << ": differs by up to " << test::worst_difference(got, logits);
        EXPECT_EQ(e.best(static_cast<int64_t>(r)), std::max_element(logits.begin(), logits.end()) - logits.begin());
      }
      if (HasFailure()) return;
    }
    const engine::DensityStats one_by_one = between.since(before), together = e.density().since(between);
    EXPECT_EQ(together.steps, one_by_one.steps);
    EXPECT_EQ(together.active, one_by_one.active);
    EXPECT_EQ(together.active_on_host, one_by_one.active_on_host);
    EXPECT_EQ(together.active_linked, one_by_one.active_linked);
  }

  // The same for every way to divide the model between the oracle and a host.
  template <typename MakeHost>
  void expect_same_bits_divided(MakeHost&& make_host) {
    if (model_->prepare_sparse()) GTEST_SKIP() << "its down projections are not transposed";
    std::mt19937 rng(7);
    for_each_mode([&](const EngineOptions& options, bool predict) {
      for (const test::Division& d : test::divisions()) {
        SCOPED_TRACE(d.name);
        const engine::Placement placement = test::placement_of(d, *model_, predict, rng);
        const auto main = cpu::make_reference_device(), host = make_host();
        Engine e(*model_, *main, options, {*host, placement, team_});
        expect_same_bits(e);
      }
    });
  }

  std::optional<model::Model> model_;
  std::vector<Mode> modes_;
  std::vector<std::vector<int32_t>> texts_;
  ThreadTeam team_{1};
};

TEST_P(FewTokens, HaveTheBitsThatEachHasAloneOnTheOracle) {
  for_each_mode([&](const EngineOptions& options, bool) {
    const auto device = cpu::make_reference_device();
    Engine e(*model_, *device, options);
    expect_same_bits(e);
  });
}

TEST_P(FewTokens, HaveTheBitsThatEachHasAloneOnTheCpu) {
  for_each_mode([&](const EngineOptions& options, bool) {
    for (const cpu::Isa isa : cpu::available_isas()) {
      SCOPED_TRACE(cpu::to_string(isa));
      const auto device = cpu::make_device(team_, isa);
      Engine e(*model_, *device, options);
      expect_same_bits(e);
    }
  });
}

TEST_P(FewTokens, HaveTheBitsThatEachHasAloneDividedBetweenOracles) {
  expect_same_bits_divided([] { return cpu::make_reference_device(); });
}

TEST_P(FewTokens, HaveTheBitsThatEachHasAloneDividedWithTheCpu) {
  expect_same_bits_divided([&] { return cpu::make_device(team_); });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& m : test::zoo()) {
    if (test::is_todays(m)) all.push_back({m, DType::q8_0});
    if (m.name == "shared_gemma2") all.push_back({m, DType::f16});  // norms after the halves, divided
    if (!m.name.starts_with("own_")) continue;
    for (const DType t : {DType::f16, DType::q8_0, DType::q4_0}) all.push_back({m, t});
  }
  all.push_back({test::wide_models()[1], DType::q4_k});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Zoo, FewTokens, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.model.name + "_" + traits(p.param.type).name; });

}  // namespace
}  // namespace hearth
