// Special tokens, options, decoding, and what holds for any text.
#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "builders.h"
#include "core/error.h"
#include "support/random.h"
#include "text/pretokenizer.h"
#include "text/utf8.h"

namespace hearth::text {
namespace {

using Ids = std::vector<int32_t>;
constexpr EncodeOptions kPlain = {.add_special = false, .parse_special = false};
constexpr EncodeOptions kParse = {.add_special = false, .parse_special = true};

std::string random_unicode(std::mt19937& rng, size_t n) {
  std::string text;
  for (size_t i = 0; i < n; ++i) {
    uint32_t c = 0;
    switch (test::random_int(rng, 0, 3)) {
      case 0:
        c = test::random_int(rng, 0, 0x7F);
        break;
      case 1:
        c = test::random_int(rng, 0x80, 0x7FF);
        break;
      case 2:
        c = test::random_int(rng, 0x800, 0xD7FF);
        break;
      default:
        c = test::random_int(rng, 0x10000, 0x10FFFF);
        break;
    }
    utf8::append(text, c);
  }
  return text;
}

std::string random_bytes(std::mt19937& rng, size_t n) {
  std::string text;
  for (size_t i = 0; i < n; ++i) text.push_back(static_cast<char>(test::random_int(rng, 0, 255)));
  return text;
}

TEST(Tokenizer, BosAndEosOnlyWhereTheVocabularyAndTheCallerAskForThem) {
  Vocab vocab = byte_vocab();
  vocab.bos = add_token(vocab, "<s>", TokenType::control);
  vocab.eos = add_token(vocab, "</s>", TokenType::control);
  vocab.add_bos = vocab.add_eos = true;
  EXPECT_EQ(Tokenizer::create(vocab)->encode("a"), (Ids{256, 'a', 257}));
  EXPECT_EQ(Tokenizer::create(vocab)->encode("a", kPlain), (Ids{'a'}));
  EXPECT_EQ(Tokenizer::create(vocab)->encode(""), (Ids{256, 257}));
  vocab.add_bos = vocab.add_eos = false;
  EXPECT_EQ(Tokenizer::create(vocab)->encode("a"), (Ids{'a'}));
}

TEST(Tokenizer, ControlTokensAreParsedOnDemandAndUserDefinedOnesAlways) {
  Vocab vocab = byte_vocab();
  const int32_t control = add_token(vocab, "<|x|>", TokenType::control);
  const int32_t user = add_token(vocab, "<u>", TokenType::user_defined);
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->encode("a<|x|><u>b", kParse), (Ids{'a', control, user, 'b'}));
  EXPECT_EQ(tokenizer->encode("<|x|><u>", kPlain), (Ids{'<', '|', 'x', '|', '>', user}));
}

TEST(Tokenizer, LongestSpecialTokenHasTheFirstChoiceOfTheText) {
  Vocab vocab = byte_vocab();
  const int32_t ab = add_token(vocab, "<ab", TokenType::control);
  const int32_t bcd = add_token(vocab, "abcd>", TokenType::control);
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->encode("<abcd>", kParse), (Ids{'<', bcd}));
  EXPECT_EQ(tokenizer->encode("<abc", kParse), (Ids{ab, 'c'}));
}

TEST(Tokenizer, SpecialTokensOfPhi3SwallowTheWhitespaceAfterThem) {
  Vocab vocab = byte_vocab();
  vocab.model_name = "Phi-3 mini";
  const int32_t user = add_token(vocab, "<|user|>", TokenType::control);
  const int32_t unk = add_token(vocab, "<unk>", TokenType::control);
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->encode("<|user|> \na", kParse), (Ids{user, 'a'}));
  EXPECT_EQ(tokenizer->encode("<unk> a", kParse), (Ids{unk, ' ', 'a'}));
}

TEST(Tokenizer, MaskOfJinaSwallowsTheWhitespaceBeforeIt) {
  Vocab vocab = byte_vocab();
  vocab.pre = "jina-v2-code";
  const int32_t mask = add_token(vocab, "<mask>", TokenType::control);
  EXPECT_EQ(Tokenizer::create(vocab)->encode("a  <mask> b", kParse), (Ids{'a', mask, ' ', 'b'}));
}

TEST(Tokenizer, MergesTheLowestRankFirstAndTheLeftmostAmongEquals) {
  const Vocab vocab = byte_vocab({{"b", "c"}, {"a", "b"}, {"a", "a"}, {"aa", "a"}});
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->encode("abc", kPlain), (Ids{'a', 256}));
  EXPECT_EQ(tokenizer->encode("abab", kPlain), (Ids{257, 257}));
  EXPECT_EQ(tokenizer->encode("aaaaa", kPlain), (Ids{258, 259}));  // aa aa a, then aa aaa
}

TEST(Tokenizer, MergeToATextThatIsNoTokenFallsBackToBytesUnlessMergedFurther) {
  Vocab vocab = byte_vocab({{"a", "b"}, {"ab", "c"}});
  vocab.tokens.erase(vocab.tokens.begin() + 256);  // "ab"; "abc" is now 256
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->encode("abc", kPlain), (Ids{256}));
  EXPECT_EQ(tokenizer->encode("abd", kPlain), (Ids{'a', 'b', 'd'}));
}

TEST(Tokenizer, Llama3TakesWordsThatAreTokensWithoutMerges) {
  Vocab vocab = byte_vocab();
  const int32_t word = add_token(vocab, "word", TokenType::normal);
  EXPECT_EQ(Tokenizer::create(vocab)->encode("word", kPlain), (Ids{'w', 'o', 'r', 'd'}));
  vocab.pre = "llama-bpe";
  EXPECT_EQ(Tokenizer::create(vocab)->encode("word", kPlain), (Ids{word}));
}

TEST(Tokenizer, BytesWithoutTokensBecomeTheUnknownToken) {
  Vocab vocab = byte_vocab();
  vocab.unk = add_token(vocab, "<unk>", TokenType::unknown);
  vocab.tokens['z'].text = "zz";
  EXPECT_EQ(Tokenizer::create(vocab)->encode("az", kPlain), (Ids{'a', 256}));
}

TEST(Tokenizer, PiecesOfSpecialTokensAreRenderedOnDemand) {
  Vocab vocab = byte_vocab({{"Ġ", "a"}});
  const int32_t control = add_token(vocab, "<|x|>", TokenType::control);
  const int32_t user = add_token(vocab, "<u>", TokenType::user_defined);
  const int32_t unused = add_token(vocab, "[PAD]", TokenType::unused);
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->piece(256), " a");
  EXPECT_EQ(tokenizer->piece(control), "");
  EXPECT_EQ(tokenizer->piece(control, true), "<|x|>");
  EXPECT_EQ(tokenizer->piece(user), "<u>");
  EXPECT_EQ(tokenizer->piece(unused, true), "");
  EXPECT_THROW(tokenizer->piece(-1), Error);
  EXPECT_THROW(tokenizer->piece(tokenizer->n_vocab()), Error);
}

TEST(Tokenizer, SpmSpacePrefixFollowsSpecialTokensAndIsTakenOffTheBeginning) {
  const auto tokenizer = Tokenizer::create(data_vocab("spm.gguf"));
  const Ids ids = tokenizer->encode("the girl");
  ASSERT_EQ(ids[0], *tokenizer->bos());
  EXPECT_EQ(tokenizer->piece(ids[1]), " the");
  EXPECT_EQ(tokenizer->decode(ids), "the girl");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("</s>the", kParse), true), "</s>the");
  EXPECT_EQ(tokenizer->encode("a</s>the", kParse).back(), ids[1])
      << "llama.cpp prefixes a space after special tokens too";
}

TEST(Tokenizer, SpmWithoutByteTokensNeedsAnUnknownToken) {
  Vocab vocab;
  vocab.kind = VocabKind::spm;
  add_token(vocab, "a", TokenType::normal);
  EXPECT_THROW(Tokenizer::create(vocab), Error);
  vocab.unk = add_token(vocab, "<unk>", TokenType::unknown);
  EXPECT_EQ(Tokenizer::create(vocab)->encode("ab", kPlain), (Ids{0, 1}));
}

TEST(Tokenizer, SpmMergesTheBestScoreFirst) {
  Vocab vocab;
  vocab.kind = VocabKind::spm;
  vocab.tokens = {
      {"<unk>", 0, TokenType::unknown}, {"a", -9}, {"b", -9}, {"c", -9}, {"ab", -2}, {"bc", -1}, {"abc", 3}};
  vocab.unk = 0;
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->encode("ab", kPlain), (Ids{4}));
  EXPECT_EQ(tokenizer->encode("abc", kPlain), (Ids{6}));
  EXPECT_EQ(tokenizer->encode("abcbc", kPlain), (Ids{6, 5}));
  vocab.tokens[6].text = "x";
  EXPECT_EQ(Tokenizer::create(vocab)->encode("abc", kPlain), (Ids{1, 5}));
}

TEST(Tokenizer, EndOfGenerationByIdAndByText) {
  Vocab vocab = byte_vocab();
  vocab.eos = 'e';
  const int32_t im_end = add_token(vocab, "<|im_end|>", TokenType::normal);
  const auto tokenizer = Tokenizer::create(vocab);
  EXPECT_EQ(tokenizer->end_of_generation(), (Ids{'e', im_end}));
  EXPECT_TRUE(tokenizer->is_end_of_generation(im_end));
  EXPECT_FALSE(tokenizer->is_end_of_generation('a'));
  EXPECT_EQ(tokenizer->piece(im_end), "") << "a control token, whatever the file calls it";
}

TEST(Tokenizer, HarmonyGoesOnAfterEnd) {
  Vocab vocab = byte_vocab();
  const int32_t end = add_token(vocab, "<|end|>", TokenType::control);
  EXPECT_TRUE(Tokenizer::create(vocab)->is_end_of_generation(end));
  add_token(vocab, "<|return|>", TokenType::control);
  add_token(vocab, "<|call|>", TokenType::control);
  EXPECT_FALSE(Tokenizer::create(vocab)->is_end_of_generation(end));
}

TEST(Tokenizer, DecodingGivesBackAnyBytes) {
  std::mt19937 rng(11);
  for (const char* name : {"bpe.gguf", "spm.gguf"}) {
    const auto tokenizer = Tokenizer::create(data_vocab(name));
    for (int i = 0; i < 300; ++i) {
      SCOPED_TRACE(testing::Message() << name << ", text " << i);
      const size_t n = test::random_int(rng, 0, 200);
      const std::string text = i % 2 == 0 ? random_unicode(rng, n) : random_bytes(rng, n);
      const Ids ids = tokenizer->encode(text, kPlain);
      for (const int32_t id : ids) ASSERT_TRUE(id >= 0 && id < tokenizer->n_vocab());
      ASSERT_EQ(tokenizer->decode(ids), text);
      ASSERT_EQ(tokenizer->decode(tokenizer->encode(text, kParse), true), text);
    }
  }
}

TEST(PreTokenizer, WordsOfEveryFamilyAreTheWholeText) {
  std::mt19937 rng(12);
  for (const char* pre : {"default", "gpt-2", "llama-bpe", "qwen2", "falcon", "starcoder", "bloom", "viking",
                          "deepseek-coder", "deepseek-llm", "deepseek-v3", "tekken", "gpt-4o", "seed-coder", "dbrx",
                          "qwen35"}) {
    ASSERT_TRUE(PreTokenizer::knows(pre));
    const PreTokenizer pre_tokenizer(pre);
    for (int i = 0; i < 60; ++i) {
      const std::string text = i % 2 == 0 ? random_unicode(rng, 100) : random_bytes(rng, 100);
      std::vector<std::string_view> words;
      pre_tokenizer.split(text, words);
      std::string joined;
      for (const std::string_view word : words) {
        ASSERT_FALSE(word.empty());
        joined += word;
      }
      ASSERT_EQ(joined, text) << pre;
    }
  }
}

TEST(PreTokenizer, UnknownNameMeansDefault) {
  EXPECT_FALSE(PreTokenizer::knows("no-such-model"));
  std::vector<std::string_view> words, expected;
  testing::internal::CaptureStderr();
  const PreTokenizer unknown("no-such-model");
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("no-such-model"), std::string::npos) << warning;
  unknown.split("ab 12345 c!? d", words);
  PreTokenizer("default").split("ab 12345 c!? d", expected);
  EXPECT_EQ(words, expected);
}

// Each text makes one word, or one match, of everything. Were any step quadratic, this would run out of time.
TEST(Tokenizer, LongWordsAreNoTrouble) {
  const size_t n = 400'000;
  std::string pairs;
  for (size_t i = 0; i < n / 2; ++i) pairs += " \n";
  std::mt19937 rng(13);
  const std::vector<std::string> texts = {
      std::string(n, 'a'),  std::string(n, ' '),      std::string(n, '\n'), std::string(n, '7'),
      std::string(n, '!'),  std::string(n, '\xFF'),   std::string(n, 'A'),  pairs,
      random_bytes(rng, n), std::string(n, ' ') + "x"};
  std::vector<std::unique_ptr<Tokenizer>> tokenizers;
  tokenizers.push_back(Tokenizer::create(data_vocab("spm.gguf")));
  for (const char* pre : {"gpt-2", "llama-bpe", "falcon", "tekken", "gpt-4o", "deepseek-v3"}) {
    Vocab vocab = data_vocab("bpe.gguf");
    vocab.pre = pre;
    tokenizers.push_back(Tokenizer::create(vocab));
  }
  for (const auto& tokenizer : tokenizers) {
    for (const std::string& text : texts) {
      ASSERT_EQ(tokenizer->decode(tokenizer->encode(text, kPlain)), text) << tokenizer->vocab().pre;
    }
  }
}

TEST(Tokenizer, ThousandsOfSpecialTokensAreNoTrouble) {
  Vocab vocab = byte_vocab();
  for (int i = 0; i < 5000; ++i) add_token(vocab, "<|reserved_" + std::to_string(i) + "|>", TokenType::control);
  const auto tokenizer = Tokenizer::create(vocab);
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += "<|reserved_1";
  text += "|>";
  const Ids ids = tokenizer->encode(text, kParse);
  EXPECT_EQ(ids.size(), text.size() - 14 + 1);
  EXPECT_EQ(ids.back(), 257);
}

}  // namespace
}  // namespace hearth::text
