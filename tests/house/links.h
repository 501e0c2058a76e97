#pragma once
// Links of Markdown files: relative paths and anchors, as GitHub resolves them.
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace hearth::test {

// The text without fenced blocks and `code`.
inline std::string without_code(const std::string& markdown) {
  static const std::regex code(R"(`[^`\n]*`)");
  std::istringstream lines(markdown);
  std::string out;
  bool fenced = false;
  for (std::string line; std::getline(lines, line);) {
    const bool fence = line.rfind("```", 0) == 0;
    fenced ^= fence;
    if (!fenced && !fence) out += line + "\n";
  }
  return std::regex_replace(out, code, "");
}

// The sentences of a page's prose: no tables, no comments, no code.
inline std::vector<std::string> sentences(const std::string& markdown) {
  static const std::regex end_of_one(R"(([.!?:])\s)");
  std::istringstream lines(without_code(markdown));
  std::vector<std::string> found;
  std::string paragraph;
  const auto flush = [&] {
    paragraph = std::regex_replace(paragraph, end_of_one, "$1\n");
    std::istringstream parts(paragraph);
    for (std::string s; std::getline(parts, s);) {
      if (s.find_first_not_of(' ') != std::string::npos) found.push_back(s);
    }
    paragraph.clear();
  };
  for (std::string line; std::getline(lines, line);) {
    const bool prose = !line.empty() && line[0] != '|' && line[0] != '<';
    if (!prose || line[0] == '#' || line[0] == '-') flush();
    if (prose) paragraph += line + (line[0] == '#' ? ".\n" : " ");
  }
  flush();
  return found;
}

// Numbers that stand alone, dates as one; those in names (H200) and in links' targets do not count.
inline int figures_in(const std::string& sentence) {
  static const std::regex target(R"(\]\([^)]*\))"), figure(R"((^|[^\w.,-])\d[\d.,-]*)");
  const std::string text = std::regex_replace(sentence, target, "]");
  return static_cast<int>(std::distance(std::sregex_iterator(text.begin(), text.end(), figure), {}));
}

// "## The floor, by `type`" -> "the-floor-by-type".
inline std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == ' ') anchor += '-';
    if (std::isalnum(byte) || c == '-' || c == '_' || byte >= 0x80) anchor += static_cast<char>(std::tolower(byte));
  }
  return anchor;
}

inline std::set<std::string> anchors_of(const std::string& markdown) {
  std::istringstream lines(markdown);
  std::set<std::string> anchors;
  std::map<std::string, int> seen;
  bool fenced = false;
  for (std::string line; std::getline(lines, line);) {
    fenced ^= line.rfind("```", 0) == 0;
    if (fenced || line.rfind('#', 0) != 0) continue;
    const size_t text = line.find_first_not_of('#');
    if (text == std::string::npos || line[text] != ' ') continue;
    const std::string anchor = anchor_of(line.substr(text + 1));
    const int before = seen[anchor]++;
    anchors.insert(before == 0 ? anchor : anchor + "-" + std::to_string(before));
  }
  return anchors;
}

// The dead ones among the links of a file's text, with the reason. Links with a scheme (https:) are not followed.
inline std::vector<std::string> dead_links(const std::filesystem::path& file, const std::string& text) {
  static const std::regex link(R"(\]\(([^()\s]+)\))"), scheme("^[a-z]+:.*");
  const auto read = [](const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string{std::istreambuf_iterator<char>(in), {}};
  };
  std::vector<std::string> dead;
  const std::string prose = without_code(text);
  for (std::sregex_iterator m(prose.begin(), prose.end(), link), end; m != end; ++m) {
    const std::string target = (*m)[1];
    if (std::regex_match(target, scheme)) continue;
    const size_t hash = target.find('#');
    const std::string path = target.substr(0, hash);
    const auto to = path.empty() ? file : file.parent_path() / path;
    if (!path.empty() && !std::filesystem::exists(to)) {
      dead.push_back(target + ": there is no such file");
    } else if (hash != std::string::npos &&
               !anchors_of(path.empty() ? text : read(to)).contains(target.substr(hash + 1))) {
      dead.push_back(target + ": there is no such heading");
    }
  }
  return dead;
}

}  // namespace hearth::test
