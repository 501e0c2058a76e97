// Phi-3's long RoPE factors count where the context may be longer than the original one, its short ones elsewhere.
#include <gtest/gtest.h>

#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/paths.h"
#include "support/tiny_model.h"

namespace hearth {
namespace {

TEST(LongRope, TheContextChooses) {
  const test::TempDir dir;
  const auto model = [&](const char* name, const test::TinyModelOptions& options) {
    return model::Model::load(test::write_tiny_model(dir / name, options));
  };
  test::TinyModelOptions plain, halved, both;
  halved.keys = {{"llama.rope.scaling.type", std::string("linear")}, {"llama.rope.scaling.factor", 2.0f}};
  both.keys = {{"llama.rope.scaling.type", std::string("longrope")},
               {"llama.rope.scaling.original_context_length", uint32_t{32}}};
  both.vectors = {{"rope_factors_short.weight", std::vector<float>(8, 1.0f)},
                  {"rope_factors_long.weight", std::vector<float>(8, 2.0f)}};
  auto short_model = model("plain.gguf", plain), long_model = model("halved.gguf", halved),
       either = model("both.gguf", both);
  const auto script = test::prompt_then_decode(test::random_ids(either.config(), 20, 1), 12);
  const auto run = [&](model::Model& m, int64_t n_ctx) {
    const auto device = cpu::make_reference_device();
    engine::Engine e(m, *device, {.n_ctx = n_ctx});
    return test::run(e, script);
  };
  EXPECT_EQ(run(either, 32), run(short_model, 32));
  EXPECT_EQ(run(either, 33), run(long_model, 33));
  EXPECT_NE(run(either, 32), run(either, 33));
}

}  // namespace
}  // namespace hearth
