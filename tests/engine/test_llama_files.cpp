// Files that llama.cpp's quantiser has made: logits against the same weights as floats.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/model.h"
#include "offline/quantize/quantize.h"
#include "support/conditioning.h"
#include "support/paths.h"

namespace hearth {
namespace {

std::filesystem::path llama_dir() {
  return test::data_dir() / "llama";
}

class LlamaFiles : public testing::TestWithParam<std::string> {
 protected:
  std::filesystem::path path_ = llama_dir() / (GetParam() + ".gguf");
  test::TempDir dir_;
  ThreadTeam team_{2};
};

// The oracle has the same logits from both; the device keeps to the limits of its roundings, with a prompt of more than
// a few tokens, then few, then one by one; with weights in the file's layout and in its own.
TEST_P(LlamaFiles, LogitsAreThoseOfTheSameWeightsAsFloats) {
  const auto floats = dir_ / "f32.gguf";
  offline::QuantizeOptions to_f32;
  to_f32.type = DType::f32, to_f32.down = offline::DownLayout::standard, to_f32.allow_requantize = true;
  offline::quantize(path_, floats, to_f32, team_);

  auto model = model::Model::load(path_);
  ASSERT_TRUE(model.quantized());
  test::Script script{test::random_ids(model.config(), 40, 11), {26, 4, 2}};
  script.calls.insert(script.calls.end(), 8, 1);
  test::ErrorLimits limits(path_, script, test::kCpuArithmetic, {.sparsity = engine::Sparsity::off});
  limits.expect_not_vacuous();

  test::NoisyModel as_floats(floats, test::kCpuArithmetic, {.sparsity = engine::Sparsity::off});
  const test::Deviation d = test::deviation(as_floats.run(script, {}, 0), limits.expected());
  EXPECT_LT(*std::max_element(d.worst.begin(), d.worst.end()), 1e-5) << "blocks are read as other values";

  for (const cpu::Isa isa : cpu::available_isas()) {
    const auto device = cpu::make_device(team_, isa);
    for (const bool copy : {false, true}) {
      engine::Engine e(model, *device, {.sparsity = engine::Sparsity::off, .copy_weights = copy});
      limits.expect_within(test::run(e, script), device->name() + (copy ? ", copied" : ""));
    }
  }
  limits.print();
}

std::vector<std::string> files() {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(llama_dir())) {
    if (entry.path().extension() == ".gguf") all.push_back(entry.path().stem().string());
  }
  std::sort(all.begin(), all.end());
  return all;
}
INSTANTIATE_TEST_SUITE_P(OfTests, LlamaFiles, testing::ValuesIn(files()), [](const auto& p) { return p.param; });

}  // namespace
}  // namespace hearth
