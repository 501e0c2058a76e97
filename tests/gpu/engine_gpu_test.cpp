// Whole models on a GPU, in every type: against exact arithmetic within the roundings' measured reach, against the
// oracle with the very same roundings, against the recorded goldens, and divided between GPU and CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <thread>
#include <utility>

#include "cuda/cuda.h"
#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/greedy.h"
#include "support/predictors.h"
#include "support/zoo.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::Sparsity;

struct Case {
  test::ZooModel model;
  DType type;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.model.name << "/" << traits(c.type).name; }
};

class GpuEngine : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
    if (const auto& from = GetParam().model.directory; !from.empty() && !std::filesystem::exists(from)) {
      GTEST_SKIP() << "needs " << from << ", which is absent";
    }
    path_ = test::gguf_of(GetParam().model, GetParam().type);
  }
  bool own() const { return GetParam().model.name.starts_with("own_"); }
  // Every dense or sparse, recorded or step by step way to run on the GPU, one after the other.
  template <typename Visit>
  void for_each_way(Visit&& visit) {
    for (const Sparsity sparsity : {Sparsity::off, Sparsity::auto_}) {
      for (const bool graph : {true, false}) {
        auto model = model::Model::load(path_);
        const auto gpu = cuda::make_device(0);
        Engine e(model, *gpu, {.n_batch = 16, .sparsity = sparsity, .use_graph = graph});
        visit(e, std::string(engine::to_string(e.sparsity())) + (graph ? ", graph" : ", step by step"));
      }
    }
  }

  std::filesystem::path path_;
  ThreadTeam team_{2};
};

TEST_P(GpuEngine, PromptsAndDecodeAreWithinTheRoundings) {
  const auto config = model::Model::load(path_).config();
  const size_t n = own() ? 40 : 24;
  const auto script = test::prompt_then_decode(test::random_ids(config, n, 3), n - 11);
  test::ErrorLimits limits(path_, script, test::kGpuArithmetic, {.n_batch = 16});
  limits.expect_not_vacuous();
  for_each_way([&](Engine& e, const std::string& way) { limits.expect_within(test::run(e, script), way); });
  limits.print();
}

// Against the oracle with the roundings that the kernels are said to do: what is left is the order of float sums.
TEST_P(GpuEngine, RoundsAsStated) {
  if (!own()) GTEST_SKIP() << "on the small models alone: larger ones round some value across a boundary in every step";
  // Sums over four-bit rows carry their offset of 8 to the end, which takes bits of the result (cuda/format.cuh).
  const double noise = (GetParam().type == DType::q4_0 ? 2 : 1) * test::kFloatNoise;
  for (const std::vector<int64_t>& calls : {std::vector<int64_t>{2, 1}, std::vector<int64_t>{9, 1}}) {
    const test::TightLimit limit(path_, test::kGpuArithmetic, {.n_batch = 16}, calls, noise);
    for_each_way([&](Engine& e, const std::string& way) {
      const double share = limit.share([&](const test::Script& s) { return test::run(e, s); });
      EXPECT_LE(share, 1) << way << ", prompt of " << calls[0];
      if (way == "off, graph")
        std::printf("    prompt of %d: limit %.2g, share %.2f\n", static_cast<int>(calls[0]), limit.limit(), share);
    });
  }
}

// The recorded logits are those of the checkpoint's own weights: what a type's weights differ from them by is measured
// with the oracle, without a GPU; the GPU may add its roundings.
TEST_P(GpuEngine, GivesTheGoldens) {
  if (GetParam().model.directory.empty()) GTEST_SKIP() << "a random model has none";
  auto model = model::Model::load(path_);
  const auto goldens = test::read_goldens(GetParam().model.directory);
  const auto gpu = cuda::make_device(0);
  Engine e(model, *gpu, {});
  double worst = 0, share = 0, worst_of_weights = 0;
  for (const auto& g : goldens.cases) {
    const test::Script prompt{g.ids, {static_cast<int64_t>(g.ids.size())}};
    const test::ErrorLimits limits(path_, prompt, test::kGpuArithmetic, {});
    const double of_weights = test::golden_error(limits.expected()[0], g);
    const double bound = limits.worst(0) + of_weights;
    const auto prompt_error = [&] {  // its sequence ends here: the greedy text needs the cache's pages
      engine::Sequence text = e.sequence();
      return test::golden_error(e.eval(text, g.ids), g);
    };
    const double error = prompt_error();
    EXPECT_LE(error, bound) << g.prompt;
    // Bounds at later positions are not measured: twice this one, on either side.
    if (!is_quantized(GetParam().type)) test::expect_greedy(e, g, 4 * bound);
    worst = std::max(worst, error), share = std::max(share, error / bound);
    worst_of_weights = std::max(worst_of_weights, of_weights);
  }
  std::printf("    worst error %.2g (share of its bound %.2f); of the weights' type alone %.2g\n", worst, share,
              worst_of_weights);
}

TEST_P(GpuEngine, TheSameBitsRunAfterRun) {
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    auto model = model::Model::load(path_);
    const auto gpu = cuda::make_device(0);
    Engine e(model, *gpu, {});
    const std::vector<int32_t> ids = {1, 5, 7, 2, 9, 30, 4};
    engine::Sequence text = e.sequence();
    e.eval(text, ids);
    const auto logits = e.eval(text, {&ids[3], 1});
    if (run == 0) first.assign(logits.begin(), logits.end());
    EXPECT_TRUE(std::equal(first.begin(), first.end(), logits.begin())) << run;
  }
}

TEST_P(GpuEngine, DividedWithTheCpuIsWithinTheRoundings) {
  const auto config = model::Model::load(path_).config();
  const auto script = test::prompt_then_decode(test::random_ids(config, own() ? 20 : 14, 11), 10);
  test::ErrorLimits limits(path_, script, test::kDividedArithmetic, {.n_batch = 16});
  std::mt19937 rng(11);
  struct Way {
    double hot;
    bool predicts = false;  // which neurons are active
    double linked = 1.0;    // neurons from here on are read over the link
  };
  for (const Way& way : {Way{0.0}, Way{0.4}, Way{1.0}, Way{0.4, true, 0.7}, Way{0.4, true, 0.4}}) {
    for (const bool graph : {true, false}) {
      auto divided = model::Model::load(path_);
      if (divided.prepare_sparse()) return;  // a quantised file with a standard down projection cannot be divided
      if (way.predicts && !config.ffn.sparse()) continue;
      if (way.predicts) test::add_predictors(divided, model::PredictorInput::ffn_input);
      engine::Placement p;
      p.embedding = engine::Where::cpu, p.output = engine::Where::gpu;
      for (int64_t l = 0; l < config.n_layer; ++l) {
        engine::LayerPlacement& layer = p.layers.emplace_back();
        layer.attention = l % 3 == 1 ? engine::Where::cpu : engine::Where::gpu;
        for (int32_t id = 0; id < config.n_ff; ++id) {
          const double at = std::uniform_real_distribution<>(0, 1)(rng);
          if (at < way.hot) layer.gpu_bucket.push_back(id);
          if (way.predicts && at >= way.linked) layer.gpu_linked.push_back(id);
        }
        if (way.predicts) layer.selection = engine::Selection::predictor, layer.predictor = engine::Where::gpu;
      }
      const auto host = cpu::make_device(team_);
      const auto gpu = cuda::make_device(0);
      Engine e(divided, *gpu, {.n_batch = 16, .use_graph = graph}, {*host, p, team_});
      limits.expect_within(test::run(e, script),
                           "share of hot neurons " + std::to_string(way.hot) + (way.predicts ? ", predicted" : ""));
    }
  }
  limits.print();
}

// What the device says it took for a whole model, a prompt and recorded steps is what the driver says. In a process of
// its own (as ctest runs it) that includes the context.
TEST(GpuMemory, OfAWholeModelIsAccountedWithin64MiB) {
  std::string why;
  if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
  static bool first_in_process = true;
  if (!std::exchange(first_in_process, false)) GTEST_SKIP() << "the context is there already";
  const size_t free_before = cuda::list_gpus()[0].free_bytes;
  const auto gpu = cuda::make_device(0);
  const auto expect_accounted = [&](const char* when) {
    size_t counted = 0;
    for (const MemoryUse& u : gpu->memory()) counted += u.bytes;
    constexpr double kMiB = 1 << 20;
    const double taken = static_cast<double>(free_before - cuda::list_gpus()[0].free_bytes) / kMiB;
    EXPECT_LT(std::fabs(taken - static_cast<double>(counted) / kMiB), 64) << when;
    std::printf("    %s: taken %.1f MiB, counted %.1f MiB\n", when, taken, static_cast<double>(counted) / kMiB);
  };
  expect_accounted("the context");
  auto model = model::Model::load(test::source_dir() / "models" / "hearth-demo.gguf");
  Engine e(model, *gpu, {});
  expect_accounted("a model");
  engine::Sequence text = e.sequence();
  e.eval(text, test::random_ids(model.config(), 1, 1));
  expect_accounted("a first step");
  e.eval(text, test::random_ids(model.config(), 300, 1));
  expect_accounted("a prompt");
  for (const int32_t& id : test::random_ids(model.config(), 20, 2)) e.eval(text, {&id, 1});
  for (size_t n = 2; n <= kFewTokens; ++n) e.eval(text, test::random_ids(model.config(), n, 3));
  expect_accounted("recorded steps");
}

// What plans count is what the device takes, but for the last granule that the driver hands out.
TEST(GpuMemory, OfScratchAndActivationsIsKnownBefore) {
  std::string why;
  const auto gpus = cuda::list_gpus(&why);
  if (gpus.empty()) GTEST_SKIP() << "needs a GPU: " << why;
  auto model = model::Model::load(test::source_dir() / "models" / "hearth-demo.gguf");
  const model::Config& c = model.config();
  constexpr size_t kGranule = 2 << 20;
  for (const int64_t n_batch : {1, 100, 512}) {
    const auto gpu = cuda::make_device(0);
    const Engine e(model, *gpu, {.n_ctx = 512, .n_batch = n_batch});
    const auto taken = [&](Purpose purpose) {
      size_t bytes = 0;
      for (const MemoryUse& u : gpu->memory()) bytes += u.purpose == purpose ? u.bytes : 0;
      return bytes;
    };
    const auto shape = engine::ActivationShape::of(512, 1, n_batch, model.quantized());
    const size_t activations = engine::Activations::bytes(c, shape, [](int64_t n) { return cuda::q8_bytes(n); });
    EXPECT_LE(activations, taken(Purpose::activations));
    EXPECT_GT(activations + kGranule, taken(Purpose::activations));
    const size_t planned = cuda::scratch_bytes(gpus[0], engine::limits_of(c, 512, n_batch, model.quantized()));
    EXPECT_LE(planned, taken(Purpose::scratch));
    EXPECT_GT(planned + kGranule + (1 << 20), taken(Purpose::scratch)) << "and the mailboxes' counters";
  }
}

// Negative log-likelihoods of a text's tokens, in windows that start afresh.
std::vector<double> token_losses(Engine& e, std::span<const int32_t> ids, size_t window) {
  std::vector<double> losses;
  for (size_t first = 0; first + window <= ids.size(); first += window) {
    engine::Sequence sequence = e.sequence();
    const auto text = ids.subspan(first, window);
    e.eval_all(sequence, text, [&](int64_t i, std::span<const float> logits) {
      if (static_cast<size_t>(i) + 1 == text.size()) return;
      const double top = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (const float v : logits) sum += std::exp(v - top);
      losses.push_back(top + std::log(sum) - logits[static_cast<size_t>(text[static_cast<size_t>(i) + 1])]);
    });
  }
  return losses;
}

// The demo model on real text: rounding moves single losses either way, so their mean difference from the CPU's must be
// what chance leaves of it (4 standard errors, measured on these very tokens), and the perplexity the same to 0.2 %.
TEST(GpuDemo, PerplexityIsTheCpus) {
  std::string why;
  if (cuda::list_gpus(&why).empty()) GTEST_SKIP() << "needs a GPU: " << why;
  const char* text = "models/demo-hf/val_ids.u16";
  HEARTH_NEEDS_SHARED(text);
  std::ifstream in(test::shared_dir() / text, std::ios::binary);
  std::vector<uint16_t> raw(8 * 512);
  in.read(reinterpret_cast<char*>(raw.data()), static_cast<std::streamsize>(raw.size() * sizeof(uint16_t)));
  ASSERT_TRUE(in.good());
  const std::vector<int32_t> ids(raw.begin(), raw.end());
  const auto path = test::source_dir() / "models" / "hearth-demo.gguf";
  auto on_cpu = model::Model::load(path), on_gpu = model::Model::load(path);
  ThreadTeam team(static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u)));
  const auto cpu = cpu::make_device(team);
  const auto gpu = cuda::make_device(0);
  Engine a(on_cpu, *cpu, {}), b(on_gpu, *gpu, {});
  const auto expected = token_losses(a, ids, 512), got = token_losses(b, ids, 512);
  const auto n = static_cast<double>(got.size());
  double mean = 0, square = 0, loss = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = got[i] - expected[i];
    mean += d / n, square += d * d / n, loss += expected[i] / n;
  }
  EXPECT_LE(std::fabs(mean), 4 * std::sqrt(square / n));
  EXPECT_LE(std::fabs(mean), 0.002);
  std::printf("    perplexity %.4f on the CPU, %.4f on the GPU, %d tokens\n", std::exp(loss), std::exp(loss + mean),
              static_cast<int>(n));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  std::vector<test::ZooModel> models = test::zoo();
  models.push_back({"shared_demo_hf", test::shared_dir() / "models" / "demo-hf"});
  for (const auto& m : models) {
    for (const DType t : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
      if (t != DType::f32 || m.name.starts_with("own_")) all.push_back({m, t});
    }
  }
  for (const DTypeTraits& t : all_traits()) {  // rows of whole super-blocks
    if (t.quantized()) all.push_back({test::wide_models()[0], t.type});
  }
  all.push_back({test::wide_models()[1], DType::q4_k});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Zoo, GpuEngine, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.model.name + "_" + traits(p.param.type).name; });

}  // namespace
}  // namespace hearth
