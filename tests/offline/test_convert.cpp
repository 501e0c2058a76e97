// The converter's files against a second reading of the same checkpoints: every value of every tensor, the metadata,
// types.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>

#include "core/error.h"
#include "gguf/gguf.h"
#include "hf_reference.h"
#include "offline/convert/convert.h"
#include "offline/convert/hf_tokenizer.h"
#include "support/paths.h"
#include "text/tokenizer.h"

namespace hearth {
namespace {

using nlohmann::json;

struct Checkpoint {
  std::string name;
  std::filesystem::path directory;
  friend void PrintTo(const Checkpoint& c, std::ostream* out) { *out << c.name; }
};

std::vector<Checkpoint> checkpoints() {
  std::vector<Checkpoint> all;
  for (const auto& entry : std::filesystem::directory_iterator(test::data_dir() / "zoo")) {
    if (std::filesystem::exists(entry.path() / "config.json"))
      all.push_back({"own_" + entry.path().filename().string(), entry.path()});
  }
  std::sort(all.begin(), all.end(), [](const Checkpoint& a, const Checkpoint& b) { return a.name < b.name; });
  const auto models = test::shared_dir() / "models";
  for (const char* name : {"llama-relu-gqa", "llama-silu-rope3", "mistral-silu", "qwen2-relu", "qwen3-silu", "opt-relu",
                           "falcon-relu", "bamboo-drelu"}) {
    all.push_back({std::string("shared_") + name, models / "zoo-hf" / name});
  }
  all.push_back({"shared_demo", models / "demo-hf"});
  for (Checkpoint& c : all) std::replace(c.name.begin(), c.name.end(), '-', '_');
  return all;
}

gguf::File convert(const std::filesystem::path& from, const std::filesystem::path& to, DType type,
                   std::vector<std::string>* notices = nullptr) {
  convert::Options options;
  options.type = type;
  options.n_threads = 2;
  options.on_notice = [&](std::string_view text) {
    if (notices != nullptr) notices->emplace_back(text);
  };
  convert::convert_checkpoint(from, to, options);
  return gguf::File::open(to);
}

std::vector<float> values(const gguf::File& file, const gguf::TensorInfo& t) {
  std::vector<float> out(static_cast<size_t>(t.rows() * t.cols()));
  t.traits->to_float(file.data(t).data(), out.data(), t.rows() * t.cols());
  return out;
}

class Convert : public testing::TestWithParam<Checkpoint> {
 protected:
  void SetUp() override {
    const auto& directory = GetParam().directory;
    if (!std::filesystem::exists(directory)) GTEST_SKIP() << "needs " << directory << ", which is absent";
    config_ = json::parse(test::slurp(directory / "config.json"));
    type_ = config_.at("model_type");
  }
  // The model_type decides the family; everything that is not one of these is permuted.
  bool permuted() const {
    return !std::set<std::string>{"qwen2", "qwen3", "opt", "falcon", "starcoder2"}.contains(type_);
  }
  int64_t number(const char* key, const char* other) const {
    return config_.contains(key) ? config_[key] : config_.at(other);
  }

  test::TempDir dir_;
  json config_;
  std::string type_;
};

TEST_P(Convert, EveryValueOfEveryTensorArrives) {
  const gguf::File file = convert(GetParam().directory, dir_ / "out.gguf", DType::f32);
  const auto heads = static_cast<size_t>(config_.at("num_attention_heads"));
  const auto kv_heads = static_cast<size_t>(
      number("num_key_value_heads", config_.contains("num_kv_heads") ? "num_kv_heads" : "num_attention_heads"));
  size_t expected = 0;
  for (auto& [name, t] : test::reference_tensors(GetParam().directory)) {
    ++expected;
    const std::string gguf_name = test::reference_name(name, type_);
    SCOPED_TRACE(name + " -> " + gguf_name);
    const gguf::TensorInfo* info = file.find_tensor(gguf_name);
    ASSERT_NE(info, nullptr);
    EXPECT_EQ(info->traits->type, DType::f32);
    EXPECT_EQ(info->ne, (std::vector<int64_t>(t.shape.rbegin(), t.shape.rend())));
    const size_t cols = t.shape.size() == 1 ? 1 : static_cast<size_t>(t.shape[1]);
    if (permuted() && name.find("q_proj") != std::string::npos)
      t.values = test::reference_permute(t.values, heads, cols);
    if (permuted() && name.find("k_proj") != std::string::npos)
      t.values = test::reference_permute(t.values, kv_heads, cols);
    if (name.find("query_key_value") != std::string::npos)
      t.values = test::reference_falcon_qkv(t.values, heads, kv_heads);
    EXPECT_EQ(values(file, *info), t.values);
  }
  EXPECT_EQ(file.tensors().size(), expected + (file.find_tensor("rope_freqs.weight") != nullptr ? 1 : 0));
}

TEST_P(Convert, MetadataFollowConfigJson) {
  const gguf::File file = convert(GetParam().directory, dir_ / "out.gguf", DType::f16);
  static const std::map<std::string, std::string> archs = {
      {"llama", "llama"}, {"mistral", "llama"}, {"bamboo", "llama"}};
  const std::string arch = archs.contains(type_) ? archs.at(type_) : type_;
  EXPECT_EQ(file.require<std::string>("general.architecture"), arch);
  EXPECT_EQ(file.require<uint32_t>("general.file_type"), 1u);
  const auto integer = [&](const char* key) { return file.require<int64_t>(arch + "." + key); };
  EXPECT_EQ(integer("block_count"), config_.at("num_hidden_layers"));
  EXPECT_EQ(integer("embedding_length"), config_.at("hidden_size"));
  EXPECT_EQ(integer("context_length"), config_.value("max_position_embeddings", int64_t{2048}));
  EXPECT_EQ(integer("vocab_size"), config_.at("vocab_size"));
  EXPECT_EQ(integer("attention.head_count"), config_.at("num_attention_heads"));
  EXPECT_EQ(integer("feed_forward_length"),
            number("intermediate_size", type_ == "opt" ? "ffn_dim" : "ffn_hidden_size"));
  if (config_.contains("num_key_value_heads")) {
    EXPECT_EQ(integer("attention.head_count_kv"), config_.at("num_key_value_heads"));
  }
  if (config_.contains("head_dim")) {
    EXPECT_EQ(integer("attention.key_length"), config_.at("head_dim"));
  }
  const bool rms = config_.contains("rms_norm_eps");
  const double eps = rms ? config_.at("rms_norm_eps").get<double>() : config_.value("layer_norm_epsilon", 1e-5);
  EXPECT_EQ(file.require<float>(arch + (rms ? ".attention.layer_norm_rms_epsilon" : ".attention.layer_norm_epsilon")),
            static_cast<float>(eps));
  if (type_ != "opt") {
    const json rope = config_.value("rope_parameters", json::object());
    EXPECT_EQ(file.require<float>(arch + ".rope.freq_base"),
              rope.value("rope_theta", config_.value("rope_theta", 10000.0f)));
  }
  const auto embedding = file.find_tensor("token_embd.weight");
  ASSERT_NE(embedding, nullptr);
  EXPECT_EQ(file.require<std::vector<std::string>>("tokenizer.ggml.tokens").size(),
            static_cast<size_t>(embedding->rows()));
}

// The text of the goldens, tokenized with the converted vocabulary, gives the ids that the goldens record.
TEST_P(Convert, VocabularyTokenizesTheGoldensPrompts) {
  const gguf::File file = convert(GetParam().directory, dir_ / "out.gguf", DType::f16);
  const auto tokenizer = text::Tokenizer::load(file);
  const json goldens = json::parse(test::slurp(GetParam().directory / "goldens.json"));
  for (const json& golden : goldens.at("goldens")) {
    EXPECT_EQ(tokenizer->encode(golden.at("prompt").get<std::string>()), golden.at("ids").get<std::vector<int32_t>>())
        << golden.at("prompt");
  }
}

INSTANTIATE_TEST_SUITE_P(Zoo, Convert, testing::ValuesIn(checkpoints()), [](const auto& p) { return p.param.name; });

std::filesystem::path own(const char* name) {
  return test::data_dir() / "zoo" / name;
}

TEST(ConvertTypes, MatricesTakeTheTypeAndVectorsStayF32) {
  const test::TempDir dir;
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
    const gguf::File file = convert(own("opt-relu"), dir / "out.gguf", type);
    const gguf::File exact = convert(own("opt-relu"), dir / "exact.gguf", DType::f32);
    for (const gguf::TensorInfo& t : file.tensors()) {
      SCOPED_TRACE(t.name);
      const bool f32 = t.ne.size() == 1 || t.name == "position_embd.weight";
      EXPECT_EQ(t.traits->type, f32 ? DType::f32 : type);
      // The trait's own conversion of each row is the expectation.
      const auto full = values(exact, *exact.find_tensor(t.name));
      std::vector<std::byte> bytes(t.bytes);
      t.traits->from_float(full.data(), bytes.data(), static_cast<int64_t>(full.size()));
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), file.data(t).begin()));
    }
  }
}

TEST(ConvertTypes, TheResultDoesNotDependOnTheNumberOfThreads) {
  const test::TempDir dir;
  std::string files[2];
  for (const int threads : {1, 3}) {
    convert::Options options;
    options.type = DType::q8_0;
    options.n_threads = threads;
    convert::convert_checkpoint(own("falcon-relu"), dir / "out.gguf", options);
    files[threads == 3] = test::slurp(dir / "out.gguf");
  }
  EXPECT_EQ(files[0], files[1]);
}

TEST(ConvertTypes, ProgressReachesTheTotal) {
  const test::TempDir dir;
  convert::Options options;
  uint64_t last = 0, total = 0;
  options.on_progress = [&](const convert::Progress& p) {
    EXPECT_GT(p.bytes_done, last);
    last = p.bytes_done;
    total = p.bytes_total;
  };
  convert::convert_checkpoint(own("llama-relu-gqa"), dir / "out.gguf", options);
  EXPECT_EQ(last, total);
  EXPECT_GT(total, 0u);
}

struct Activation {
  const char *model, *name;
};
TEST(ConvertActivation, IsRecordedUnderItsOwnName) {
  const test::TempDir dir;
  for (const Activation& a : {Activation{"llama-relu-gqa", "relu"},
                              {"llama-silu-rope3", "silu"},
                              {"llama-relu2-linear", "relu2"},
                              {"llama-fatrelu", "fat_relu"},
                              {"bamboo-drelu", "drelu"},
                              {"arcee-relu2", "relu2"},
                              {"starcoder2-gelu", "gelu_tanh"},
                              {"opt-relu", "relu"}}) {
    const gguf::File file = convert(own(a.model), dir / "out.gguf", DType::f16);
    EXPECT_EQ(file.require<std::string>("hearth.ffn.activation"), a.name) << a.model;
  }
  EXPECT_EQ(
      convert(own("llama-fatrelu"), dir / "out.gguf", DType::f16).require<float>("hearth.ffn.activation_threshold"),
      2.0f);
}

TEST(ConvertActivation, TheOverrideWins) {
  const test::TempDir dir;
  convert::Options options;
  options.ffn = "drelu";
  convert::convert_checkpoint(own("llama-relu-gqa"), dir / "out.gguf", options);
  EXPECT_EQ(gguf::File::open(dir / "out.gguf").require<std::string>("hearth.ffn.activation"), "drelu");
}

// wavelength below original/high: 1; above original/low: factor; between: blended. Written from the paper's side:
// wavelengths.
TEST(ConvertRope, Llama3ScalingBecomesFactorsOfEachFrequency) {
  const test::TempDir dir;
  const gguf::File file = convert(own("llama-silu-rope3"), dir / "out.gguf", DType::f16);
  const auto factors = values(file, *file.find_tensor("rope_freqs.weight"));
  ASSERT_EQ(factors.size(), 4u);  // head_dim 8
  bool kept = false, stretched = false;
  for (size_t i = 0; i < factors.size(); ++i) {
    const double wavelength = 2 * std::numbers::pi * std::pow(500000.0, 2.0 * static_cast<double>(i) / 8);
    double expected = 8;
    if (wavelength < 32 / 4.0) {
      expected = 1;
    } else if (wavelength <= 32 / 1.0) {
      const double smooth = (32 / wavelength - 1) / (4 - 1);
      expected = 1 / ((1 - smooth) / 8 + smooth);
    }
    kept |= expected == 1;
    stretched |= expected == 8;
    EXPECT_NEAR(factors[i], expected, 1e-6 * expected) << i;
  }
  EXPECT_TRUE(kept && stretched) << "the fixture must have both ends";
  EXPECT_EQ(file.find("llama.rope.scaling.type"), nullptr);
}

TEST(ConvertRope, LinearScalingBecomesKeys) {
  const test::TempDir dir;
  const gguf::File file = convert(own("llama-relu2-linear"), dir / "out.gguf", DType::f16);
  EXPECT_EQ(file.require<std::string>("llama.rope.scaling.type"), "linear");
  EXPECT_EQ(file.require<float>("llama.rope.scaling.factor"), 2.0f);
  EXPECT_EQ(file.require<float>("llama.rope.freq_base"), 20000.0f);
}

TEST(ConvertVocabulary, PreTokenizersAreRecognised) {
  const test::TempDir dir;
  const std::map<std::string, std::string> expected = {{"llama-relu-gqa", "gpt-2"}, {"llama-silu-rope3", "llama-bpe"},
                                                       {"qwen2-relu", "qwen2"},     {"falcon-relu", "falcon"},
                                                       {"opt-relu", "gpt-2"},       {"mistral-silu", "default"}};
  for (const auto& [model, pre] : expected) {
    EXPECT_EQ(convert(own(model.c_str()), dir / "out.gguf", DType::f16).require<std::string>("tokenizer.ggml.pre"), pre)
        << model;
  }
}

TEST(ConvertVocabulary, IsPaddedToTheEmbedding) {
  const test::TempDir dir;
  const gguf::File file = convert(own("qwen2-relu"), dir / "out.gguf", DType::f16);
  const auto tokens = file.require<std::vector<std::string>>("tokenizer.ggml.tokens");
  const auto types = file.require<std::vector<int32_t>>("tokenizer.ggml.token_type");
  ASSERT_EQ(tokens.size(), types.size());
  EXPECT_EQ(tokens.back(), "[PAD" + std::to_string(tokens.size() - 1) + "]");
  EXPECT_EQ(types.back(), 5);              // unused
  EXPECT_EQ(types[tokens.size() - 9], 1);  // the last token of the tokenizer
  EXPECT_EQ(types.front(), 3);             // <|endoftext|>: control
}

TEST(ConvertVocabulary, SentencePieceKeepsScoresTypesAndIds) {
  const test::TempDir dir;
  const gguf::File file = convert(own("mistral-silu"), dir / "out.gguf", DType::f16);
  EXPECT_EQ(file.require<std::string>("tokenizer.ggml.model"), "llama");
  const auto tokens = file.require<std::vector<std::string>>("tokenizer.ggml.tokens");
  const auto scores = file.require<std::vector<float>>("tokenizer.ggml.scores");
  const auto types = file.require<std::vector<int32_t>>("tokenizer.ggml.token_type");
  EXPECT_EQ((std::vector(tokens.begin(), tokens.begin() + 4)),
            (std::vector<std::string>{"<unk>", "<s>", "</s>", "<0x00>"}));
  EXPECT_EQ((std::vector(types.begin(), types.begin() + 4)), (std::vector<int32_t>{2, 3, 3, 6}));
  EXPECT_EQ(scores[259], 0.0f);  // the first merge
  EXPECT_EQ(scores[260], -1.0f);
  EXPECT_EQ(types[259], 1);
  EXPECT_EQ(file.require<uint32_t>("tokenizer.ggml.bos_token_id"), 1u);
  EXPECT_EQ(file.require<uint32_t>("tokenizer.ggml.eos_token_id"), 2u);
  EXPECT_EQ(file.require<uint32_t>("tokenizer.ggml.unknown_token_id"), 0u);
  EXPECT_TRUE(file.require<bool>("tokenizer.ggml.add_bos_token"));
  EXPECT_TRUE(file.require<bool>("tokenizer.ggml.add_space_prefix"));
}

// A tokenizer.json made from a SentencePiece model: merges become scores that join the same pairs first.
TEST(ConvertVocabulary, ByteFallbackBpeBecomesSentencePiece) {
  const json tokenizer = json::parse(R"({
    "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true},
                     {"id": 7, "content": "<tool>", "special": false}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]}, "pre_tokenizer": null,
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
    "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "merges": ["a b", ["ab", "a"]],
              "vocab": {"<unk>": 0, "<s>": 1, "<0x41>": 2, "a": 3, "b": 4, "aba": 5, "ab": 6}}})");
  const convert::HfVocabulary v = convert::parse_tokenizer_json(tokenizer, 9, {}, "test");
  using text::TokenType;
  EXPECT_EQ(v.model, "llama");
  EXPECT_EQ(v.types,
            (std::vector{TokenType::unknown, TokenType::control, TokenType::byte, TokenType::normal, TokenType::normal,
                         TokenType::normal, TokenType::normal, TokenType::user_defined, TokenType::unused}));
  EXPECT_EQ(v.scores[6], -1.0f);
  EXPECT_EQ(v.scores[5], -2.0f);
  EXPECT_TRUE(v.merges.empty());
  EXPECT_EQ(v.add_bos, true);
  EXPECT_EQ(v.add_space_prefix, true);
}

}  // namespace
}  // namespace hearth
