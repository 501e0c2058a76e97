#pragma once
// Splits a template into its texts and the tokens of its tags, with the whitespace rules that transformers sets: trim_blocks,
// lstrip_blocks, no trailing newline.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hearth::text::jinja {

struct Position {
  int line = 1, column = 1;  // column in bytes
};

// Throws hearth::Error "chat template, line L, column C: what".
[[noreturn]] void fail_at(Position at, const std::string& what);

struct Token {
  enum class Kind {
    text,         // between the tags
    print_begin,  // {{
    print_end,
    block_begin,  // {%
    block_end,
    name,
    string,
    integer,
    real,
    op,  // operators and brackets, by `text`
    end,
  };
  Kind kind;
  std::string text;  // of strings: what they mean
  Position at;
};

// Throws Error with the position of what is not closed or not known.
std::vector<Token> tokenize(std::string_view source);

}  // namespace hearth::text::jinja
