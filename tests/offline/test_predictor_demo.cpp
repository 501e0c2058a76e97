// What predictors are for, on the demo model: nearly all of the loss kept by few more neurons than are active
// (docs/explanation/predictors.md has the figures over more tokens).
#include <gtest/gtest.h>

#include "core/file.h"
#include "cpu/cpu.h"
#include "offline/convert/convert.h"
#include "offline/predictor/evaluate.h"
#include "offline/predictor/fit.h"
#include "support/paths.h"
#include "text/tokenizer.h"

namespace hearth::offline {
namespace {

constexpr const char* kModel = "models/demo-hf/config.json";

TEST(DemoPredictors, KeepTheLossWithFewNeuronsAndFewBytes) {
  HEARTH_NEEDS_SHARED(kModel);
  const auto shared = test::shared_dir();
  const test::TempDir dir;
  convert::convert_checkpoint(shared / "models/demo-hf", dir / "demo.gguf", {});
  model::Model m = model::Model::load(dir / "demo.gguf");
  const auto tokenizer = text::Tokenizer::load(m.file());
  ThreadTeam team;
  const auto device = cpu::make_device(team), fitting = cpu::make_device(team), dense = cpu::make_device(team),
             sparse = cpu::make_device(team);
  const std::vector<std::filesystem::path> texts = {shared / "text/stories-calibration.txt"};
  const Corpus corpus = read_corpus(texts, *tokenizer, {.window = 256, .heldout_every = 0});
  const Samples samples = *gather_samples(m, *device, corpus, {.max_tokens = 6000, .window = 256},
                                          [](const SampleProgress&) { return true; });
  predictor::HostProducts products(*fitting, team);
  const std::string heldout = read_text_file(shared / "text/stories-heldout.txt").substr(0, 12000);
  const std::vector<int32_t> ids = tokenizer->encode(heldout, {.add_special = false});
  for (const Candidate& c :
       {Candidate{FitMethod::gate_bits, 0, DType::q4_0}, Candidate{FitMethod::svd, 384, DType::q4_0}}) {
    SCOPED_TRACE(c.name());
    std::vector<model::PredictorData> layers;
    for (size_t l = 0; l < m.weights().layers.size(); ++l) {
      LayerFit fit(m, l, samples, {.recall = 0.992}, products, team);
      layers.push_back(fit.fit(c));
    }
    std::vector<model::LayerPredictor> views;
    for (const auto& p : layers) views.push_back(p.view());
    m.set_predictors(views, nullptr);
    const Evaluation e = evaluate_predictors(m, *dense, *sparse, ids, std::nullopt, {.window = 256},
                                             [](const EvaluationProgress&) { return true; });
    predictor::Tally all;
    uint64_t bytes = 0, ffn = 0;
    for (const EvaluatedLayer& l : e.layers) all += l.tally, bytes += l.bytes, ffn += l.ffn_bytes;
    EXPECT_GE(all.loss_recall(), 0.99);
    EXPECT_LT(all.predicted_density(), 1.6 * all.density());
    EXPECT_LT(static_cast<double>(bytes), 0.15 * static_cast<double>(ffn));
    EXPECT_LT(e.comparison.perplexity_increase(), 0.01);
    EXPECT_GT(e.comparison.agreement.mean(), 0.95);
  }
}

}  // namespace
}  // namespace hearth::offline
