#include "tools/prompt.h"

#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace hearth::tools {
namespace {

std::string read_stdin() {
  if (isatty(STDIN_FILENO) != 0) log::info("reading the prompt from standard input; Ctrl-D ends it");
  std::string text;
  char buffer[1 << 16];
  while (const size_t n = std::fread(buffer, 1, sizeof buffer, stdin)) text.append(buffer, n);
  if (std::ferror(stdin) != 0) fail("standard input could not be read: {}", std::strerror(errno));
  return text;
}

}  // namespace

void add_prompt_options(CLI::App& sub, PromptOptions& o) {
  auto* p = sub.add_option("-p,--prompt", o.prompt, "Prompt text (default: standard input)")
                ->type_name("TEXT")
                ->group("Prompt");
  sub.add_option("-f,--file", o.file, "Read the prompt from a file; - is standard input")
      ->type_name("FILE")
      ->group("Prompt")
      ->excludes(p);
  sub.add_flag("-e,--escape", o.escape, "Read \\n, \\t, \\\\, \\\", \\xHH in the prompt as the bytes they stand for")
      ->group("Prompt");
}

std::string read_prompt(const PromptOptions& o) {
  std::string text;
  if (o.prompt) {
    text = *o.prompt;
  } else {
    text = o.file && *o.file != "-" ? read_text_file(*o.file) : read_stdin();
    if (!text.empty() && text.back() == '\n') text.pop_back();
  }
  return o.escape ? unescape(text) : text;
}

std::string unescape(const std::string& text) {
  static constexpr std::string_view kLetters = "nrt\\\"'", kBytes = "\n\r\t\\\"'";
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    const size_t letter = next != '\0' ? kLetters.find(next) : std::string_view::npos;
    if (text[i] != '\\') {
      out += text[i];
    } else if (letter != std::string_view::npos) {
      out += kBytes[letter], ++i;
    } else if (next == 'x' && i + 3 < text.size() && std::isxdigit(static_cast<unsigned char>(text[i + 2])) != 0 &&
               std::isxdigit(static_cast<unsigned char>(text[i + 3])) != 0) {
      out += static_cast<char>(std::stoi(text.substr(i + 2, 2), nullptr, 16)), i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace hearth::tools
