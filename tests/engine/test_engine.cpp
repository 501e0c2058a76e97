// What must not change the result: batching, thread count, sparsity, instruction set. And what the engine refuses.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <random>

#include "core/error.h"
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

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& m : test::zoo()) {
    for (const DType t : {DType::f16, DType::q8_0, DType::q4_0}) all.push_back({m, t});
    if (m.name.starts_with("own_")) {  // the small ones go through every type
      for (const DType t : {DType::f32, DType::bf16}) all.push_back({m, t});
    }
  }
  return all;
}

std::vector<int32_t> random_ids(const model::Config& c, size_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<int32_t> ids(n);
  for (int32_t& id : ids) id = static_cast<int32_t>(test::random_int(rng, 0, c.n_vocab - 1));
  return ids;
}

class EngineCases : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(GetParam().model.directory)) {
      GTEST_SKIP() << "needs " << GetParam().model.directory << ", which is absent";
    }
    model_ = model::Model::load(test::gguf_of(GetParam().model, GetParam().type));
  }

  // Logits of the last of the ids, on a device of its own.
  std::vector<float> logits(std::span<const int32_t> ids, const EngineOptions& options, int threads, bool one_by_one,
                            std::optional<cpu::Isa> isa = std::nullopt) {
    ThreadTeam team(threads);
    const auto device = isa == cpu::Isa::scalar ? cpu::make_reference_device() : cpu::make_device(team, isa);
    Engine e(*model_, *device, options);
    std::span<const float> out;
    if (one_by_one) {
      for (const int32_t& id : ids) out = e.eval({&id, 1});
    } else {
      out = e.eval(ids);
    }
    return {out.begin(), out.end()};
  }

  // Two correct runs differ by float rounding: sqrt(n_ff) 2^-24 in each product, and 2^-11 where it moves a cached key
  // or value across a rounding boundary of f16; with quantised weights by the noise of 8-bit activations.
  double rounding_noise() const {
    const model::Config& c = model_->config();
    return is_quantized(GetParam().type) ? test::quantization_noise(c) : 0x1p-12 * static_cast<double>(c.n_layer);
  }
  void expect_equal_up_to_rounding(std::span<const float> got, std::span<const float> expected,
                                   std::string_view what) const {
    const double scale = test::rms(expected);
    std::vector<float> difference(got.begin(), got.end());
    for (size_t i = 0; i < difference.size(); ++i) difference[i] -= expected[i];
    EXPECT_LE(test::rms(difference), 1.5 * rounding_noise() * scale) << what;
    EXPECT_LE(test::worst_difference(got, expected), 5 * rounding_noise() * scale) << what;  // 5 standard deviations
    EXPECT_LT(rounding_noise(), 0.06) << "the bound is vacuous";
  }

  std::optional<model::Model> model_;
};

TEST_P(EngineCases, BatchedPrefillEqualsTokenByToken) {
  const auto ids = random_ids(model_->config(), 37, 1);
  const auto one_by_one = logits(ids, {.sparsity = Sparsity::off}, 2, true);
  for (const int64_t n_batch : {64, 16, 5}) {  // whole, with tails
    const auto batched = logits(ids, {.n_batch = n_batch, .sparsity = Sparsity::off}, 2, false);
    expect_equal_up_to_rounding(batched, one_by_one, "n_batch " + std::to_string(n_batch));
  }
}

TEST_P(EngineCases, TheThreadCountDoesNotChangeABit) {
  const auto ids = random_ids(model_->config(), 21, 2);
  const auto one = logits(ids, {}, 1, false);
  const auto one_decode = logits(ids, {}, 1, true);
  for (const int threads : {2, 3}) {
    EXPECT_EQ(logits(ids, {}, threads, false), one) << threads;
    EXPECT_EQ(logits(ids, {}, threads, true), one_decode) << threads;
  }
}

class SparseCases : public EngineCases {};

TEST_P(SparseCases, SparseEqualsDense) {
  ASSERT_TRUE(model_->config().ffn.sparse());
  const auto ids = random_ids(model_->config(), 19, 3);
  const auto dense = logits(ids, {.sparsity = Sparsity::off}, 2, true);
  const auto sparse = logits(ids, {.sparsity = Sparsity::exact}, 2, true);
  expect_equal_up_to_rounding(sparse, dense, "sparse");
}

TEST_P(EngineCases, EveryInstructionSetAgreesWithTheOracle) {
  const auto ids = random_ids(model_->config(), 17, 4);
  for (const bool one_by_one : {false, true}) {
    const auto oracle = logits(ids, {}, 1, one_by_one, cpu::Isa::scalar);
    for (const cpu::Isa isa : cpu::available_isas()) {
      if (isa == cpu::Isa::scalar) continue;
      const auto simd = logits(ids, {}, 2, one_by_one, isa);
      expect_equal_up_to_rounding(simd, oracle,
                                  std::string(cpu::to_string(isa)) + (one_by_one ? " decode" : " prefill"));
    }
  }
}

TEST_P(EngineCases, EvalAllGivesTheLogitsOfEveryPosition) {
  const auto ids = random_ids(model_->config(), 11, 5);
  ThreadTeam team(2);
  const auto device = cpu::make_device(team);
  Engine e(*model_, *device, {.n_batch = 4});
  std::vector<std::vector<float>> all;
  e.eval_all(ids, [&](int64_t i, std::span<const float> row) {
    EXPECT_EQ(i, static_cast<int64_t>(all.size()));
    all.emplace_back(row.begin(), row.end());
  });
  ASSERT_EQ(all.size(), ids.size());
  e.truncate(0);
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto row = e.eval({&ids[i], 1});
    expect_equal_up_to_rounding(all[i], row, "position " + std::to_string(i));
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, EngineCases, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.model.name + "_" + traits(p.param.type).name; });

std::vector<Case> sparse_cases() {
  std::vector<Case> all = cases();
  std::erase_if(all, [](const Case& c) { return c.model.name.find("silu") != std::string::npos; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Zoo, SparseCases, testing::ValuesIn(sparse_cases()),
                         [](const auto& p) { return p.param.model.name + "_" + traits(p.param.type).name; });

class EngineRefusals : public testing::Test {
 protected:
  EngineRefusals() : model_(model::Model::load(test::gguf_of(test::zoo().front(), DType::f16))) {}
  std::string error_of(const std::function<void(Engine&)>& f, const EngineOptions& options = {}) {
    try {
      Engine e(model_, *device_, options);
      f(e);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  model::Model model_;
  std::unique_ptr<Device> device_ = cpu::make_reference_device();
};

TEST_F(EngineRefusals, AFullContextIsAnErrorAndChangesNothing) {
  const auto ids = random_ids(model_.config(), 20, 6);
  const auto message = error_of(
      [&](Engine& e) {
        e.eval(std::span(ids).first(10));
        EXPECT_THROW(e.eval(std::span(ids).first(7)), Error);
        EXPECT_EQ(e.n_past(), 10);
        e.eval(std::span(ids).first(6));  // exactly full
        e.eval(std::span(ids).first(1));
      },
      {.n_ctx = 16});
  EXPECT_NE(message.find("context is full"), std::string::npos) << message;
}

TEST_F(EngineRefusals, TokenIdsOutOfRange) {
  const int32_t bad[] = {-1, static_cast<int32_t>(model_.config().n_vocab)};
  for (const int32_t& id : bad) {
    EXPECT_NE(error_of([&](Engine& e) { e.eval({&id, 1}); }).find("out of range"), std::string::npos);
  }
}

TEST_F(EngineRefusals, SillyOptions) {
  EXPECT_NE(error_of([](Engine&) {}, {.n_ctx = -5}).find("context length"), std::string::npos);
  EXPECT_NE(error_of([](Engine&) {}, {.n_batch = 0}).find("batch size"), std::string::npos);
  EXPECT_NE(error_of([](Engine&) {}, {.sparse_threshold = NAN}).find("threshold"), std::string::npos);
}

}  // namespace
}  // namespace hearth
