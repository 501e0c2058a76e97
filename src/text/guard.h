#pragma once
// Keeps control tokens that are written in messages from becoming those tokens when a chat template has put its own around them.
// A mark, which no template knows, goes in front of the character with which such a token would begin; templates copy, trim and
// join text with it as without it. Once rendered, the marks are taken out, and where they stood is told to the tokenizer.
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace hearth::text {

// The mark, a character for private use. One that stands in a message itself is written twice.
inline constexpr std::string_view kGuardMark = "\xF4\x8F\xBF\xBD";  // U+10FFFD

// `text` with marks; the same where it has nothing of control tokens.
std::string guarded(const std::string& text, const Tokenizer& tokenizer);

struct Unguarded {
  std::string text;
  std::vector<size_t> plain;  // positions of bytes behind a mark: EncodeOptions::plain
};
Unguarded unguarded(std::string_view rendered);

}  // namespace hearth::text
