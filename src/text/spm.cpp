#include "text/spm.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/error.h"
#include "text/utf8.h"

namespace hearth::text {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581, which stands for a space in the tokens' texts

// Orders floats descending as unsigned integers ascending.
uint32_t descending(float score) {
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes +0
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return ~ascending;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// Calls visit(offset, length, pair) for each character; bytes that are not UTF-8 count as one each. `pair` identifies
// the character together with the one before it.
template <typename Visit>
void for_each_character(std::string_view text, const Visit& visit) {
  uint64_t before = UINT32_MAX;
  for (size_t i = 0; i < text.size();) {
    const utf8::Step step = utf8::next(text.substr(i));
    const bool valid = step.kind == utf8::Step::Kind::valid;
    const size_t length = valid ? step.length : 1;
    const uint64_t character =
        valid ? utf8::code_point(text.substr(i, length)) : 0x80000000u | static_cast<uint8_t>(text[i]);
    visit(i, length, before << 32 | character);
    before = character;
    i += length;
  }
}

}  // namespace

int parse_byte_token(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text.back() != '>') return -1;
  const int high = hex_digit(text[3]), low = hex_digit(text[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

SpmTokenizer::SpmTokenizer(Vocab vocab) : Tokenizer(std::move(vocab)) {
  for (const auto& token : vocab_.tokens) longest_token_ = std::max(longest_token_, token.text.size());
  for (const auto& token : vocab_.tokens) {
    for_each_character(token.text, [&](size_t at, size_t, uint64_t pair) {
      if (at > 0) neighbours_.insert(pair);
    });
  }
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    auto id = find(fmt::format("<0x{:02X}>", b));
    if (!id) id = find({&byte, 1});
    if (!id) id = vocab_.unk;
    if (!id) {
      fail(
          "the vocabulary has neither a token for byte 0x{:02X} nor an unknown token "
          "(tokenizer.ggml.unknown_token_id): "
          "some texts could not be encoded",
          b);
    }
    byte_tokens_[b] = *id;
  }
}

// The text as the tokens spell it.
std::string SpmTokenizer::normalise(std::string_view text, bool after_special) const {
  std::string result;
  result.reserve(text.size() + text.size() / 2 + kSpace.size());
  const bool squeeze = vocab_.remove_extra_whitespaces;
  if (squeeze) {
    const size_t first = std::min(text.find_first_not_of(' '), text.size());
    text = text.substr(first, text.find_last_not_of(' ') + 1 - first);
    if (text.empty()) return result;
  }
  if (vocab_.add_space_prefix && after_special) result += kSpace;
  bool space = false;
  for (const char c : text) {
    if (c != ' ') {
      result += c;
    } else if (!squeeze || !space) {
      result += kSpace;
    }
    space = c == ' ';
  }
  return result;
}

void SpmTokenizer::encode_text(std::string_view raw, bool after_special, std::vector<int32_t>& ids) const {
  const std::string text = normalise(raw, after_special);
  Merger merger;
  size_t begin = 0;
  for_each_character(text, [&](size_t at, size_t length, uint64_t pair) {
    if (at > begin && !neighbours_.contains(pair)) {
      encode_segment(std::string_view(text).substr(begin, at - begin), merger, ids);
      merger.clear();
      begin = at;
    }
    merger.add(static_cast<uint32_t>(at - begin), static_cast<uint32_t>(length), -1);
  });
  encode_segment(std::string_view(text).substr(begin), merger, ids);
}

void SpmTokenizer::encode_segment(std::string_view text, Merger& merger, std::vector<int32_t>& ids) const {
  merger.run([&](const Symbol& left, const Symbol& right, MergeTo& merge) {
    const size_t length = size_t{left.length} + right.length;
    if (length > longest_token_) return false;  // keeps each look-up short
    const auto id = find(text.substr(left.begin, length));
    if (!id || is_special(*id)) return false;  // SentencePiece makes no control token of text, either
    merge = {descending(vocab_.tokens[*id].score), *id};
    return true;
  });
  merger.for_each([&](const Symbol& symbol) {
    const std::string_view piece = text.substr(symbol.begin, symbol.length);
    if (const auto id = find(piece); id && !is_special(*id)) {
      ids.push_back(*id);
      return;
    }
    for (const char c : piece) ids.push_back(byte_tokens_[static_cast<uint8_t>(c)]);
  });
}

std::string SpmTokenizer::normal_piece(int32_t id) const {
  const Vocab::Token& token = vocab_.tokens[id];
  if (token.type == TokenType::byte) {
    const int byte = parse_byte_token(token.text);
    HEARTH_CHECK(byte >= 0);
    return std::string(1, static_cast<char>(byte));
  }
  std::string result;
  for (size_t i = 0; i < token.text.size();) {
    if (token.text.compare(i, kSpace.size(), kSpace) == 0) {
      result += ' ';
      i += kSpace.size();
    } else {
      result += token.text[i++];
    }
  }
  return result;
}

}  // namespace hearth::text
