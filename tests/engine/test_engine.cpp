// What must not change the result: batching, thread count, sparsity, instruction set. And what the engine refuses.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/error.h"
#include "support/conditioning.h"
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
  for (const DType t : test::kWideTypes) all.push_back({test::wide_models()[0], t});
  all.push_back({test::wide_models()[1], DType::q4_k});
  return all;
}

using test::random_ids;

class EngineCases : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (const auto& from = GetParam().model.directory; !from.empty() && !std::filesystem::exists(from)) {
      GTEST_SKIP() << "needs " << GetParam().model.directory << ", which is absent";
    }
    path_ = test::gguf_of(GetParam().model, GetParam().type);
    model_ = model::Model::load(path_);
  }

  // Logits of the last of the ids, on a device of its own.
  std::vector<float> logits(std::span<const int32_t> ids, const EngineOptions& options, int threads, bool one_by_one,
                            std::optional<cpu::Isa> isa = std::nullopt) {
    ThreadTeam team(threads);
    const auto device = isa == cpu::Isa::scalar ? cpu::make_reference_device() : cpu::make_device(team, isa);
    Engine e(*model_, *device, options);
    engine::Sequence text = e.sequence();
    std::span<const float> out;
    if (one_by_one) {
      for (const int32_t& id : ids) out = e.eval(text, {&id, 1});
    } else {
      out = e.eval(text, ids);
    }
    return {out.begin(), out.end()};
  }

  // One way to run a model.
  struct Way {
    std::string name;
    EngineOptions options;
    std::optional<cpu::Isa> isa;
    bool one_by_one = false;  // the prompt too
  };
  std::vector<Way> ways() const {
    std::vector<Way> all = {{"token by token", {.sparsity = Sparsity::off}, {}, true},
                            {"batches of 64", {.n_batch = 64, .sparsity = Sparsity::off}, {}},
                            {"batches of 16", {.n_batch = 16, .sparsity = Sparsity::off}, {}},
                            {"batches of 5", {.n_batch = 5, .sparsity = Sparsity::off}, {}}};
    if (model_->config().ffn.sparse()) {
      all.push_back({"sparse, token by token", {.sparsity = Sparsity::exact}, {}, true});
    }
    for (const cpu::Isa isa : cpu::available_isas()) all.push_back({cpu::to_string(isa), {}, isa});
    return all;
  }
  // Runs scripts in one way; one thread, because results do not depend on their number (see below).
  class Runner {
   public:
    Runner(model::Model& model, const Way& way)
        : one_by_one_(way.one_by_one),
          device_(way.isa == cpu::Isa::scalar ? cpu::make_reference_device() : cpu::make_device(team_, way.isa)),
          engine_(model, *device_, way.options) {}
    // The logits of a script's calls. `one_by_one` splits the first.
    test::Logits operator()(const test::Script& script) {
      if (!one_by_one_) return test::run(engine_, script);
      const test::Script split{script.ids, std::vector<int64_t>(script.ids.size(), 1)};
      test::Logits all = test::run(engine_, split);
      all.erase(all.begin(), all.end() - static_cast<std::ptrdiff_t>(script.calls.size()));
      return all;
    }

   private:
    bool one_by_one_;
    ThreadTeam team_{1};
    std::unique_ptr<Device> device_;
    Engine engine_;
  };
  bool own() const { return GetParam().model.name.starts_with("own_"); }

  std::filesystem::path path_;
  std::optional<model::Model> model_;
};

// However a model is run, it is as near to exact arithmetic as the roundings of its weights' type allow.
TEST_P(EngineCases, EveryWayToRunIsWithinTheRoundings) {
  const size_t n = own() ? 37 : 12;
  const auto script = test::prompt_then_decode(random_ids(model_->config(), n, 1), n - 5);
  test::ErrorLimits limits(path_, script, test::kCpuArithmetic, {});
  limits.expect_not_vacuous();
  for (const Way& way : ways()) limits.expect_within(Runner(*model_, way)(script), way.name);
  limits.print();
}

// On short sequences the error is that of float sums alone, whatever the type: quantised weights too.
TEST_P(EngineCases, EveryWayToRunRoundsAsStated) {
  if (!own()) GTEST_SKIP() << "on the small models alone: larger ones round some value across a boundary in every step";
  for (const std::vector<int64_t>& calls : {std::vector<int64_t>{2, 1}, std::vector<int64_t>{7}}) {
    const test::TightLimit limit(path_, test::kCpuArithmetic, {}, calls, test::kFloatNoise, 7);
    EXPECT_LT(limit.limit(), 2e-3) << "the bound is vacuous";
    for (const Way& way : ways()) {
      Runner run(*model_, way);
      EXPECT_LE(limit.share([&](const test::Script& s) { return run(s); }), 1) << way.name;
    }
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

// Weights that were copied from the file are the same, a tied head too; the device knows what memory they take.
// Also where they are packed when they are copied.
TEST_P(EngineCases, CopiedWeightsGiveTheSameBits) {
  const auto ids = random_ids(model_->config(), 9, 3);
  for (const bool one_by_one : {false, true}) {
    EXPECT_EQ(logits(ids, {.copy_weights = true}, 2, one_by_one), logits(ids, {}, 2, one_by_one));
  }
  ThreadTeam team(1);
  const auto copied_bytes = [&](bool copy) {
    const auto device = cpu::make_device(team);
    const Engine e(*model_, *device, {.sparsity = Sparsity::off, .copy_weights = copy});
    size_t bytes = 0;
    for (const MemoryUse& use : device->memory()) bytes += use.purpose == Purpose::weights ? use.bytes : 0;
    return bytes;
  };
  size_t expected = 0;  // all matrices but an embedding that is not the head, packed or copied; each aligned
  model::Weights all = model_->weights();
  all.for_each_matrix([&](const Matrix& m) {
    const bool is_embedding = &m == &all.tok_embd || &m == &all.pos_embd;
    if (is_embedding || model_->owns(m)) return;
    const bool by_rows = std::any_of(all.layers.begin(), all.layers.end(),
                                     [&](const model::LayerWeights& l) { return &m == &l.ffn.down_t; });
    const size_t packed = by_rows ? 0 : cpu::make_device(team)->packed_bytes(m);
    expected += ((packed > 0 ? packed : m.bytes()) + 63) / 64 * 64;
  });
  EXPECT_EQ(copied_bytes(false), 0u);
  EXPECT_EQ(copied_bytes(true), expected);
}

TEST_P(EngineCases, EvalAllGivesTheLogitsOfEveryPosition) {
  const auto ids = random_ids(model_->config(), 11, 5);
  ThreadTeam team(2);
  const auto device = cpu::make_device(team);
  const test::Script one_by_one{ids, std::vector<int64_t>(ids.size(), 1)};
  test::ErrorLimits limits(path_, one_by_one, test::kCpuArithmetic, {});
  limits.expect_not_vacuous();
  for (const int64_t n_batch : {4, 9}) {
    Engine e(*model_, *device, {.n_batch = n_batch});
    for (const bool every_neuron : {false, true}) {
      engine::Sequence text = e.sequence();
      test::Logits all;
      e.eval_all(
          text, ids,
          [&](int64_t i, std::span<const float> row) {
            EXPECT_EQ(i, static_cast<int64_t>(all.size()));
            all.emplace_back(row.begin(), row.end());
          },
          every_neuron);
      limits.expect_within(all, fmt::format("batches of {}{}", n_batch, every_neuron ? ", every neuron" : ""));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, EngineCases, testing::ValuesIn(cases()),
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
        engine::Sequence text = e.sequence();
        e.eval(text, std::span(ids).first(10));
        EXPECT_THROW(e.eval(text, std::span(ids).first(7)), Error);
        EXPECT_EQ(text.n_past(), 10);
        e.eval(text, std::span(ids).first(6));  // exactly full
        e.eval(text, std::span(ids).first(1));
      },
      {.n_ctx = 16});
  EXPECT_NE(message.find("context is full"), std::string::npos) << message;
}

TEST_F(EngineRefusals, TokenIdsOutOfRange) {
  const int32_t bad[] = {-1, static_cast<int32_t>(model_.config().n_vocab)};
  for (const int32_t& id : bad) {
    const auto message = error_of([&](Engine& e) {
      engine::Sequence text = e.sequence();
      e.eval(text, {&id, 1});
    });
    EXPECT_NE(message.find("out of range"), std::string::npos) << message;
  }
}

TEST_F(EngineRefusals, SillyOptions) {
  EXPECT_NE(error_of([](Engine&) {}, {.n_ctx = -5}).find("context length"), std::string::npos);
  EXPECT_NE(error_of([](Engine&) {}, {.n_batch = 0}).find("batch size"), std::string::npos);
  EXPECT_NE(error_of([](Engine&) {}, {.n_sequences = 0}).find("number of sequences"), std::string::npos);
  EXPECT_NE(error_of([](Engine&) {}, {.sparse_threshold = NAN}).find("threshold"), std::string::npos);
}

}  // namespace
}  // namespace hearth
