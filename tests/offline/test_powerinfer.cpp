// PowerInfer's files: converted to standard GGUF and a sidecar they compute the same, and its choice of hot neurons is
// read and checked.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>

#include "core/error.h"
#include "core/sparse_ffn.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/attach_predictors.h"
#include "model/predictors.h"
#include "model/sidecar.h"
#include "offline/convert/powerinfer.h"
#include "offline/plan/gpu_index.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

using test::message_of;

void make_powerinfer(const std::filesystem::path& path) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.write("PWRI", 4);
}

std::vector<float> logits(model::Model& m) {
  ThreadTeam team(1);
  const auto device = cpu::make_device(team);
  engine::EngineOptions o;
  o.sparsity = engine::Sparsity::off;
  engine::Engine engine(m, *device, o);
  const std::vector<int32_t> ids = {3, 1, 4, 1, 5, 9, 2, 6};
  engine::Sequence text = engine.sequence();
  const auto row = engine.eval(text, ids);
  return {row.begin(), row.end()};
}

class PowerInfer : public testing::Test {
 protected:
  void write(test::TinyGguf m) {
    m.predictor_rank = 32;
    test::write_tiny_gguf(in_, m);
    make_powerinfer(in_);
  }
  std::vector<std::string> convert() {
    std::vector<std::string> notices;
    convert::Options o;
    o.on_notice = [&](std::string_view text) { notices.emplace_back(text); };
    convert::convert_powerinfer(in_, out_, o);
    return notices;
  }
  test::TempDir dir_;
  std::filesystem::path in_ = dir_ / "m.powerinfer.gguf", out_ = dir_ / "m.gguf";
};

TEST_F(PowerInfer, BecomesAStandardFileAndASidecar) {
  for (const DType type : {DType::f32, DType::f16, DType::q8_0}) {
    SCOPED_TRACE(traits(type).name);
    write({.type = type});
    const std::vector<std::string> notices = convert();
    model::Model before = model::Model::load(in_), after = model::Model::load(out_);
    EXPECT_FALSE(after.file().powerinfer());
    EXPECT_EQ(after.config().ffn.activation, "relu");
    EXPECT_EQ(after.file().find_tensor("blk.0.fc1.weight"), nullptr);
    const bool quantised = is_quantized(type);
    EXPECT_EQ(after.file().find_tensor("blk.0.ffn_down.weight") == nullptr, quantised);
    EXPECT_EQ(notices.size(), quantised ? 3u : type == DType::f32 ? 1u : 2u);  // a sidecar is replaced the second time
    EXPECT_FALSE(after.weights().layers[0].predictor.weights);
    ASSERT_TRUE(model::attach_predictors(after, *model::Sidecar::find(after.file(), after.config())));
    for (size_t l = 0; l < before.weights().layers.size(); ++l) {
      const model::LayerPredictor &a = before.weights().layers[l].predictor, &b = after.weights().layers[l].predictor;
      EXPECT_EQ(b.method, "powerinfer");
      EXPECT_EQ(b.input, model::PredictorInput::residual);
      EXPECT_TRUE(b.weights.relu);
      ASSERT_EQ(a.weights.fc1.bytes(), b.weights.fc1.bytes());
      EXPECT_EQ(std::memcmp(a.weights.fc1.data, b.weights.fc1.data, a.weights.fc1.bytes()), 0);
      EXPECT_EQ(std::memcmp(a.weights.fc2.data, b.weights.fc2.data, a.weights.fc2.bytes()), 0);
      EXPECT_EQ(a.weights.threshold.data[7], b.weights.threshold.data[7]);
    }
    const std::vector<float> x = logits(before), y = logits(after);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(x[i], y[i], 1e-4f);
  }
}

TEST_F(PowerInfer, OtherFilesAreRefused) {
  test::write_tiny_gguf(in_, {});
  EXPECT_FALSE(convert::is_powerinfer_file(in_));
  EXPECT_NE(message_of([&] { convert(); }).find("is no PowerInfer file"), std::string::npos);
  EXPECT_FALSE(convert::is_powerinfer_file(dir_.path()));
  write({});
  EXPECT_TRUE(convert::is_powerinfer_file(in_));
  out_ = in_;
  EXPECT_NE(message_of([&] { convert(); }).find("is the input"), std::string::npos);
}

// The active set of fc1 and fc2 computed plainly, token by token, equals what the device names: the golden of the
// file's meaning.
TEST_F(PowerInfer, DevicesNameTheSameNeuronsAsAPlainComputation) {
  for (const DType type : {DType::f32, DType::f16}) {
    write({.type = type});
    const model::Model m = model::Model::load(in_);
    ThreadTeam team(2);
    const auto device = cpu::make_device(team), oracle = cpu::make_reference_device();
    Limits limits;
    limits.max_cols = limits.max_rows = limits.n_ff = 96, limits.n_embd = 32;
    device->reserve(limits), oracle->reserve(limits);
    const Predictor& p = m.weights().layers[1].predictor.weights;
    std::mt19937 rng(8);
    size_t named = 0, all = 0;
    for (int round = 0; round < 50; ++round) {
      std::vector<float> x = test::random_normal(rng, 32);
      std::vector<double> hidden(32), score(96);
      std::vector<float> row(32);
      for (size_t r = 0; r < 32; ++r) {
        traits(type).to_float(p.fc1.row(static_cast<int64_t>(r)), row.data(), 32);
        for (size_t c = 0; c < 32; ++c) hidden[r] += static_cast<double>(row[c]) * static_cast<double>(x[c]);
        hidden[r] = std::max(0.0, hidden[r]);
      }
      for (size_t i = 0; i < 96; ++i) {
        traits(type).to_float(p.fc2.row(static_cast<int64_t>(i)), row.data(), 32);
        for (size_t r = 0; r < 32; ++r) score[i] += static_cast<double>(row[r]) * hidden[r];
      }
      for (Device* d : {device.get(), oracle.get()}) {
        std::vector<int32_t> ids(96);
        int32_t count = 0;
        d->sparse_ffn()->predict(p, Act{x.data(), nullptr}, 1, {.n_own = 96, .own = {ids.data(), &count, 96}});
        std::vector<bool> set(96);
        for (int32_t k = 0; k < count; ++k) set[static_cast<size_t>(ids[static_cast<size_t>(k)])] = true;
        named += static_cast<size_t>(count), all += 96;
        for (size_t i = 0; i < 96; ++i) {
          if (std::fabs(score[i]) < 1e-4) continue;  // rounding decides
          EXPECT_EQ(set[i], score[i] >= 0) << i << " scores " << score[i];
        }
      }
    }
    EXPECT_GT(named, all / 4);
    EXPECT_LT(named, 3 * all / 4);
  }
}

class GpuIndex : public testing::Test {
 protected:
  struct Layer {
    std::vector<int32_t> idx, bucket;  // empty: not written
  };
  std::filesystem::path write(const std::vector<Layer>& layers) {
    const auto path = dir_ / "m.generated.gpuidx";
    gguf::Writer out(path);
    out.set("general.architecture", std::string("generic.gpu_index"));
    std::vector<std::pair<size_t, std::span<const int32_t>>> tensors;
    const auto add = [&](const std::string& name, const std::vector<int32_t>& v) {
      if (!v.empty()) tensors.push_back({out.add_tensor(name, DType::i32, {static_cast<int64_t>(v.size())}), v});
    };
    for (size_t l = 0; l < layers.size(); ++l) {
      add(fmt::format("blk.{}.gpu_idx", l), layers[l].idx);
      add(fmt::format("blk.{}.gpu_bucket", l), layers[l].bucket);
    }
    out.begin();
    for (const auto& [index, values] : tensors) out.write(index, 0, std::as_bytes(values));
    out.finish();
    make_powerinfer_types(path);
    return path;
  }
  // PowerInfer numbers i32 as 18, and its files begin with its own magic.
  static void make_powerinfer_types(const std::filesystem::path& path) {
    std::string bytes;
    {
      std::ifstream in(path, std::ios::binary);
      bytes.assign(std::istreambuf_iterator<char>(in), {});
    }
    for (const char* suffix : {"gpu_idx", "gpu_bucket"}) {
      for (size_t at = bytes.find(suffix); at != std::string::npos; at = bytes.find(suffix, at + 1)) {
        const size_t type = at + std::strlen(suffix) + 4 + 8;  // number of dimensions, one dimension
        ASSERT_EQ(bytes[type], 26);
        bytes[type] = 18;
      }
    }
    bytes.replace(0, 4, "PWRI");
    std::ofstream(path, std::ios::binary) << bytes;
  }
  test::TempDir dir_;
};

TEST_F(GpuIndex, BucketsByLayer) {
  using Buckets = std::vector<std::vector<int32_t>>;
  const Buckets expected = {{1, 3}, {0}, {}};
  EXPECT_EQ(read_gpu_index(write({{{0, 1, 0, 1}, {1, 3}}, {{1, 0, 0, 0}, {}}, {{0, 0, 0, 0}, {}}}), 3, 4), expected);
  EXPECT_EQ(read_gpu_index(write({{{}, {3, 1}}}), 1, 4), (Buckets{{1, 3}}));  // ids alone, in any order
}

TEST_F(GpuIndex, RefusesWhatDoesNotFit) {
  const auto expect = [&](const std::vector<Layer>& layers, int64_t n_layer, const char* part) {
    const std::string message = message_of([&] { read_gpu_index(write(layers), n_layer, 4); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect({{{0, 1, 0, 1, 0}, {}}}, 1, "made for another model");
  expect({{{0, 1, 0, 2}, {}}}, 1, "says 2 of neuron 3");
  expect({{{}, {1, 4}}}, 1, "names neuron 4, expected 0 to 3");
  expect({{{}, {-1}}}, 1, "names neuron -1");
  expect({{{}, {2, 2}}}, 1, "names neuron 2 twice");
  expect({{{0, 1, 0, 1}, {1, 2}}}, 1, "not the 2 of");
  expect({{{0, 1, 0, 1}, {}}}, 2, "has neither blk.1.gpu_idx");
  expect({{{0, 1, 0, 1}, {}}, {{0, 1, 0, 1}, {}}}, 1, "the model 1 layers");
  EXPECT_THROW(read_gpu_index(dir_ / "absent", 1, 4), Error);
}

}  // namespace
}  // namespace hearth::offline
