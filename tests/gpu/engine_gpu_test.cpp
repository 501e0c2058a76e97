// Whole models on a GPU: against the recorded goldens, against the CPU, in every type, and divided between GPU and CPU.
#include <gtest/gtest.h>

#include <random>

#include "cuda/cuda.h"
#include "engine/engine.h"
#include "support/random.h"
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
    if (!std::filesystem::exists(GetParam().model.directory)) {
      GTEST_SKIP() << "needs " << GetParam().model.directory << ", which is absent";
    }
    path_ = test::gguf_of(GetParam().model, GetParam().type);
  }

  // What test_engine.cpp derives for two correct runs, plus what the GPU rounds besides: prompts multiply
  // activations rounded to f16 on the tensor cores, 2^-11 / sqrt(3) of their rms in each of the 4 products of a layer
  // and the head.
  static double noise(const model::Config& c, DType type) {
    const auto stages = 4.0 * static_cast<double>(c.n_layer) + 1;
    const double f16 = 0x1p-11 * 0.6 * std::sqrt(stages) + 0x1p-12 * static_cast<double>(c.n_layer);
    // bf16 weights multiply bf16 activations;
    if (type == DType::bf16) return 0x1p-8 * 0.6 * std::sqrt(stages);
    return f16 + (is_quantized(type) ? test::quantization_noise(c) : 0.0);
  }
  static void expect_close(std::span<const float> got, std::span<const float> expected, const model::Config& c,
                           DType type, const char* what) {
    ASSERT_LT(noise(c, type), 0.06) << "the bound is vacuous";
    EXPECT_LE(test::worst_difference(got, expected), 5 * noise(c, type) * test::rms(expected)) << what;
  }

  std::filesystem::path path_;
  ThreadTeam team_{2};
};

TEST_P(GpuEngine, AgreesWithTheCpuInPromptsAndDecode) {
  auto on_cpu = model::Model::load(path_);
  auto on_gpu = model::Model::load(path_);
  const model::Config& c = on_cpu.config();
  std::mt19937 rng(3);
  std::vector<int32_t> ids(40);
  for (int32_t& id : ids) id = static_cast<int32_t>(test::random_int(rng, 0, c.n_vocab - 1));
  for (const Sparsity sparsity : {Sparsity::off, Sparsity::auto_}) {
    for (const bool graph : {true, false}) {
      const auto cpu = cpu::make_device(team_);
      const auto gpu = cuda::make_device(0);
      const EngineOptions options{.n_batch = 16, .sparsity = sparsity, .use_graph = graph};
      Engine a(on_cpu, *cpu, options), b(on_gpu, *gpu, options);
      expect_close(b.eval(std::span(ids).first(21)), a.eval(std::span(ids).first(21)), c, GetParam().type, "prompt");
      for (size_t i = 21; i < ids.size(); ++i) {
        const auto next = std::span(ids).subspan(i, 1);
        expect_close(b.eval(next), a.eval(next), c, GetParam().type, graph ? "graph" : "no graph");
      }
    }
  }
}

TEST_P(GpuEngine, GivesTheGoldens) {
  auto model = model::Model::load(path_);
  const auto goldens = test::read_goldens(GetParam().model.directory);
  if (GetParam().type != DType::f16) return;  // other weights than the goldens
  const auto gpu = cuda::make_device(0);
  Engine e(model, *gpu, {});
  double worst = 0;
  for (const auto& g : goldens.cases) {
    e.truncate(0);
    const auto logits = e.eval(g.ids);
    const double bound = test::f16_cache_tolerance(model.config(), test::rms(g.last_logits)) +
                         5 * noise(model.config(), GetParam().type) * test::rms(g.last_logits);
    const double error = test::worst_difference(logits, g.last_logits);
    worst = std::max(worst, error);
    EXPECT_LE(error, bound) << g.prompt;
    if (g.min_greedy_margin <= 2 * bound) continue;
    auto id = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    std::vector<int32_t> greedy;
    while (greedy.size() < g.greedy_ids.size()) {
      greedy.push_back(id);
      id = e.eval_greedy(id);
    }
    EXPECT_EQ(greedy, g.greedy_ids) << g.prompt;
  }
  std::printf("    worst error %.2g\n", worst);
}

TEST_P(GpuEngine, TheSameBitsRunAfterRun) {
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    auto model = model::Model::load(path_);
    const auto gpu = cuda::make_device(0);
    Engine e(model, *gpu, {});
    const std::vector<int32_t> ids = {1, 5, 7, 2, 9, 30, 4};
    e.eval(ids);
    const auto logits = e.eval({&ids[3], 1});
    if (run == 0) first.assign(logits.begin(), logits.end());
    EXPECT_TRUE(std::equal(first.begin(), first.end(), logits.begin())) << run;
  }
}

TEST_P(GpuEngine, DividedWithTheCpuEqualsTheCpuAlone) {
  auto plain = model::Model::load(path_);
  const model::Config& c = plain.config();
  std::mt19937 rng(11);
  for (const double share : {0.0, 0.4, 1.0}) {
    for (const bool graph : {true, false}) {
      auto divided = model::Model::load(path_);
      if (divided.prepare_sparse()) return;  // a quantised file with a standard down projection cannot be divided
      engine::Placement p;
      p.embedding = engine::Where::cpu, p.output = engine::Where::gpu;
      for (int64_t l = 0; l < c.n_layer; ++l) {
        engine::LayerPlacement& layer = p.layers.emplace_back();
        layer.attention = l % 3 == 1 ? engine::Where::cpu : engine::Where::gpu;
        for (int32_t id = 0; id < c.n_ff; ++id) {
          if (std::uniform_real_distribution<>(0, 1)(rng) < share) layer.gpu_bucket.push_back(id);
        }
      }
      const auto cpu = cpu::make_device(team_);
      const auto host = cpu::make_device(team_);
      const auto gpu = cuda::make_device(0);
      const EngineOptions options{.n_batch = 16, .use_graph = graph};
      Engine a(plain, *cpu, options);
      Engine b(divided, *gpu, options, {*host, p, team_});
      const std::vector<int32_t> ids = {1, 5, 7, 2, 9, 30, 4, 8, 21, 3};
      expect_close(b.eval(ids), a.eval(ids), c, GetParam().type, "prompt");
      for (const int32_t& id : ids) expect_close(b.eval({&id, 1}), a.eval({&id, 1}), c, GetParam().type, "decode");
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& m : test::zoo()) {
    for (const DType t : {DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) all.push_back({m, t});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Zoo, GpuEngine, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.model.name + "_" + traits(p.param.type).name; });

}  // namespace
}  // namespace hearth
