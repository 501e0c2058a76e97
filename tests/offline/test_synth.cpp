// Files of `hearth synth`: determinism, layout, metadata, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>

#include "core/error.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/model.h"
#include "offline/synth.h"
#include "offline/synth_random.h"
#include "offline/synth_vocab.h"
#include "support/paths.h"
#include "text/tokenizer.h"

namespace hearth::offline {
namespace {

using test::TempDir;

SynthOptions small_options(const std::string& arch = "llama") {
  SynthOptions o;
  o.shape = {"small", arch, 2, 64, 96, 4, 2, 700, 64};
  o.hot_share = 0.85;
  return o;
}

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write(const std::filesystem::path& path, const SynthOptions& options, int threads = 2) {
  ThreadTeam team(threads);
  write_synthetic(path, options, team);
}

std::vector<float> values(const gguf::File& file, const std::string& name) {
  const gguf::TensorInfo* t = file.find_tensor(name);
  if (t == nullptr) throw Error("no tensor " + name);
  std::vector<float> v(static_cast<size_t>(t->rows() * t->cols()));
  t->traits->to_float(file.data(*t).data(), v.data(), static_cast<int64_t>(v.size()));
  return v;
}

std::vector<float> logits(const std::filesystem::path& path) {
  model::Model model = model::Model::load(path);
  const auto device = cpu::make_reference_device();
  engine::Engine engine(model, *device, {.sparsity = engine::Sparsity::off});
  const std::vector<int32_t> ids = {1, 300, 500, 650};
  engine::Sequence text = engine.sequence();
  const auto last = engine.eval(text, ids);
  return {last.begin(), last.end()};
}

std::string error_of(const SynthOptions& options) {
  try {
    check_synth_options(options);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(SynthRandom, BlocksAreCentredWithVarianceOne) {
  const RandomStream random(7, 3);
  double sum = 0, squares = 0, neighbours = 0;
  const int64_t blocks = 4000;
  for (int64_t b = 0; b < blocks; ++b) {
    float x[kSynthBlock];
    random.block(static_cast<uint64_t>(b), 1.0f, x);
    double along_e = 0;
    for (int64_t j = 0; j < kSynthBlock; ++j) {
      along_e += static_cast<double>(constant_sign(j) * x[j]);
      sum += static_cast<double>(x[j]);
      squares += static_cast<double>(x[j] * x[j]);
      if (j > 0) neighbours += static_cast<double>(x[j] * x[j - 1]);
    }
    EXPECT_NEAR(along_e, 0.0, 32 * 4 * 1.2e-7);
  }
  const double n = blocks * kSynthBlock;
  EXPECT_NEAR(sum / n, 0.0, 4 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1.0, 4 * std::sqrt(2 / n));
  // The projection makes neighbours, which have opposite signs of e, correlate by 1/31.
  EXPECT_NEAR(neighbours / (n * 31 / 32), 1.0 / 31, 4 / std::sqrt(n));
}

TEST(Synth, SameBytesWhateverTheThreads) {
  const TempDir dir;
  for (const DType type : {DType::f16, DType::q4_0}) {
    SynthOptions o = small_options();
    o.type = type;
    o.predictor_rank = 32;
    o.drift = 0.3;
    write(dir / "one", o, 1);
    write(dir / "three", o, 3);
    EXPECT_EQ(bytes_of(dir / "one"), bytes_of(dir / "three"));
    o.seed = 2;
    write(dir / "other", o, 1);
    EXPECT_NE(bytes_of(dir / "one"), bytes_of(dir / "other"));
  }
}

TEST(Synth, StandardAndTransposedDownAreTheSameNumbers) {
  for (const char* arch : {"llama", "opt"}) {
    const TempDir dir;
    SynthOptions o = small_options(arch);
    o.type = DType::f32;
    write(dir / "t", o);
    o.transposed_down = false;
    write(dir / "s", o);
    const std::vector<float> t = values(gguf::File::open(dir / "t"), "blk.1.ffn_down_t.weight");
    const std::vector<float> s = values(gguf::File::open(dir / "s"), "blk.1.ffn_down.weight");
    ASSERT_EQ(t.size(), s.size());
    for (size_t i = 0; i < 96; ++i) {
      for (size_t j = 0; j < 64; ++j) ASSERT_EQ(t[i * 64 + j], s[j * 96 + i]) << i << " " << j;
    }
  }
}

TEST(Synth, EveryArchitectureAndTypeRuns) {
  for (const char* arch : {"llama", "opt", "falcon"}) {
    for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
      SCOPED_TRACE(fmt::format("{} {}", arch, traits(type).name));
      const TempDir dir;
      SynthOptions o = small_options(arch);
      o.type = type;
      o.predictor_rank = 32;
      o.predictor_type = DType::q8_0;
      write(dir / "m.gguf", o);
      const model::Model m = model::Model::load(dir / "m.gguf");
      EXPECT_EQ(m.config().n_ff, 96);
      EXPECT_EQ(m.config().ffn.gated, o.shape.gated());
      EXPECT_EQ(m.config().ffn.act, Activation::relu);
      EXPECT_EQ(m.config().parallel_block, o.shape.parallel_block());
      EXPECT_TRUE(m.weights().layers[0].ffn.down_t);
      double squares = 0;
      for (const float x : logits(dir / "m.gguf")) squares += static_cast<double>(x * x);
      EXPECT_NEAR(squares / 700, 0.66, 0.4);  // rows of length 1 against noise of variance 1/2 to 2/3
    }
  }
}

TEST(Synth, QuantisedModelIsCloseToTheFloatOne) {
  const TempDir dir;
  SynthOptions o = small_options();
  o.type = DType::f32;
  write(dir / "f32", o);
  o.type = DType::q8_0;
  write(dir / "q8", o);
  const std::vector<float> a = logits(dir / "f32"), b = logits(dir / "q8");
  double difference = 0, length = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i] - b[i]), 2);
    length += std::pow(static_cast<double>(a[i]), 2);
  }
  EXPECT_LT(std::sqrt(difference / length), 0.05);
}

TEST(Synth, DenseSilu) {
  const TempDir dir;
  SynthOptions o = small_options();
  o.dense = true;
  o.activation = "silu";
  o.transposed_down = false;
  write(dir / "m.gguf", o);
  const model::Model m = model::Model::load(dir / "m.gguf");
  EXPECT_EQ(m.config().ffn.act, Activation::silu);
  EXPECT_TRUE(m.weights().layers[0].ffn.down);
  EXPECT_EQ(m.file().find_tensor("blk.0.fc1.weight"), nullptr);
}

TEST(Synth, TextIsTokenisedIntoItsWords) {
  EXPECT_EQ(synth_word(0), "a");
  EXPECT_EQ(synth_word(25), "z");
  EXPECT_EQ(synth_word(26), "aa");
  EXPECT_EQ(synth_word(26 + 26 * 26), "aaa");
  const TempDir dir;
  write(dir / "m.gguf", small_options());
  const auto tokenizer = text::Tokenizer::load(gguf::File::open(dir / "m.gguf"));
  const std::vector<int32_t> ids = synthetic_text(700, 100, 10, 3);
  std::string text;
  for (const int32_t id : ids) {
    ASSERT_GE(id, kFirstWord);
    ASSERT_LT(id, 700);
    if (!text.empty()) text += ' ';
    text += synth_word(id - kFirstWord);
  }
  EXPECT_EQ(tokenizer->encode(text, {.add_special = false}), ids);
}

TEST(Synth, TextStaysInATopic) {
  const std::vector<int32_t> ids = synthetic_text(32000, 640, 10, 3);
  for (size_t t = 0; t < ids.size(); ++t) EXPECT_EQ(topic_of(ids[t], 32000), static_cast<int64_t>(t / 10 % 64));
}

TEST(Synth, RefusesImpossibleRequests) {
  EXPECT_EQ(error_of(small_options()), "");
  const auto message = [](auto&& change) {
    SynthOptions o = small_options();
    change(o);
    return error_of(o);
  };
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos);
  };
  expect(message([](auto& o) { o.shape.n_head = 7; }), "--n-head 7");
  expect(message([](auto& o) { o.shape.n_head_kv = 3; }), "--n-head-kv 3");
  expect(message([](auto& o) { o.shape.n_head = o.shape.n_head_kv = 64; }), "even number");
  expect(message([](auto& o) { o.shape.n_embd = 72; }), "multiple of 32");
  expect(message([](auto& o) { o.shape.n_ff = 100; }), "multiple of 32");
  expect(message([](auto& o) { o.shape.n_vocab = 286; }), "at least 287");
  expect(message([](auto& o) { o.shape.n_layer = 0; }), "--layers");
  expect(message([](auto& o) { o.shape.arch = "gpt2"; }), "expected llama, opt, falcon, qwen3moe, gpt-oss or smallthinker");
  expect(message([](auto& o) { o.predictor_rank = 3; }), "4 or more");
  expect(message([](auto& o) { o.predictor_rank = 200; }), "--n-embd 64 allows 62; use 126 or less");
  expect(message([](auto& o) { o.predictor_rank = 40, o.predictor_type = DType::q8_0; }), "multiple of 32");
  expect(message([](auto& o) { o.predictor_rank = 32, o.dense = true; }), "--dense");
  expect(message([](auto& o) { o.drift = 1.0; }), "--drift");
  expect(message([](auto& o) { o.drift = 0.5, o.shape.n_vocab = 300; }), "at least 414 tokens");
  expect(message([](auto& o) { o.activation = "silu"; }), "add --dense");
  EXPECT_THROW(find_synth_shape("llama-8b"), Error);
}

TEST(Synth, RefusesWhenTheDiskIsTooSmall) {
  const TempDir dir;
  SynthOptions o = small_options();
  o.shape.n_layer = 4096;
  o.shape.n_embd = 1 << 18;
  try {
    write(dir / "m.gguf", o);
    FAIL() << "more than a petabyte was written";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("GiB are free on its disk"), std::string::npos) << e.what();
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(Synth, LeavesNothingBehindWhenTheLawIsImpossible) {
  const TempDir dir;
  SynthOptions o = small_options();
  o.density = 0.5;
  EXPECT_THROW(write(dir / "m.gguf", o), Error);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

}  // namespace
}  // namespace hearth::offline
