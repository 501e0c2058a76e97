// Predictors end to end: made from a model's activations, kept in its sidecar, attached and measured.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/error.h"
#include "cpu/cpu.h"
#include "model/attach_predictors.h"
#include "model/sidecar.h"
#include "offline/predictor/choose.h"
#include "offline/predictor/compare.h"
#include "offline/predictor/evaluate.h"
#include "offline/synth.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

using test::message_of;

using model::PredictorInput;

Corpus corpus_of(int64_t n_vocab, int64_t documents, int64_t length) {
  Corpus c;
  for (int64_t d = 0; d < documents; ++d) {
    c.sequences.push_back({synthetic_text(n_vocab, length, 8, static_cast<uint64_t>(100 + d)), false});
  }
  return c;
}

Samples gather(model::Model& m, const Corpus& corpus, SampleOptions options = {}) {
  ThreadTeam team(2);
  const auto device = cpu::make_device(team);
  options.window = 64;
  return *gather_samples(m, *device, corpus, options, [](const SampleProgress&) { return true; });
}

// Everything fitting needs, with the model.
class Bench {
 public:
  explicit Bench(model::Model& m, int threads = 2)
      : team_(threads), device_(cpu::make_device(team_)), products_(*device_, team_), model_(m) {}
  std::vector<model::PredictorData> fit(const Samples& samples, const Candidate& candidate, const FitOptions& options) {
    std::vector<model::PredictorData> layers;
    for (size_t l = 0; l < model_.weights().layers.size(); ++l) {
      LayerFit layer(model_, l, samples, options, products_, team_);
      layers.push_back(layer.fit(candidate));
    }
    return layers;
  }
  Evaluation evaluate(const std::vector<int32_t>& ids) {
    const auto dense = cpu::make_device(team_), sparse = cpu::make_device(team_);
    return evaluate_predictors(model_, *dense, *sparse, ids, std::nullopt, {.window = 64},
                               [](const EvaluationProgress&) { return true; });
  }
  ThreadTeam& team() { return team_; }
  Products& products() { return products_; }

 private:
  ThreadTeam team_;
  std::unique_ptr<Device> device_;
  predictor::HostProducts products_;
  model::Model& model_;
};

predictor::Tally sum(const Evaluation& e) {
  predictor::Tally all;
  for (const EvaluatedLayer& l : e.layers) all += l.tally;
  return all;
}

// A synthetic model whose gate has rank 48, with its exact predictor of 96 rows.
class SynthModel : public testing::Test {
 protected:
  void SetUp() override {
    SynthOptions o;
    o.shape = find_synth_shape("tiny");
    o.predictor_rank = 96;
    ThreadTeam team(2);
    write_synthetic(path_, o, team);
    model_ = model::Model::load(path_);
    n_vocab_ = o.shape.n_vocab;
  }
  test::TempDir dir_;
  std::filesystem::path path_ = dir_ / "m.gguf";
  std::optional<model::Model> model_;
  int64_t n_vocab_ = 0;
};

TEST_F(SynthModel, ItsOwnPredictorIsExact) {
  Bench bench(*model_);
  const Evaluation e = bench.evaluate(synthetic_text(n_vocab_, 200, 8, 5));
  EXPECT_GE(sum(e).recall(), 0.9995);
  EXPECT_EQ(e.layers[0].method, "powerinfer");
  EXPECT_EQ(e.layers[0].rank, 96);
  EXPECT_GT(sum(e).precision(), 0.999);
  EXPECT_GE(sum(e).loss_recall(), 0.99999);
  EXPECT_LT(e.comparison.kl.mean(), 1e-5);
  EXPECT_GT(sum(e).density(), 0.05);
}

TEST_F(SynthModel, TheFitFindsItAgain) {
  Bench bench(*model_);
  const Samples samples = gather(*model_, corpus_of(n_vocab_, 48, 64));
  const FitOptions options{.recall = 0.99999};
  const auto layers = bench.fit(samples, {FitMethod::svd, 48, DType::f16}, options);
  EXPECT_EQ(layers[0].fc1.rows, 48);
  model::Sidecar sidecar = model::Sidecar::empty_for(model_->file(), model_->config());
  sidecar.new_predictors = layers;
  sidecar.write(model::sidecar_path(path_));
  ASSERT_TRUE(model::attach_predictors(*model_, *model::Sidecar::find(model_->file(), model_->config())));
  const Evaluation e = bench.evaluate(synthetic_text(n_vocab_, 200, 8, 5));
  EXPECT_EQ(e.layers[0].method, "svd");
  EXPECT_GE(sum(e).recall(), 0.995);
  EXPECT_GE(sum(e).loss_recall(), 0.9995);
  EXPECT_GT(sum(e).precision(), 0.9);
  // Half the rank does not do.
  const auto poor = bench.fit(samples, {FitMethod::svd, 16, DType::f16}, options);
  EXPECT_LT(poor[0].figures.precision, 0.7f);
}

class FitTest : public testing::Test {
 protected:
  void load(const test::TinyGguf& shape) {
    test::write_tiny_gguf(path_, shape);
    model_ = model::Model::load(path_);
  }
  Corpus corpus(int64_t documents = 24) const {
    std::mt19937 rng(3);
    Corpus c;
    for (int64_t d = 0; d < documents; ++d) {
      std::vector<int32_t> ids(48);
      for (int32_t& id : ids) id = static_cast<int32_t>(test::random_int(rng, 0, 63));
      c.sequences.push_back({ids, false});
    }
    return c;
  }
  test::TempDir dir_;
  std::filesystem::path path_ = dir_ / "tiny.gguf";
  std::optional<model::Model> model_;
};

TEST_F(FitTest, EveryMethodReachesTheWantedRecall) {
  load({});
  Bench bench(*model_);
  const Samples samples = gather(*model_, corpus());
  FitOptions options{.recall = 0.95};
  options.mlp.epochs = 4;
  for (const Candidate& c :
       {Candidate{FitMethod::svd, 32, DType::q8_0}, Candidate{FitMethod::svd, 16, DType::f16},
        Candidate{FitMethod::mlp, 32, DType::f16}, Candidate{FitMethod::gate_bits, 0, DType::q4_0}}) {
    SCOPED_TRACE(c.name());
    const auto layers = bench.fit(samples, c, options);
    for (const model::PredictorData& p : layers) {
      EXPECT_GE(p.figures.loss_recall, 0.95f);
      EXPECT_LE(p.figures.predicted_density, 1.0f);
      EXPECT_GT(p.figures.density, 0.2f);
      EXPECT_EQ(p.figures.tokens, static_cast<uint64_t>(samples.tokens(Part::validate)));
    }
    std::vector<model::LayerPredictor> views;
    for (const auto& p : layers) views.push_back(p.view());
    model_->set_predictors(views, nullptr);
    std::vector<int32_t> ids;
    for (const Sequence& s : corpus().sequences) ids.insert(ids.end(), s.ids.begin(), s.ids.end());
    const Evaluation e = bench.evaluate(ids);
    EXPECT_GT(sum(e).loss_recall(), 0.93);
    EXPECT_GE(e.comparison.kl.mean(), 0);
    EXPECT_FALSE(evaluation_table(e).empty());
    EXPECT_EQ(evaluation_json(e)["layers"].size(), layers.size());
    EXPECT_EQ(e.layers[1].bytes, model::predictor_bytes(views[1]));
  }
}

// Predicting everything is the dense model.
TEST_F(FitTest, NothingIsLostWhereAllIsPredicted) {
  load({});
  Bench bench(*model_);
  const Samples samples = gather(*model_, corpus(8));
  auto layers = bench.fit(samples, {FitMethod::gate_bits, 0, DType::q4_0}, {});
  std::vector<model::LayerPredictor> views;
  for (auto& p : layers) {
    std::fill(p.threshold.begin(), p.threshold.end(), -INFINITY);
    views.push_back(p.view());
  }
  model_->set_predictors(views, nullptr);
  const Evaluation e = bench.evaluate(corpus(4).sequences[2].ids);
  EXPECT_EQ(sum(e).recall(), 1);
  EXPECT_EQ(sum(e).predicted_density(), 1);
  EXPECT_LT(e.comparison.kl.mean(), 1e-9);
  EXPECT_EQ(e.comparison.agreement.mean(), 1);
}

TEST_F(FitTest, IsDeterministic) {
  load({});
  const auto run = [&](int threads) {
    model::Model m = model::Model::load(path_);
    Bench bench(m, threads);
    FitOptions options;
    options.mlp.epochs = 2;
    const Samples samples = gather(m, corpus(8));
    auto all = bench.fit(samples, {FitMethod::svd, 32, DType::q4_0}, options);
    for (auto& p : bench.fit(samples, {FitMethod::mlp, 16, DType::f16}, options)) all.push_back(std::move(p));
    return all;
  };
  const auto one = run(1), three = run(3);
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].fc1.data, three[i].fc1.data);
    EXPECT_EQ(one[i].fc2.data, three[i].fc2.data);
    EXPECT_EQ(one[i].threshold, three[i].threshold);
    EXPECT_EQ(one[i].figures.loss_recall, three[i].figures.loss_recall);
  }
}

// The residual stream before the norm holds what the normed input does.
TEST_F(FitTest, FromTheResidual) {
  load({.n_layer = 3});
  const auto ratio = [&](PredictorInput input, size_t layer) {
    SampleOptions o;
    o.input = input;
    const Samples samples = gather(*model_, corpus(), o);
    Bench bench(*model_);
    const auto layers = bench.fit(samples, {FitMethod::svd, 32, DType::f16}, {.recall = 0.9});
    EXPECT_EQ(layers[layer].input, input);
    EXPECT_EQ(layers[0].input, input);
    std::vector<model::LayerPredictor> views;
    for (const auto& p : layers) views.push_back(p.view());
    model_->set_predictors(views, nullptr);
    std::vector<int32_t> ids;
    for (const Sequence& s : corpus(6).sequences) ids.insert(ids.end(), s.ids.begin(), s.ids.end());
    EXPECT_GT(bench.evaluate(ids).layers[layer].tally.loss_recall(), 0.85);
    return static_cast<double>(layers[layer].figures.predicted_density / layers[layer].figures.density);
  };
  const double own = ratio(PredictorInput::ffn_input, 2), residual = ratio(PredictorInput::residual, 2);
  EXPECT_LT(own, residual + 0.05);
  EXPECT_LT(residual, 1 / 0.45);  // better than naming everything
}

TEST_F(FitTest, SamplesAreSpreadOverTheCorpus) {
  load({});
  SampleOptions o;
  o.max_tokens = 576;  // 12 of 40 documents
  const Samples samples = gather(*model_, corpus(40), o);
  const int64_t all = samples.tokens(Part::fit) + samples.tokens(Part::calibrate) + samples.tokens(Part::validate);
  EXPECT_EQ(all, 576);
  EXPECT_EQ(samples.tokens(Part::fit), 2 * samples.tokens(Part::validate));
  EXPECT_EQ(samples.bytes(), static_cast<uint64_t>(all) * 2 * 32 * sizeof(f16_t));
  o.only_validate = true;
  EXPECT_EQ(gather(*model_, corpus(40), o).tokens(Part::fit), 0);
}

TEST_F(FitTest, TheCheapestThatReachesTheRecallIsChosen) {
  load({});
  Bench bench(*model_);
  const Samples samples = gather(*model_, corpus());
  LayerFit fit(*model_, 0, samples, {.recall = 0.95}, bench.products(), bench.team());
  const std::vector<Candidate> candidates = {{FitMethod::svd, 32, DType::f16}, {FitMethod::svd, 32, DType::q8_0}};
  const FfnShard& ffn = model_->weights().layers[0].ffn;
  const auto chosen = choose_predictor(fit, candidates, ffn, {}, false, [] { return true; });
  ASSERT_TRUE(chosen);
  EXPECT_EQ(chosen->candidate.type, DType::q8_0);  // the same rank in fewer bytes
  EXPECT_FALSE(choose_predictor(fit, candidates, ffn, {}, false, [] { return false; }));
}

TEST_F(FitTest, RefusesWhatCannotBe) {
  load({});
  EXPECT_NE(message_of([&] { gather(*model_, corpus(3)); }).find("give more text"), std::string::npos);
  Bench bench(*model_);
  EXPECT_NE(message_of([&] { bench.evaluate({1, 2, 3}); }).find("has no predictors"), std::string::npos);
  const Samples samples = gather(*model_, corpus(8));
  LayerFit fit(*model_, 0, samples, {}, bench.products(), bench.team());
  EXPECT_NE(message_of([&] { fit.weights({FitMethod::svd, 64, DType::f16}); }).find("up to 32"), std::string::npos);
  EXPECT_NE(message_of([&] {
              fit.weights({FitMethod::svd, 16, DType::q8_0});
            }).find("multiple of 32"),
            std::string::npos);
  EXPECT_THROW(parse_fit_method("oracle"), Error);
}

TEST_F(FitTest, ComparesCandidates) {
  load({});
  Bench bench(*model_);
  const Samples samples = gather(*model_, corpus());
  SampleOptions o;
  o.only_validate = true;
  std::vector<NamedSamples> texts;
  texts.push_back({"other", gather(*model_, corpus(6), o)});
  const std::vector<Candidate> candidates = {{FitMethod::svd, 32, DType::f16}, {FitMethod::svd, 16, DType::f16}};
  size_t told = 0;
  const auto compared = compare_candidates(*model_, samples, candidates, texts, {}, bench.products(), bench.team(),
                                           [&](size_t, size_t total, const std::string&) { return ++told <= total; });
  ASSERT_TRUE(compared);
  EXPECT_EQ(told, 4u);
  const nlohmann::json j = to_json(*compared, texts);
  EXPECT_LT(j[1]["bytes"].get<int>(), j[0]["bytes"].get<int>());
  const auto ratio = [&](int candidate) {
    return j[static_cast<size_t>(candidate)]["points"][5]["texts"]["other"]["ratio"].get<double>();
  };
  EXPECT_LT(ratio(0), ratio(1));  // the gate's whole rank against half
  const std::string table = markdown_table(j, "other", 0.99);
  EXPECT_NE(table.find("| svd 32 f16 |"), std::string::npos) << table;
  const std::string svg = recall_plot_svg(j, "other", "title");
  EXPECT_NE(svg.find("<polyline points=\""), std::string::npos);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
}

}  // namespace
}  // namespace hearth::offline
