#pragma once
// The commands that README and docs show: lines of fenced blocks, and examples of --help.
#include <map>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace hearth::test {

struct Shown {
  std::string where, line;        // page and number; as it stands there
  std::vector<std::string> args;  // the program first, quotes removed
};

// Words of a shell's line, up to a comment, a redirection or the end of the command; `rest` is what follows `;` or `&&`.
inline std::vector<std::string> words_of(const std::string& line, std::string& rest) {
  std::vector<std::string> words;
  std::string word;
  bool open = false;
  char quote = 0;
  const auto end_word = [&] {
    if (open) words.push_back(word);
    word.clear(), open = false;
  };
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote != 0) {
      if (c == quote) {
        quote = 0;
      } else {
        word += c;
      }
    } else if (c == '"' || c == '\'') {
      quote = c, open = true;
    } else if (c == ' ') {
      end_word();
    } else if (!open && c == '#') {
      break;
    } else if (c == ';' || (c == '&' && line.compare(i, 2, "&&") == 0)) {
      rest = line.substr(line.find_first_not_of("&; ", i));
      break;
    } else if (!open && c == '>') {
      break;
    } else {
      word += c, open = true;
    }
  }
  end_word();
  return words;
}

// Of a page: every line of a fence without a language, with what a `\` continues; where a fence has lines that begin
// with "$ ", those alone, and the others are output. NAME="..." is put in the place of $NAME further down.
inline std::vector<Shown> shown_commands(const std::string& page, const std::string& markdown) {
  static const std::regex assignment(R"re(^(\w+)="([^"]*)"$)re");
  std::vector<Shown> shown;
  std::map<std::string, std::string> variables;
  std::vector<std::pair<int, std::string>> block;
  const auto flush = [&] {
    bool prompts = false;
    for (const auto& [number, text] : block) prompts |= text.rfind("$ ", 0) == 0;
    for (const auto& [number, text] : block) {
      if (prompts && text.rfind("$ ", 0) != 0) continue;
      std::string line = prompts ? text.substr(2) : text;
      std::smatch m;
      if (std::regex_match(line, m, assignment)) {
        variables["$" + m[1].str()] = m[2];
        continue;
      }
      for (const auto& [name, value] : variables) {
        if (const size_t at = line.find(name + " "); at != std::string::npos) line.replace(at, name.size(), value);
      }
      while (!line.empty()) {
        std::string rest;
        std::vector<std::string> args = words_of(line, rest);
        if (!args.empty()) shown.push_back({page + ":" + std::to_string(number), line, std::move(args)});
        line = rest;
      }
    }
    block.clear();
  };
  std::istringstream lines(markdown);
  std::string fence;  // its first line while it is open
  int number = 0;
  bool goes_on = false;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.rfind("```", 0) == 0) {
      if (!fence.empty()) flush();
      fence = fence.empty() ? line : "";
      continue;
    }
    if (fence != "```" || line.empty()) continue;
    const bool more = line.back() == '\\';
    if (more) line.pop_back();
    if (goes_on) {
      block.back().second += line;
    } else {
      block.emplace_back(number, line);
    }
    goes_on = more;
  }
  return shown;
}

// `hearth ...` within a text, and the examples of a page made from --help.
inline std::vector<Shown> inline_commands(const std::string& page, const std::string& markdown) {
  static const std::regex code(R"(`(hearth [a-z][^`]*)`)");
  std::vector<Shown> shown;
  for (std::sregex_iterator m(markdown.begin(), markdown.end(), code), end; m != end; ++m) {
    std::string line = (*m)[1], rest;
    for (char& c : line) c = c == '\n' ? ' ' : c;
    shown.push_back({page, line, words_of(line, rest)});
  }
  return shown;
}
inline std::vector<Shown> examples(const std::string& page, const std::string& help) {
  std::vector<Shown> shown;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("Example: ", 0) != 0) continue;
    std::string rest;
    shown.push_back({page, line, words_of(line.substr(9), rest)});
  }
  return shown;
}

}  // namespace hearth::test
