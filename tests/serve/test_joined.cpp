// Prompts that share a pass on the CPU have the bits that each has alone: what join_prompts rests on, for every quantised type and
// every instruction set that this machine has.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#include "core/thread_team.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "support/paths.h"
#include "support/random.h"
#include "support/tiny_model.h"
#include "support/types.h"

namespace hearth::test {
namespace {

class Joined : public testing::TestWithParam<std::tuple<cpu::Isa, DType, bool>> {};

TEST_P(Joined, PromptsHaveTheBitsThatTheyHaveAlone) {
  const auto [isa, type, transposed] = GetParam();
  const TempDir dir;
  auto model = model::Model::load(write_tiny_model(
      dir / "m.gguf",
      {.type = type, .transposed_down = transposed, .n_layer = 2, .n_embd = 256, .n_ff = 256, .n_head = 4, .n_head_kv = 2, .n_ctx = 256}));
  ThreadTeam team(1);
  const auto device = cpu::make_device(team, isa);
  engine::Engine engine(model, *device, {.n_ctx = 256, .n_sequences = 16});
  std::mt19937 rng(3);
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>{9, 10, 9}, {17, 33, 12, 65}, {127, 1}, {16, 16, 16, 16, 16, 16, 16, 16}, {100, 9, 19}}) {
    std::vector<std::vector<int32_t>> prompts;
    for (const int64_t n : lengths) {
      prompts.emplace_back();
      for (int64_t i = 0; i < std::max<int64_t>(n, 9); ++i)
        prompts.back().push_back(static_cast<int32_t>(random_int(rng, 0, kTinyVocab - 1)));
    }
    const auto logits_of = [&](int64_t row) {
      const auto logits = engine.logits(row);
      return std::vector<float>(logits.begin(), logits.end());
    };
    std::vector<std::vector<float>> alone;  // behind the prompt, and behind one more token
    for (const auto& ids : prompts) {
      engine::Sequence s = engine.sequence();
      for (const auto& part : {std::span<const int32_t>(ids), std::span<const int32_t>(ids).first(1)}) {
        engine::Batch batch;
        batch.add(s, part);
        engine.eval(batch);
        alone.push_back(logits_of(batch.size() - 1));
      }
    }
    std::vector<engine::Sequence> sequences;
    for (size_t i = 0; i < prompts.size(); ++i) sequences.push_back(engine.sequence());
    engine::Batch joined;
    for (size_t i = 0; i < prompts.size(); ++i) joined.add(sequences[i], prompts[i]);
    engine.eval(joined);
    for (size_t i = 0; i < prompts.size(); ++i) {
      const engine::Batch::Part& part = joined.parts()[i];
      EXPECT_EQ(logits_of(part.first_row + part.n_rows - 1), alone[2 * i]) << "prompt " << i << " of " << prompts.size();
    }
    for (size_t i = 0; i < prompts.size(); ++i) {
      engine::Batch batch;
      batch.add(sequences[i], std::span<const int32_t>(prompts[i]).first(1));
      engine.eval(batch);
      EXPECT_EQ(logits_of(0), alone[2 * i + 1]) << "the cache of prompt " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Joined,
                         testing::Combine(testing::ValuesIn(cpu::available_isas()),
                                          testing::ValuesIn(types_where(std::mem_fn(&DTypeTraits::quantized))),
                                          testing::Bool()),
                         [](const auto& test) {
                           std::string name = std::string(to_string(std::get<0>(test.param))) + "_" +
                                              traits(std::get<1>(test.param)).name +
                                              (std::get<2>(test.param) ? "_transposed" : "");
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace hearth::test
