// The profiling device changes nothing but the time.
#include "engine/profiling_device.h"

#include "cpu/cpu.h"
#include "engine/engine.h"
#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

TEST(ProfilingDevice, SameLogitsAndEveryOperationCounted) {
  TempDir dir;
  model::Model plain_model = model::Model::load(write_tiny_model(dir / "m.gguf"));
  model::Model profiled_model = model::Model::load(dir / "m.gguf");
  const auto inner = cpu::make_reference_device();
  const auto plain_device = cpu::make_reference_device();
  engine::ProfilingDevice profiler(*inner);
  {
    engine::Engine plain(plain_model, *plain_device, {}), profiled(profiled_model, profiler, {});
    const std::vector<int32_t> prompt = {kTinyThe, 4, 7};
    for (const auto& ids : {prompt, std::vector<int32_t>{9}}) {
      const std::span<const float> expected = plain.eval(ids), logits = profiled.eval(ids);
      EXPECT_TRUE(std::equal(logits.begin(), logits.end(), expected.begin(), expected.end()));
    }
    EXPECT_EQ(profiler.memory().size(), plain_device->memory().size());
  }
  EXPECT_TRUE(profiler.memory().empty()) << "everything was given back";

  std::map<std::string, int64_t> calls;
  for (const auto& row : profiler.rows()) calls[row.operation] = row.calls;
  EXPECT_EQ(calls["ffn_dense 96x64 f32"], 2);   // the prompt, two layers
  EXPECT_EQ(calls["ffn_sparse 96x64 f32"], 2);  // the token
  EXPECT_EQ(calls["matmul 128x64 f32"], 4);     // q, k and v
  EXPECT_EQ(calls["attention"], 4);
  EXPECT_EQ(calls["norm"], 2 * (2 * 2 + 1));
  const auto rows = profiler.rows();
  for (size_t i = 1; i < rows.size(); ++i) EXPECT_GE(rows[i - 1].seconds, rows[i].seconds);
  profiler.reset();
  EXPECT_TRUE(profiler.rows().empty());
}

}  // namespace
}  // namespace hearth::test
