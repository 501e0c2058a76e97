#pragma once
// UTF-8 one sequence at a time (Unicode 15, table 3-7: no surrogates, no overlong forms, nothing above U+10FFFF).
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hearth::text::utf8 {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Step {
  enum class Kind {
    valid,       // `length` bytes are one character
    invalid,     // `length` bytes (a maximal ill-formed part, 1 to 3) can never become one
    incomplete,  // the whole rest, `length` bytes, is the beginning of a character
  };
  Kind kind;
  size_t length;
};
// `bytes` must not be empty.
Step next(std::string_view bytes);

// Length of the longest prefix that is valid UTF-8.
size_t valid_prefix(std::string_view bytes);

// Decodes one valid sequence, as next() measured it.
uint32_t code_point(std::string_view sequence);
void append(std::string& text, uint32_t code_point);

}  // namespace hearth::text::utf8
