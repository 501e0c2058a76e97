// Token ids compared with the reference libraries': llama.cpp's vectors (../shared/vocab), and those of Hugging Face's
// tokenizers and Google's sentencepiece for the small vocabularies in tests/data/vocab (made by make_vectors.py there).
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/file.h"
#include "gguf/gguf.h"
#include "support/paths.h"
#include "text/tokenizer.h"

namespace hearth::text {
namespace {

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + separator.size()) {
    parts.push_back(text.substr(begin, end - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::vector<int32_t> numbers(const std::string& line) {
  std::istringstream stream(line);
  std::vector<int32_t> result;
  for (int32_t n; stream >> n;) result.push_back(n);
  return result;
}

class LlamaCppVectors : public testing::TestWithParam<const char*> {};

TEST_P(LlamaCppVectors, EveryLineEqual) {
  const std::string name = std::string("vocab/ggml-vocab-") + GetParam() + ".gguf";
  HEARTH_NEEDS_SHARED(name);
  const auto path = test::shared_dir() / name;
  const auto tokenizer = Tokenizer::load(gguf::File::open(path));
  std::vector<std::string> texts = split(read_text_file(path.string() + ".inp"), "\n__ggml_vocab_test__\n");
  std::vector<std::string> lines = split(read_text_file(path.string() + ".out"), "\n");
  if (texts.back().empty()) texts.pop_back();
  if (lines.back().empty()) lines.pop_back();
  ASSERT_EQ(texts.size(), lines.size());
  ASSERT_GE(texts.size(), 40u);
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto ids = tokenizer->encode(texts[i], {.add_special = false, .parse_special = false});
    EXPECT_EQ(ids, numbers(lines[i])) << "text " << i << ": '" << texts[i] << "'";
    EXPECT_EQ(tokenizer->decode(ids), texts[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(, LlamaCppVectors, testing::Values("falcon", "gpt-2", "llama-spm"),
                         [](const auto& param_info) {
                           std::string name = param_info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

nlohmann::json load_json(const std::string& name) {
  return nlohmann::json::parse(read_text_file(test::data_dir() / "vocab" / name));
}

class PreTokenizerVectors : public testing::TestWithParam<const char*> {};

// One vocabulary whose tokens cross word boundaries, so that every difference in splitting shows in the ids.
TEST_P(PreTokenizerVectors, EqualToHuggingFace) {
  Vocab vocab = Vocab::load(gguf::File::open(test::data_dir() / "vocab" / "bpe.gguf"));
  vocab.pre = GetParam();
  const auto tokenizer = Tokenizer::create(vocab);
  const nlohmann::json vectors = load_json("bpe_vectors.json");
  const auto& texts = vectors["texts"];
  const auto& expected = vectors["ids"][GetParam()];
  ASSERT_GE(texts.size(), 40u);
  ASSERT_EQ(texts.size(), expected.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto text = texts[i].get<std::string>();
    const auto ids = tokenizer->encode(text, {.add_special = false});
    EXPECT_EQ(ids, expected[i].get<std::vector<int32_t>>()) << "text " << i << ": '" << text << "'";
    EXPECT_EQ(tokenizer->decode(ids, /*render_special=*/true), text);
  }
}

INSTANTIATE_TEST_SUITE_P(, PreTokenizerVectors,
                         testing::Values("gpt-2", "llama-bpe", "qwen2", "falcon", "starcoder", "bloom",
                                         "deepseek-coder", "deepseek-llm", "deepseek-v3", "tekken", "gpt-4o",
                                         "seed-coder", "qwen35", "viking"),
                         [](const auto& param_info) {
                           std::string name = param_info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

class SpmVectors : public testing::TestWithParam<bool> {};

TEST_P(SpmVectors, EqualToSentencePiece) {
  const bool remove_extra_whitespaces = GetParam();
  Vocab vocab = Vocab::load(gguf::File::open(test::data_dir() / "vocab" / "spm.gguf"));
  vocab.remove_extra_whitespaces = remove_extra_whitespaces;
  const auto tokenizer = Tokenizer::create(vocab);
  const nlohmann::json vectors = load_json("spm_vectors.json");
  const auto& texts = vectors["texts"];
  const auto& expected = vectors[remove_extra_whitespaces ? "ids_remove_extra_whitespaces" : "ids"];
  ASSERT_GE(texts.size(), 40u);
  ASSERT_EQ(texts.size(), expected.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto text = texts[i].get<std::string>();
    const auto ids = tokenizer->encode(text, {.add_special = false, .parse_special = false});
    EXPECT_EQ(ids, expected[i].get<std::vector<int32_t>>()) << "text " << i << ": '" << text << "'";
    if (!remove_extra_whitespaces) {
      EXPECT_EQ(tokenizer->decode(ids), text);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SpmVectors, testing::Bool(), [](const auto& param_info) {
  return param_info.param ? "remove_extra_whitespaces" : "as_is";
});

}  // namespace
}  // namespace hearth::text
