// offline::quantize: values against conversions done one by one here, layouts of down, types, metadata, and every
// refusal.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "core/error.h"
#include "gguf/gguf.h"
#include "model/model.h"
#include "model/predictors.h"
#include "model/sidecar.h"
#include "offline/quantize/quantize.h"
#include "support/paths.h"
#include "support/random.h"
#include "support/tiny_gguf.h"
#include "support/tiny_mixture.h"

namespace hearth {
namespace {

using offline::DownLayout;
using offline::QuantizeOptions;
using offline::QuantizeReport;

constexpr int64_t kEmbd = 96, kFf = 224, kVocab = 50;

// A file in memory: what the tests put in, as floats.
struct Source {
  std::map<std::string, gguf::Value> keys;
  struct Tensor {
    std::string name;
    std::vector<int64_t> ne;
    DType type;
    std::vector<float> values;
  };
  std::vector<Tensor> tensors;

  Tensor& at(const std::string& name) {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& t) { return t.name == name; });
  }
};

// The tensors of a small ReGLU model; values are exact in bf16 and f16, so that every 16-bit form has the same floats.
Source relu_model(DType type, bool tied = false, const std::string& activation = "relu") {
  std::mt19937 rng(7);
  Source s;
  s.keys["general.architecture"] = std::string("llama");
  s.keys["hearth.ffn.activation"] = activation;
  s.keys["general.name"] = std::string("tiny");
  s.keys["tokenizer.ggml.tokens"] = gguf::Array(std::vector<std::string>{"a", "b"});
  const auto add = [&](std::string name, std::vector<int64_t> ne, DType t) {
    int64_t n = 1;
    for (const int64_t d : ne) n *= d;
    std::vector<float> values = test::random_normal(rng, static_cast<size_t>(n), 0.1f);
    for (float& v : values) v = f16_to_f32(f32_to_f16(bf16_to_f32(f32_to_bf16(v))));
    s.tensors.push_back({std::move(name), std::move(ne), t, std::move(values)});
  };
  add("token_embd.weight", {kEmbd, kVocab}, type);
  add("blk.0.attn_norm.weight", {kEmbd}, DType::f32);
  add("blk.0.attn_q.weight", {kEmbd, kEmbd}, type);
  add("blk.0.attn_q.bias", {kEmbd}, type);
  add("blk.0.ffn_gate.weight", {kEmbd, kFf}, type);
  add("blk.0.ffn_up.weight", {kEmbd, kFf}, type);
  add("blk.0.ffn_down.weight", {kFf, kEmbd}, type);
  if (!tied) add("output.weight", {kEmbd, kVocab}, type);
  return s;
}

std::vector<std::byte> encode(DType type, const std::vector<float>& values, int64_t cols) {
  std::vector<std::byte> out(values.size() / static_cast<size_t>(cols) * row_bytes(type, cols));
  for (size_t r = 0; r < values.size() / static_cast<size_t>(cols); ++r) {
    traits(type).from_float(values.data() + r * static_cast<size_t>(cols), out.data() + r * row_bytes(type, cols),
                            cols);
  }
  return out;
}

std::vector<float> transposed(const std::vector<float>& m, int64_t cols) {
  const int64_t rows = static_cast<int64_t>(m.size()) / cols;
  std::vector<float> t(m.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) t[static_cast<size_t>(c * rows + r)] = m[static_cast<size_t>(r * cols + c)];
  }
  return t;
}

void write(const Source& s, const std::filesystem::path& path) {
  gguf::Writer writer(path);
  for (const auto& [key, value] : s.keys) writer.set(key, value);
  for (const Source::Tensor& t : s.tensors) writer.add_tensor(t.name, t.type, t.ne);
  writer.begin();
  for (size_t i = 0; i < s.tensors.size(); ++i)
    writer.write(i, 0, encode(s.tensors[i].type, s.tensors[i].values, s.tensors[i].ne[0]));
  writer.finish();
}

std::vector<std::byte> bytes_of(const std::filesystem::path& path) {
  const MappedFile file(path);
  return {file.bytes().begin(), file.bytes().end()};
}

class Quantize : public testing::Test {
 protected:
  QuantizeReport run(const Source& s, const QuantizeOptions& options, int threads = 2) {
    write(s, in_);
    return run_file(options, threads);
  }
  QuantizeReport run_file(const QuantizeOptions& options, int threads = 2) {
    ThreadTeam team(threads);
    return offline::quantize(in_, out_, options, team);
  }
  std::string error_of(const Source& s, const QuantizeOptions& options) {
    try {
      run(s, options);
      return {};
    } catch (const Error& e) {
      EXPECT_FALSE(std::filesystem::exists(out_)) << "a failed run leaves no output";
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
      return e.what();
    }
  }
  // The tensor of the output is of this type and shape and holds exactly these values in it.
  void expect_tensor(const std::string& name, DType type, const std::vector<int64_t>& ne,
                     const std::vector<float>& values) {
    const gguf::File file = gguf::File::open(out_);
    const gguf::TensorInfo* t = file.find_tensor(name);
    ASSERT_NE(t, nullptr) << name;
    EXPECT_EQ(t->traits->name, std::string(traits(type).name)) << name;
    EXPECT_EQ(t->ne, ne) << name;
    EXPECT_TRUE(std::ranges::equal(file.data(*t), encode(type, values, ne[0]))) << name;
  }
  bool has(const std::string& name) { return gguf::File::open(out_).find_tensor(name) != nullptr; }

  test::TempDir dir_;
  std::filesystem::path in_ = dir_ / "in.gguf", out_ = dir_ / "out.gguf";
};

TEST_F(Quantize, EveryPairOfTypes) {
  for (const DType from : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType to : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
      SCOPED_TRACE(fmt::format("{} to {}", traits(from).name, traits(to).name));
      Source s = relu_model(from);
      QuantizeOptions options;
      options.type = to;
      const QuantizeReport report = run(s, options);
      EXPECT_TRUE(report.down_transposed);
      EXPECT_EQ(report.n_down, 1);
      EXPECT_TRUE(report.fallbacks.empty());
      EXPECT_EQ(report.bytes_out, std::filesystem::file_size(out_));
      for (const std::string name :
           {"token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_gate.weight", "output.weight"}) {
        expect_tensor(name, to, s.at(name).ne, s.at(name).values);
      }
      expect_tensor("blk.0.attn_norm.weight", DType::f32, {kEmbd}, s.at("blk.0.attn_norm.weight").values);
      expect_tensor("blk.0.attn_q.bias", DType::f32, {kEmbd}, s.at("blk.0.attn_q.bias").values);
      expect_tensor("blk.0.ffn_down_t.weight", to, {kEmbd, kFf}, transposed(s.at("blk.0.ffn_down.weight").values, kFf));
      EXPECT_FALSE(has("blk.0.ffn_down.weight"));
    }
  }
}

TEST_F(Quantize, ThreadCountDoesNotMatter) {
  const Source s = relu_model(DType::f32);
  run(s, {}, 1);
  const auto one = bytes_of(out_);
  run(s, {}, 5);
  EXPECT_EQ(bytes_of(out_), one);
}

TEST_F(Quantize, MetadataIsCopiedAndFileTypeIsSet) {
  Source s = relu_model(DType::f16);
  s.keys["general.file_type"] = uint32_t{1};
  s.keys["general.alignment"] = uint32_t{256};
  QuantizeOptions options;
  options.type = DType::q4_0;
  run(s, options);
  const gguf::File file = gguf::File::open(out_);
  EXPECT_EQ(file.require<uint32_t>("general.file_type"), 2u);  // llama.cpp's LLAMA_FTYPE_MOSTLY_Q4_0
  EXPECT_EQ(file.require<uint32_t>("general.quantization_version"), 2u);
  EXPECT_EQ(file.require<std::string>("general.name"), "tiny");
  EXPECT_EQ(file.require<std::vector<std::string>>("tokenizer.ggml.tokens"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(file.alignment(), 256u);
  EXPECT_EQ(file.metadata().size(), s.keys.size() + 1);
}

TEST_F(Quantize, DownLayouts) {
  struct Case {
    const char* activation;
    DownLayout asked;
    bool transposed;
  };
  for (const Case& c : {Case{"relu", DownLayout::automatic, true}, Case{"relu2", DownLayout::automatic, true},
                        Case{"drelu", DownLayout::automatic, true}, Case{"silu", DownLayout::automatic, false},
                        Case{"silu", DownLayout::transposed, true}, Case{"relu", DownLayout::standard, false}}) {
    SCOPED_TRACE(fmt::format("{} {}", c.activation, static_cast<int>(c.asked)));
    Source s = relu_model(DType::f16, false, c.activation);
    QuantizeOptions options;
    options.down = c.asked;
    EXPECT_EQ(run(s, options).down_transposed, c.transposed);
    EXPECT_EQ(has("blk.0.ffn_down_t.weight"), c.transposed);
    EXPECT_EQ(has("blk.0.ffn_down.weight"), !c.transposed);
  }
}

// Experts' down projections, stacked or one tensor each, and a shared expert's: where that is asked for, and back.
TEST_F(Quantize, ExpertsAreTransposedWhenAsked) {
  for (const auto form : {test::TinyMixtureOptions::Form::stacked, test::TinyMixtureOptions::Form::one_tensor_each}) {
    test::TinyMixtureOptions tiny{.form = form, .arch = "smallthinker", .n_ff_shared = 64};
    test::write_tiny_mixture(in_, tiny);
    QuantizeOptions options;
    options.type = DType::f32;
    EXPECT_FALSE(run_file(options).down_transposed);
    options.down = DownLayout::transposed;
    EXPECT_TRUE(run_file(options).down_transposed);
    tiny.transposed_down = true;
    const auto expected = model::Model::load(test::write_tiny_mixture(dir_ / "transposed.gguf", tiny));
    const auto made = model::Model::load(out_);
    for (size_t l = 0; l < 3; ++l) {
      for (size_t e = 0; e < 7; ++e) {
        const Matrix &a = made.weights().layers[l].experts[e].ffn.down_t,
                     &b = expected.weights().layers[l].experts[e].ffn.down_t;
        ASSERT_TRUE(a && b && a.rows == b.rows && a.cols == b.cols);
        ASSERT_EQ(std::memcmp(a.data, b.data, a.bytes()), 0) << "layer " << l << ", expert " << e;
      }
    }
    std::filesystem::rename(out_, in_);
    options.down = DownLayout::standard;
    EXPECT_FALSE(run_file(options).down_transposed);
    EXPECT_TRUE(has(form == test::TinyMixtureOptions::Form::stacked ? "blk.1.ffn_down_exps.weight"
                                                                    : "blk.1.ffn_down.3.weight"));
    tiny.transposed_down = false;
    const auto again = model::Model::load(out_);
    const auto first = model::Model::load(test::write_tiny_mixture(dir_ / "standard.gguf", tiny));
    const Matrix &a = again.weights().layers[2].experts[6].ffn.down, &b = first.weights().layers[2].experts[6].ffn.down;
    ASSERT_TRUE(a && b);
    EXPECT_EQ(std::memcmp(a.data, b.data, b.bytes()), 0);
  }
}

TEST_F(Quantize, TransposedInputGoesBothWays) {
  Source s = relu_model(DType::f16, false, "silu");
  Source::Tensor& down = s.at("blk.0.ffn_down.weight");
  const std::vector<float> original = down.values;
  down = {"blk.0.ffn_down_t.weight", {kEmbd, kFf}, DType::f16, transposed(original, kFf)};
  s.tensors.push_back({"blk.0.ffn_down_t.bias", {kEmbd}, DType::f32, std::vector<float>(kEmbd, 0.5f)});
  EXPECT_TRUE(run(s, {}).down_transposed);  // as the input has it, whatever the activation
  expect_tensor("blk.0.ffn_down_t.weight", DType::q8_0, {kEmbd, kFf}, transposed(original, kFf));
  QuantizeOptions options;
  options.down = DownLayout::standard;
  run(s, options);
  expect_tensor("blk.0.ffn_down.weight", DType::q8_0, {kFf, kEmbd}, original);
  expect_tensor("blk.0.ffn_down.bias", DType::f32, {kEmbd}, std::vector<float>(kEmbd, 0.5f));
  EXPECT_FALSE(has("blk.0.ffn_down_t.bias"));
}

TEST_F(Quantize, EmbeddingAndHeadTypes) {
  Source s = relu_model(DType::f32);
  QuantizeOptions options;
  options.type = DType::q4_0;
  options.embedding_type = DType::f16;
  options.head_type = DType::q8_0;
  run(s, options);
  expect_tensor("token_embd.weight", DType::f16, {kEmbd, kVocab}, s.at("token_embd.weight").values);
  expect_tensor("output.weight", DType::q8_0, {kEmbd, kVocab}, s.at("output.weight").values);
  EXPECT_NE(error_of((std::filesystem::remove(out_), relu_model(DType::f32, true)), options).find("tied"),
            std::string::npos);
}

TEST_F(Quantize, PredictorTypes) {
  constexpr int64_t kRank = 64;
  Source s = relu_model(DType::f16);
  std::mt19937 rng(8);
  for (const auto& [name, cols, rows] :
       {std::tuple{"blk.0.fc1.weight", kEmbd, kRank}, {"blk.0.fc2.weight", kRank, kFf}}) {
    std::vector<float> values = test::random_normal(rng, static_cast<size_t>(cols * rows), 0.1f);
    for (float& v : values) v = f16_to_f32(f32_to_f16(v));
    s.tensors.push_back({name, {cols, rows}, DType::f16, std::move(values)});
  }
  const auto expect_types = [&](DType predictors, DType others) {
    expect_tensor("blk.0.fc1.weight", predictors, {kEmbd, kRank}, s.at("blk.0.fc1.weight").values);
    expect_tensor("blk.0.fc2.weight", predictors, {kRank, kFf}, s.at("blk.0.fc2.weight").values);
    expect_tensor("blk.0.attn_q.weight", others, {kEmbd, kEmbd}, s.at("blk.0.attn_q.weight").values);
  };
  QuantizeOptions options;
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    options.type = type, options.predictor_type = {};
    run(s, options);
    expect_types(type == DType::q4_0 ? DType::q8_0 : type, type);
    options.predictor_type = DType::q4_0;
    run(s, options);
    expect_types(DType::q4_0, type);
  }
  // What has four bits already keeps them.
  std::filesystem::rename(out_, in_);
  options.predictor_type = {};
  run_file(options);
  expect_types(DType::q4_0, DType::q4_0);
}

TEST_F(Quantize, PredictorsOfASidecar) {
  const std::filesystem::path path = dir_ / "tiny.gguf", smaller = dir_ / "smaller.sparse.gguf";
  test::write_tiny_gguf(path, {});
  const model::Model model = model::Model::load(path);
  const model::Config& c = model.config();
  std::mt19937 rng(9);
  const auto matrix = [&](int64_t rows, int64_t cols) {
    const std::vector<float> values = test::random_normal(rng, static_cast<size_t>(rows * cols));
    return model::OwnedMatrix::from(values.data(), rows, cols, DType::f16);
  };
  model::Sidecar sidecar = model::Sidecar::empty_for(model.file(), c);
  sidecar.new_predictors.resize(static_cast<size_t>(c.n_layer));
  for (model::PredictorData& p : sidecar.new_predictors) {
    p.method = "svd", p.fc1 = matrix(32, c.n_embd), p.fc2 = matrix(c.n_ff, 32);
    p.fc1_bias = test::random_normal(rng, 32);
    p.threshold = test::random_normal(rng, static_cast<size_t>(c.n_ff));
  }
  sidecar.write(in_);
  QuantizeOptions options;
  options.type = DType::f16, options.predictor_type = DType::q8_0;
  run_file(options);
  std::filesystem::rename(out_, smaller);
  const model::Sidecar read = *model::Sidecar::find(model.file(), c, smaller);
  const auto stored = model::read_predictors(*read.file, read.n_embd, read.n_ff);
  ASSERT_EQ(stored.size(), sidecar.new_predictors.size());
  for (size_t l = 0; l < stored.size(); ++l) {
    const Predictor &got = stored[l].predictor.weights, want = sidecar.new_predictors[l].view().weights;
    EXPECT_EQ(got.fc1.type, DType::q8_0);
    EXPECT_EQ(got.fc2.type, DType::q8_0);
    const auto floats = [](const Vector& v) { return std::vector<float>(v.data, v.data + v.n); };
    EXPECT_EQ(floats(got.fc1_bias), floats(want.fc1_bias));
    EXPECT_EQ(floats(got.threshold), floats(want.threshold));
  }
}

TEST_F(Quantize, QuantisedInput) {
  QuantizeOptions q8;
  run(relu_model(DType::f32), q8);
  const auto once = bytes_of(out_);
  std::filesystem::rename(out_, in_);

  EXPECT_EQ(run_file(q8).n_converted, 0);  // the same type is a copy, bit for bit
  EXPECT_EQ(bytes_of(out_), once);
  std::filesystem::remove(out_);

  QuantizeOptions q4;
  q4.type = DType::q4_0;
  ThreadTeam team(1);
  const auto message = [&](const QuantizeOptions& options) -> std::string {
    try {
      offline::quantize(in_, out_, options, team);
    } catch (const Error& e) {
      return e.what();
    }
    return {};
  };
  EXPECT_NE(message(q4).find("quantised already (q8_0)"), std::string::npos);
  QuantizeOptions standard;
  standard.down = DownLayout::standard;
  EXPECT_NE(message(standard).find("needs requantising"), std::string::npos);

  // With permission: dequantised values, converted. The transposed file turned back needs whole blocks of its columns.
  const gguf::File source = gguf::File::open(in_);
  const gguf::TensorInfo* down = source.find_tensor("blk.0.ffn_down_t.weight");
  std::vector<float> values(static_cast<size_t>(kEmbd * kFf));
  traits(DType::q8_0).to_float(source.data(*down).data(), values.data(), kEmbd * kFf);
  standard.type = DType::q4_0;
  standard.allow_requantize = true;
  EXPECT_EQ(message(standard), "");
  expect_tensor("blk.0.ffn_down.weight", DType::q4_0, {kFf, kEmbd}, transposed(values, kEmbd));
}

TEST_F(Quantize, RowsThatAreNoWholeBlocksStayWide) {
  Source s = relu_model(DType::f32);
  s.tensors.push_back({"blk.0.odd.weight", {40, 3}, DType::f32, std::vector<float>(120, 0.25f)});
  s.tensors.push_back({"blk.0.odd_h.weight", {40, 3}, DType::bf16, std::vector<float>(120, 0.25f)});
  const QuantizeReport report = run(s, {});
  EXPECT_EQ(report.fallbacks.size(), 2u);
  expect_tensor("blk.0.odd.weight", DType::f16, {40, 3}, s.at("blk.0.odd.weight").values);
  expect_tensor("blk.0.odd_h.weight", DType::bf16, {40, 3}, s.at("blk.0.odd_h.weight").values);
}

TEST_F(Quantize, OtherTensorsPass) {
  Source s = relu_model(DType::f16);
  s.tensors.push_back({"position_embd.weight", {kEmbd, 4}, DType::f16, std::vector<float>(kEmbd * 4, 0.5f)});
  s.tensors.push_back({"blk.0.attn_q_norm.weight", {32, 2}, DType::f32, std::vector<float>(64, 1.5f)});
  run(s, {});
  expect_tensor("position_embd.weight", DType::f16, {kEmbd, 4}, s.at("position_embd.weight").values);
  expect_tensor("blk.0.attn_q_norm.weight", DType::f32, {32, 2}, s.at("blk.0.attn_q_norm.weight").values);
}

TEST_F(Quantize, ValuesThatDoNotFit) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (const char* name : {"blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight"}) {
      Source s = relu_model(DType::f32);
      s.at(name).values[77] = bad;
      s.at("blk.0.attn_norm.weight").type = DType::bf16;  // so that it is converted, too
      const std::string error = error_of(s, {});
      EXPECT_NE(error.find("not finite"), std::string::npos) << error;
      EXPECT_NE(error.find(name), std::string::npos) << error;
    }
  }
  struct Case {
    DType type;
    float fits, does_not;
  };
  for (const Case& c : {Case{DType::f16, 65504.0f, 65520.0f}, Case{DType::q8_0, 127 * 65504.0f, 127 * 65530.0f},
                        Case{DType::q4_0, 8 * 65504.0f, 8 * 65530.0f}}) {
    SCOPED_TRACE(traits(c.type).name);
    QuantizeOptions options;
    options.type = c.type;
    Source s = relu_model(DType::f32);
    s.at("blk.0.ffn_up.weight").values[0] = c.does_not;
    EXPECT_NE(error_of(s, options).find("cannot hold"), std::string::npos);
    s.at("blk.0.ffn_up.weight").values[0] = c.fits;
    EXPECT_EQ(error_of(s, options), "");
    std::filesystem::remove(out_);
  }
}

TEST_F(Quantize, TinyValuesGiveFiniteBlocks) {
  Source s = relu_model(DType::f32);
  for (float& v : s.at("blk.0.ffn_up.weight").values) v = 1e-44f;
  for (const DType type : {DType::q8_0, DType::q4_0}) {
    QuantizeOptions options;
    options.type = type;
    run(s, options);
    const gguf::File file = gguf::File::open(out_);
    std::vector<float> row(kEmbd);
    traits(type).to_float(file.data(*file.find_tensor("blk.0.ffn_up.weight")).data(), row.data(), kEmbd);
    EXPECT_EQ(row, std::vector<float>(kEmbd, 0.0f));
  }
}

TEST_F(Quantize, InputIsNeverOverwritten) {
  write(relu_model(DType::f16), in_);
  const auto before = bytes_of(in_);
  ThreadTeam team(1);
  EXPECT_THROW(offline::quantize(in_, in_, {}, team), Error);
  std::filesystem::create_symlink(in_, dir_ / "link.gguf");
  EXPECT_THROW(offline::quantize(in_, dir_ / "link.gguf", {}, team), Error);
  std::filesystem::create_hard_link(in_, dir_ / "hard.gguf");
  EXPECT_THROW(offline::quantize(in_, dir_ / "hard.gguf", {}, team), Error);
  EXPECT_EQ(bytes_of(in_), before);
}

TEST_F(Quantize, PathsThatDoNotWork) {
  write(relu_model(DType::f16), in_);
  ThreadTeam team(1);
  EXPECT_THROW(offline::quantize(dir_ / "absent.gguf", out_, {}, team), Error);
  EXPECT_THROW(offline::quantize(in_, dir_ / "no" / "out.gguf", {}, team), Error);
  EXPECT_THROW(offline::quantize(in_, dir_.path(), {}, team), Error);
  if (std::filesystem::exists("/dev/full")) {
    EXPECT_THROW(offline::quantize(in_, "/dev/full/out.gguf", {}, team), Error);
  }
}

TEST_F(Quantize, ProgressCoversEveryByte) {
  QuantizeOptions options;
  std::vector<offline::QuantizeProgress> seen;
  options.progress = [&](const offline::QuantizeProgress& p) { seen.push_back(p); };
  const Source s = relu_model(DType::f16);
  const QuantizeReport report = run(s, options);
  ASSERT_EQ(seen.size(), s.tensors.size());
  EXPECT_EQ(report.n_converted + report.n_copied, static_cast<int>(seen.size()));
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i].tensor, i);
    EXPECT_EQ(seen[i].n_tensors, seen.size());
    if (i > 0) {
      EXPECT_GT(seen[i].bytes_done, seen[i - 1].bytes_done);
    }
  }
  const gguf::File file = gguf::File::open(out_);
  EXPECT_EQ(seen.back().bytes_done + file.tensors().back().bytes, seen.back().bytes_total);
}

}  // namespace
}  // namespace hearth
