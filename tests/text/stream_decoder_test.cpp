#include "text/stream_decoder.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "builders.h"
#include "core/error.h"
#include "support/random.h"
#include "text/utf8.h"

namespace hearth::text {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

bool is_utf8(std::string_view text) {
  return utf8::valid_prefix(text) == text.size();
}

TEST(Utf8, AcceptsEveryCharacterAndNothingElse) {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    utf8::append(text, c);
    const utf8::Step step = utf8::next(text);
    ASSERT_EQ(step.kind, utf8::Step::Kind::valid) << c;
    ASSERT_EQ(step.length, text.size()) << c;
    ASSERT_EQ(utf8::code_point(text), c);
    for (size_t n = 1; n < text.size(); ++n) {
      ASSERT_EQ(utf8::next(std::string_view(text).substr(0, n)).kind, utf8::Step::Kind::incomplete) << c;
    }
  }
  for (const char* text : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
                           "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xE2\x28\xA1"}) {
    EXPECT_EQ(utf8::next(text).kind, utf8::Step::Kind::invalid) << text;
  }
}

TEST(Utf8Stream, ReplacesMaximalSubparts) {
  // The example of Unicode 15, table 3-11.
  Utf8Stream stream;
  EXPECT_EQ(stream.push("\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64"),
            "a" + kBad + kBad + kBad + "b" + kBad + "c" + kBad + kBad + "d");
  EXPECT_EQ(stream.flush(), "");
}

TEST(Utf8Stream, HoldsBackOnlyWhatMayBeCompleted) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xE2"), "a");
  EXPECT_EQ(stream.push("\x82"), "");
  EXPECT_EQ(stream.push("\xAC!"), "€!");
  EXPECT_EQ(stream.push("\xF0\x9F"), "");
  EXPECT_EQ(stream.push("x"), kBad + "x");
  EXPECT_EQ(stream.push("\xF0\x9F\x98"), "");
  EXPECT_EQ(stream.flush(), kBad);
  EXPECT_EQ(stream.flush(), "");
}

TEST(Utf8Stream, SameTextWhereverItIsCut) {
  std::mt19937 rng(31);
  std::vector<std::string> texts = {"aé€😀z", "\xF0\x9F\x98\xE2\x82é\xFF\xC3", "नमस्ते 🏳️‍🌈"};
  for (int i = 0; i < 200; ++i) {
    std::string text;
    for (int j = 0; j < 12; ++j) text.push_back(static_cast<char>(test::random_int(rng, 0x60, 0xFF)));
    texts.push_back(text);
  }
  for (const std::string& text : texts) {
    Utf8Stream whole;
    std::string expected = whole.push(text);
    expected += whole.flush();
    ASSERT_TRUE(is_utf8(expected));
    for (size_t a = 0; a <= text.size(); ++a) {
      for (size_t b = a; b <= text.size(); ++b) {
        Utf8Stream stream;
        std::string result;
        for (const auto& part : {text.substr(0, a), text.substr(a, b - a), text.substr(b)}) {
          const std::string ready = stream.push(part);
          ASSERT_TRUE(is_utf8(ready));
          result += ready;
        }
        result += stream.flush();
        ASSERT_EQ(result, expected) << a << " " << b;
      }
    }
  }
}

TEST(StreamDecoder, JoinsTheBytesOfTokens) {
  Vocab vocab = byte_vocab();
  const int32_t control = add_token(vocab, "<|x|>", TokenType::control);
  const auto tokenizer = Tokenizer::create(vocab);
  const std::string text = "né €😀 \xFF!";
  std::string streamed;
  StreamDecoder decoder(*tokenizer);
  for (const int32_t id : tokenizer->encode(text, {.add_special = false})) {
    const std::string ready = decoder.push(id);
    EXPECT_TRUE(is_utf8(ready));
    streamed += ready;
    EXPECT_EQ(decoder.push(control), "") << "tokens without text do not disturb a character";
  }
  EXPECT_EQ(streamed + decoder.flush(), "né €😀 " + kBad + "!");
  EXPECT_EQ(StreamDecoder(*tokenizer, /*render_special=*/true).push(control), "<|x|>");
}

TEST(StopMatcher, StopsAtTheFirstMatchWhereverTheTextIsCut) {
  struct Case {
    std::vector<std::string> stops;
    std::string text, printed;
    bool stopped;
  };
  const std::vector<Case> cases = {
      {{"\nUser:"}, "Hi\nUsed\nUser: x", "Hi\nUsed", true},
      {{"aab"}, "aaaabaab", "aa", true},
      {{"abcd", "bc"}, "xabcd", "xa", true},  // "bc" is complete first
      {{"abce", "bc"}, "xabcd", "xa", true},  // the longer one fails, the shorter one inside it does not
      {{"bc", "abc"}, "xabc", "x", true},     // they end together: the longer
      {{"END", "."}, "a.END", "a", true},
      {{"</s>"}, "a</s", "a</s", false},
      {{"zz"}, "nothing", "nothing", false},
      {{}, "text", "text", false},
      {{"é"}, "caf\xC3\xA9!", "caf", true},
  };
  for (const Case& c : cases) {
    for (size_t a = 0; a <= c.text.size(); ++a) {
      for (size_t b = a; b <= c.text.size(); ++b) {
        SCOPED_TRACE(testing::Message() << c.text << " cut at " << a << " and " << b);
        StopMatcher matcher(c.stops);
        std::string printed;
        for (const auto& part : {c.text.substr(0, a), c.text.substr(a, b - a), c.text.substr(b)}) {
          printed += matcher.push(part);
          ASSERT_TRUE(c.printed.starts_with(printed)) << printed;
        }
        printed += matcher.flush();
        ASSERT_EQ(printed, c.printed);
        ASSERT_EQ(matcher.stopped(), c.stopped);
      }
    }
  }
}

TEST(StopMatcher, HoldsBackNoMoreThanABeginning) {
  StopMatcher matcher({"abab"});
  EXPECT_EQ(matcher.push("xab"), "x");
  EXPECT_EQ(matcher.push("a"), "");
  EXPECT_EQ(matcher.push("c"), "abac");
  EXPECT_EQ(matcher.push("abab"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.push("more"), "");
  EXPECT_THROW(StopMatcher({"a", ""}), Error);
}

}  // namespace
}  // namespace hearth::text
