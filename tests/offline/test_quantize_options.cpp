// offline::quantize with mixes, expressions for types, importance and dry runs, on small files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "core/error.h"
#include "gguf/gguf.h"
#include "offline/quantize/importance.h"
#include "offline/quantize/quantize.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

std::vector<std::byte> bytes_of(const std::filesystem::path& path) {
  const MappedFile file(path);
  return {file.bytes().begin(), file.bytes().end()};
}

std::vector<float> values(const gguf::File& file, const std::string& name) {
  const gguf::TensorInfo& t = *file.find_tensor(name);
  std::vector<float> out(static_cast<size_t>(t.rows() * t.cols()));
  t.traits->to_float(file.data(t).data(), out.data(), t.rows() * t.cols());
  return out;
}

class QuantizeWith : public testing::Test {
 protected:
  void SetUp() override { make({}); }
  // A SwiGLU model whose rows are whole blocks of every type.
  void make(test::TinyGguf shape) {
    if (shape.n_embd == 32) shape.n_embd = 256, shape.n_ff = 512;
    if (shape.activation == "relu") shape.activation = "silu", shape.transposed_down = false;
    shape.tied_head = false;
    test::write_tiny_gguf(in_, shape);
  }
  QuantizeReport run(const QuantizeOptions& options, int threads = 2) {
    ThreadTeam team(threads);
    return quantize(in_, out_, options, team);
  }
  QuantizeReport run(const char* type, int threads = 2) {
    QuantizeOptions options;
    options.type = *parse_file_type(type);
    return run(options, threads);
  }
  std::string error_of(const QuantizeOptions& options) {
    try {
      run(options);
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
      EXPECT_FALSE(std::filesystem::exists(out_));
      return e.what();
    }
    return "no error";
  }
  std::string type_of(const std::string& name) {
    const gguf::File file = gguf::File::open(out_);
    return file.find_tensor(name)->traits->name;
  }
  // An importance for every matrix of a layer that quantise() may ask for, [n_cols].
  Importance importance(const std::function<double(size_t column)>& of) const {
    Importance all;
    const gguf::File file = gguf::File::open(in_);
    for (const gguf::TensorInfo& t : file.tensors()) {
      if (t.ne.size() < 2 || !t.name.starts_with("blk.")) continue;
      Importance::Sums& sums = all.matrices[t.name];
      for (size_t c = 0; c < static_cast<size_t>(t.cols()); ++c) sums.squares.push_back(10 * of(c));
      sums.counts = {10};
    }
    return all;
  }

  test::TempDir dir_;
  std::filesystem::path in_ = dir_ / "in.gguf", out_ = dir_ / "out.gguf", importance_ = dir_ / "importance.gguf";
};

TEST_F(QuantizeWith, AMixWritesItsTypesAndItsNumber) {
  make({.n_layer = 8});
  const QuantizeReport report = run("q4_k_m");
  EXPECT_TRUE(report.fallbacks.empty());
  const gguf::File file = gguf::File::open(out_), source = gguf::File::open(in_);
  EXPECT_EQ(file.require<uint32_t>("general.file_type"), 15u);
  for (const auto& [name, type] : std::map<std::string, DType>{{"output.weight", DType::q6_k},
                                                               {"token_embd.weight", DType::q4_k},
                                                               {"blk.0.attn_v.weight", DType::q6_k},
                                                               {"blk.1.attn_v.weight", DType::q4_k},
                                                               {"blk.3.ffn_down.weight", DType::q6_k},
                                                               {"blk.1.ffn_up.weight", DType::q4_k}}) {
    SCOPED_TRACE(name);
    const gguf::TensorInfo& t = *file.find_tensor(name);
    EXPECT_EQ(t.traits->type, type);
    const std::vector<float> rows = values(source, name);
    std::vector<std::byte> expected(t.bytes);
    quantize_row(type, rows.data(), nullptr, expected.data(), static_cast<int64_t>(rows.size()));
    EXPECT_TRUE(std::ranges::equal(file.data(t), expected));
  }
  EXPECT_EQ(type_of("blk.0.attn_norm.weight"), "f32");
}

TEST_F(QuantizeWith, EveryTypeAndMixRoundTrips) {
  const std::vector<float> source = values(gguf::File::open(in_), "blk.0.ffn_up.weight");
  for (const DTypeTraits& t : all_traits()) {
    if (!t.computable()) continue;
    SCOPED_TRACE(t.name);
    QuantizeOptions options;
    options.type = t.type;
    run(options);
    const gguf::File file = gguf::File::open(out_);
    double error = 0, square = 0;
    const std::vector<float> result = values(file, "blk.0.ffn_up.weight");
    for (size_t i = 0; i < source.size(); ++i) {
      error += std::pow(result[i] - source[i], 2), square += std::pow(source[i], 2);
    }
    // Normal values of b bits with sign have a relative error of about 2.7 * 2^-b: 2 bits 0.34, 3 bits 0.19.
    const double bits = 8.0 * t.block_bytes / t.block_size;
    EXPECT_LT(std::sqrt(error / square), t.block_size > 1 ? 1.35 * std::exp2(2 - bits) : 0.005);
    EXPECT_EQ(file.require<uint32_t>("general.file_type"), t.file_type);
  }
}

TEST_F(QuantizeWith, ThreadCountDoesNotMatter) {
  importance([](size_t c) { return 1.0 + static_cast<double>(c % 7); }).write(importance_);
  QuantizeOptions options;
  options.type = *parse_file_type("Q3_K_M");
  options.importance = importance_;
  run(options, 1);
  const auto one = bytes_of(out_);
  run(options, 5);
  EXPECT_EQ(bytes_of(out_), one);
}

TEST_F(QuantizeWith, RowsThatBlocksOf256DoNotDivide) {
  make({.n_layer = 1, .n_embd = 96, .n_ff = 256});
  const QuantizeReport report = run("Q4_K_M");
  EXPECT_EQ(type_of("blk.0.ffn_up.weight"), "q5_0");
  EXPECT_EQ(type_of("blk.0.ffn_down.weight"), "q6_k");
  EXPECT_EQ(type_of("output.weight"), "q8_0");
  ASSERT_EQ(report.fallbacks.size(), 2u);
  EXPECT_NE(report.fallbacks[0].find("in q5_0: rows of 96 are no multiple of q4_k's 256"), std::string::npos)
      << report.fallbacks[0];
  QuantizeOptions options;
  options.type = *parse_file_type("Q4_K_M");
  options.down = DownLayout::transposed;
  run(options);
  EXPECT_EQ(type_of("blk.0.ffn_down_t.weight"), "q8_0");  // its rows are of n_embd
}

TEST_F(QuantizeWith, PredictorsKeep8Bits) {
  make({.n_layer = 1, .predictor_rank = 32});
  run("Q3_K_S");
  EXPECT_EQ(type_of("blk.0.fc1.weight"), "q8_0");
  EXPECT_EQ(type_of("blk.0.fc2.weight"), "q8_0");
  QuantizeOptions options;
  options.type = DType::q4_k;
  options.predictor_type = DType::q4_k;
  run(options);
  EXPECT_EQ(type_of("blk.0.fc1.weight"), "q4_k");
  EXPECT_EQ(type_of("blk.0.fc2.weight"), "q5_0");
  options.predictor_type = {};
  options.tensor_types = {{"fc2", DType::q5_1}};
  run(options);
  EXPECT_EQ(type_of("blk.0.fc1.weight"), "q8_0");
  EXPECT_EQ(type_of("blk.0.fc2.weight"), "q5_1");
}

TEST_F(QuantizeWith, TheFirstExpressionThatMatchesDecides) {
  QuantizeOptions options;
  options.type = *parse_file_type("Q4_K_M");
  options.head_type = DType::f16;
  options.tensor_types = {{"blk\\.0\\.ffn_(up|down)", DType::q8_0},
                          {"ffn_", DType::iq4_nl},
                          {"^output", DType::q4_0},
                          {"token_embd", DType::bf16},
                          {"blk.0.ffn_up", DType::f32}};  // never the first
  run(options);
  EXPECT_EQ(type_of("blk.0.ffn_up.weight"), "q8_0");
  EXPECT_EQ(type_of("blk.0.ffn_down.weight"), "q8_0");
  EXPECT_EQ(type_of("blk.0.ffn_gate.weight"), "iq4_nl");
  EXPECT_EQ(type_of("blk.1.ffn_up.weight"), "iq4_nl");
  EXPECT_EQ(type_of("blk.1.attn_q.weight"), "q4_k");
  EXPECT_EQ(type_of("output.weight"), "f16");  // --head-type comes first
  EXPECT_EQ(type_of("token_embd.weight"), "bf16");
  // Either name of a transposed matrix.
  options.down = DownLayout::transposed;
  options.tensor_types = {{"ffn_down\\.", DType::q8_0}};
  run(options);
  EXPECT_EQ(type_of("blk.0.ffn_down_t.weight"), "q8_0");
  options.tensor_types = {{"ffn_down_t", DType::q5_k}};
  run(options);
  EXPECT_EQ(type_of("blk.0.ffn_down_t.weight"), "q5_k");
}

TEST_F(QuantizeWith, BadExpressions) {
  QuantizeOptions options;
  options.tensor_types = {{"ffn_(up", DType::q8_0}};
  EXPECT_NE(error_of(options).find("'ffn_(up' is no valid regular expression"), std::string::npos);
  options.tensor_types = {{"ffn_up", DType::q8_0}, {"attn_norm", DType::q8_0}};
  EXPECT_NE(error_of(options).find("'attn_norm' matches no matrix"), std::string::npos) << "norms are no matrices";
}

TEST_F(QuantizeWith, PureMeansTheMainType) {
  QuantizeOptions options;
  options.type = parse_file_type("Q5_K_M")->pure();
  run(options);
  const gguf::File file = gguf::File::open(out_);
  for (const gguf::TensorInfo& t : file.tensors()) {
    if (t.ne.size() > 1) {
      EXPECT_EQ(t.traits->type, DType::q5_k) << t.name;
    }
  }
  EXPECT_EQ(file.require<uint32_t>("general.file_type"), 17u);
}

TEST_F(QuantizeWith, RoutersOfExpertsStay) {
  gguf::Writer writer(in_);
  writer.set("general.architecture", std::string("llama"));
  writer.set("hearth.ffn.activation", std::string("silu"));
  const size_t router = writer.add_tensor("blk.0.ffn_gate_inp.weight", DType::bf16, {256, 4});
  const size_t experts = writer.add_tensor("blk.0.ffn_up_exps.weight", DType::bf16, {256, 2, 4});
  writer.begin();
  writer.write(router, 0, std::vector<std::byte>(256 * 4 * 2));
  std::vector<float> rows(256 * 8);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = std::sin(static_cast<float>(i));
  std::vector<std::byte> stored(rows.size() * 2);
  traits(DType::bf16).from_float(rows.data(), stored.data(), static_cast<int64_t>(rows.size()));
  traits(DType::bf16).to_float(stored.data(), rows.data(), static_cast<int64_t>(rows.size()));
  writer.write(experts, 0, stored);
  writer.finish();
  // Each expert has an importance of its own.
  Importance all;
  Importance::Sums& sums = all.matrices["blk.0.ffn_up_exps.weight"];
  for (size_t i = 0; i < 4 * 256; ++i) sums.squares.push_back(static_cast<double>(1 + i % 11 * (i / 256)));
  sums.counts = {1, 2, 4, 0};
  all.write(importance_);
  QuantizeOptions options;
  options.type = DType::q4_k, options.importance = importance_;
  EXPECT_EQ(run(options).n_weighted, 1);
  EXPECT_EQ(type_of("blk.0.ffn_gate_inp.weight"), "bf16");
  const gguf::File file = gguf::File::open(out_);
  const std::vector<float> means = all.means("blk.0.ffn_up_exps.weight");
  EXPECT_EQ(means[3 * 256 + 5], 1.0f) << "no token came to this expert";
  std::vector<std::byte> expected(8 * row_bytes(DType::q4_k, 256));
  for (size_t r = 0; r < 8; ++r) {
    quantize_row(DType::q4_k, rows.data() + r * 256, means.data() + r / 2 * 256,
                 expected.data() + r * row_bytes(DType::q4_k, 256), 256);
  }
  EXPECT_TRUE(std::ranges::equal(file.data(*file.find_tensor("blk.0.ffn_up_exps.weight")), expected));
}

TEST_F(QuantizeWith, ADryRunKnowsTheSizesAndWritesNothing) {
  QuantizeOptions options;
  options.type = *parse_file_type("Q4_K_M");
  options.dry_run = true;
  const QuantizeReport dry = run(options);
  EXPECT_FALSE(std::filesystem::exists(out_));
  options.dry_run = false;
  const QuantizeReport report = run(options);
  const gguf::File in = gguf::File::open(in_), out = gguf::File::open(out_);
  ASSERT_EQ(dry.tensors.size(), out.tensors().size());
  for (size_t i = 0; i < dry.tensors.size(); ++i) {
    EXPECT_EQ(dry.tensors[i].name, out.tensors()[i].name);
    EXPECT_EQ(dry.tensors[i].to, out.tensors()[i].traits->type);
    EXPECT_EQ(dry.tensors[i].from, in.tensors()[i].traits->type);
    EXPECT_EQ(dry.tensors[i].bytes_in, in.tensors()[i].bytes);
    EXPECT_EQ(dry.tensors[i].bytes_out, out.tensors()[i].bytes);
  }
  EXPECT_EQ(dry.n_converted, report.n_converted);
}

TEST_F(QuantizeWith, ImportanceLowersTheErrorThatItWeighs) {
  // A few columns see much larger inputs than the others.
  const auto weight = [](size_t c) { return c % 16 == 3 ? 100.0 : 0.5; };
  importance(weight).write(importance_);
  const std::vector<float> source = values(gguf::File::open(in_), "blk.0.ffn_gate.weight");
  const auto weighted_error = [&](const std::filesystem::path& path, DType type) {
    QuantizeOptions options;
    options.type = type, options.importance = path;
    const QuantizeReport report = run(options);
    EXPECT_EQ(report.n_weighted, path.empty() || traits(type).from_float_weighted == nullptr ? 0 : 14);
    EXPECT_TRUE(report.unweighted.empty());
    const std::vector<float> result = values(gguf::File::open(out_), "blk.0.ffn_gate.weight");
    double error = 0;
    for (size_t i = 0; i < source.size(); ++i) error += weight(i % 256) * std::pow(result[i] - source[i], 2);
    return error;
  };
  for (const DType type : {DType::q2_k, DType::q3_k, DType::q4_k, DType::iq4_nl, DType::iq4_xs, DType::q4_0}) {
    SCOPED_TRACE(traits(type).name);
    EXPECT_LT(weighted_error(importance_, type), 0.9 * weighted_error({}, type));
  }
  const double with = weighted_error(importance_, DType::q8_0), without = weighted_error({}, DType::q8_0);
  EXPECT_EQ(with, without) << "8 bits make no use of it";
  EXPECT_EQ(gguf::File::open(out_).find("quantize.imatrix.file"), nullptr);
}

TEST_F(QuantizeWith, TransposedDownMatricesHaveNoImportance) {
  importance([](size_t c) { return 1.0 + static_cast<double>(c); }).write(importance_);
  QuantizeOptions options;
  options.type = DType::q4_k, options.down = DownLayout::transposed;
  run(options);
  const std::vector<float> plain = values(gguf::File::open(out_), "blk.0.ffn_down_t.weight");
  options.importance = importance_;
  const QuantizeReport report = run(options);
  EXPECT_EQ(report.n_weighted, 12);
  EXPECT_TRUE(report.unweighted.empty());
  const gguf::File file = gguf::File::open(out_);
  EXPECT_EQ(values(file, "blk.0.ffn_down_t.weight"), plain);
  EXPECT_EQ(file.require<std::string>("quantize.imatrix.file"), importance_.string());
  EXPECT_EQ(file.require<uint32_t>("quantize.imatrix.entries_count"), 14u);
}

TEST_F(QuantizeWith, ImportanceThatDoesNotFit) {
  QuantizeOptions options;
  options.type = DType::q4_k, options.importance = importance_;
  EXPECT_NE(error_of(options).find("importance.gguf"), std::string::npos) << "there is no file";
  const auto with = [&](const std::function<void(Importance&)>& change) {
    Importance all = importance([](size_t) { return 1.0; });
    change(all);
    all.write(importance_);
  };
  with([](Importance& all) { all.matrices["blk.0.attn_q.weight"].squares.resize(128); });
  EXPECT_NE(error_of(options).find("128 values for 'blk.0.attn_q.weight', expected 256"), std::string::npos);
  with([](Importance& all) {
    for (int l = 0; l < 2; ++l) {
      for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
        auto node = all.matrices.extract(fmt::format("blk.{}.{}.weight", l, name));
        node.key() = fmt::format("blk.{}.{}.weight", l + 100, name);
        all.matrices.insert(std::move(node));
      }
    }
  });
  EXPECT_NE(error_of(options).find("of another model"), std::string::npos);
  with([](Importance& all) { all.matrices.erase("blk.1.ffn_up.weight"); });
  EXPECT_EQ(run(options).unweighted, (std::vector<std::string>{"blk.1.ffn_up.weight"}));
}

}  // namespace
}  // namespace hearth::offline
