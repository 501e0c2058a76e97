// Vocabularies that contradict themselves are refused with a message that names the key.
#include "text/vocab.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "builders.h"
#include "core/error.h"

namespace hearth::text {
namespace {

using Metadata = std::map<std::string, gguf::Value>;
using Strings = std::vector<std::string>;

Metadata good_bpe() {
  Metadata m;
  m["tokenizer.ggml.model"] = std::string("gpt2");
  m["tokenizer.ggml.pre"] = std::string("gpt-2");
  m["tokenizer.ggml.tokens"] = gguf::Array(Strings{"a", "b", "ab", "<s>"});
  m["tokenizer.ggml.token_type"] = gguf::Array(std::vector<int32_t>{1, 1, 1, 3});
  m["tokenizer.ggml.merges"] = gguf::Array(Strings{"a b"});
  m["tokenizer.ggml.bos_token_id"] = uint32_t{3};
  return m;
}

Metadata good_spm() {
  Metadata m;
  m["tokenizer.ggml.model"] = std::string("llama");
  m["tokenizer.ggml.tokens"] = gguf::Array(Strings{"<unk>", "<s>", "</s>", "<0x0A>", "\u2581a"});
  m["tokenizer.ggml.scores"] = gguf::Array(std::vector<float>{0, 0, 0, 0, -1});
  m["tokenizer.ggml.token_type"] = gguf::Array(std::vector<int32_t>{2, 3, 3, 6, 1});
  return m;
}

std::unique_ptr<Tokenizer> load(const Metadata& metadata) {
  const test::TempDir dir;
  gguf::Writer writer(dir / "vocab.gguf");
  writer.set("general.architecture", std::string("llama"));
  for (const auto& [key, value] : metadata) writer.set(key, value);
  writer.begin();
  writer.finish();
  return Tokenizer::load(gguf::File::open(dir / "vocab.gguf"));
}

TEST(Vocab, GoodOnesLoad) {
  const auto bpe = load(good_bpe());
  EXPECT_EQ(bpe->n_vocab(), 4);
  EXPECT_EQ(bpe->bos(), 3);
  EXPECT_EQ(bpe->eos(), std::nullopt);
  EXPECT_FALSE(bpe->add_bos());
  EXPECT_EQ(bpe->encode("ab"), (std::vector<int32_t>{2}));
  const auto spm = load(good_spm());
  EXPECT_EQ(spm->bos(), 1) << "SentencePiece's own numbering where the file is silent";
  EXPECT_EQ(spm->eos(), 2);
  EXPECT_TRUE(spm->add_bos());
  EXPECT_TRUE(spm->vocab().add_space_prefix);
  EXPECT_EQ(spm->encode("a\n"), (std::vector<int32_t>{1, 4, 3}));
}

TEST(Vocab, Llama3AddsBosUnlessToldOtherwise) {
  Metadata m = good_bpe();
  m["tokenizer.ggml.pre"] = std::string("llama-bpe");
  EXPECT_TRUE(load(m)->add_bos());
  m["tokenizer.ggml.add_bos_token"] = false;
  EXPECT_FALSE(load(m)->add_bos());
}

struct Damage {
  const char* name;
  bool spm;
  std::function<void(Metadata&)> apply;
  const char* message;  // part of it
};

class DamagedVocab : public testing::TestWithParam<Damage> {};

TEST_P(DamagedVocab, IsRefused) {
  Metadata metadata = GetParam().spm ? good_spm() : good_bpe();
  GetParam().apply(metadata);
  try {
    load(metadata);
    FAIL() << "was accepted";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find(GetParam().message), std::string::npos) << message;
    EXPECT_NE(message.find("vocab.gguf"), std::string::npos) << "names the file: " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

#define SET(key, value) [](Metadata& m) { m["tokenizer.ggml." key] = value; }
const Damage kDamages[] = {
    {"no_model", false, [](Metadata& m) { m.erase("tokenizer.ggml.model"); }, "tokenizer.ggml.model"},
    {"unknown_model", false, SET("model", std::string("rwkv")), "'rwkv'"},
    {"model_is_a_number", false, SET("model", uint32_t{1}), "tokenizer.ggml.model"},
    {"no_tokens", false, [](Metadata& m) { m.erase("tokenizer.ggml.tokens"); }, "tokenizer.ggml.tokens"},
    {"empty_tokens", false, SET("tokens", gguf::Array(Strings{})), "empty"},
    {"tokens_are_numbers", false, SET("tokens", gguf::Array(std::vector<int32_t>{1})), "tokenizer.ggml.tokens"},
    {"few_types", false, SET("token_type", gguf::Array(std::vector<int32_t>{1, 1, 1})), "token_type has 3"},
    {"many_types", false, SET("token_type", gguf::Array(std::vector<int32_t>(9, 1))), "token_type has 9"},
    {"type_out_of_range", false, SET("token_type", gguf::Array(std::vector<int32_t>{1, 1, 7, 3})),
     "token_type[2] is 7"},
    {"negative_type", false, SET("token_type", gguf::Array(std::vector<int32_t>{1, -1, 1, 3})), "token_type[1] is -1"},
    {"no_merges", false, [](Metadata& m) { m.erase("tokenizer.ggml.merges"); }, "tokenizer.ggml.merges"},
    {"merge_without_space", false, SET("merges", gguf::Array(Strings{"a b", "ab"})), "merges[1] is 'ab'"},
    {"merge_without_right", false, SET("merges", gguf::Array(Strings{"a "})), "merges[0]"},
    {"merge_without_left", false, SET("merges", gguf::Array(Strings{" b"})), "merges[0]"},
    {"empty_merge", false, SET("merges", gguf::Array(Strings{""})), "merges[0]"},
    {"bos_out_of_range", false, SET("bos_token_id", uint32_t{4}), "bos_token_id is 4"},
    {"eos_out_of_range", false, SET("eos_token_id", uint32_t{4000000000u}), "eos_token_id is 4000000000"},
    {"negative_eot", false, SET("eot_token_id", int32_t{-1}), "eot_token_id is -1"},
    {"unknown_out_of_range", false, SET("unknown_token_id", uint64_t{1} << 40), "unknown_token_id"},
    {"bos_is_a_string", false, SET("bos_token_id", std::string("<s>")), "bos_token_id"},
    {"adds_eos_it_has_not", false, SET("add_eos_token", true), "add_eos_token"},
    {"add_bos_is_a_number", false, SET("add_bos_token", 1.5f), "add_bos_token"},
    {"template_is_a_number", false, [](Metadata& m) { m["tokenizer.chat_template"] = 1.0f; }, "chat_template"},
    {"no_scores", true, [](Metadata& m) { m.erase("tokenizer.ggml.scores"); }, "tokenizer.ggml.scores"},
    {"few_scores", true, SET("scores", gguf::Array(std::vector<float>{1})), "scores has 1"},
    {"nan_score", true,
     SET("scores", gguf::Array(std::vector<float>{0, 0, 0, std::numeric_limits<float>::quiet_NaN(), 0})), "scores[3]"},
    {"byte_token_without_byte", true, SET("tokens", gguf::Array(Strings{"<unk>", "<s>", "</s>", "<0xZZ>", "a"})),
     "tokens[3] is '<0xZZ>'"},
};
INSTANTIATE_TEST_SUITE_P(, DamagedVocab, testing::ValuesIn(kDamages),
                         [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace hearth::text
