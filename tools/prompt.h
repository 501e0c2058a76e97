#pragma once
// Where a text comes from: -p, -f, or standard input.
#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace hearth::tools {

struct PromptOptions {
  std::optional<std::string> prompt;
  std::optional<std::string> file;  // "-": standard input
  bool escape = false;
};
void add_prompt_options(CLI::App& sub, PromptOptions& options);

// The text; standard input when neither flag was given. One newline at the end of a file is taken off, as llama.cpp
// does. Throws Error when it cannot be read.
std::string read_prompt(const PromptOptions& options);

// \n \r \t \\ \" \' and \xHH become the bytes they stand for; any other backslash stays.
std::string unescape(const std::string& text);

}  // namespace hearth::tools
