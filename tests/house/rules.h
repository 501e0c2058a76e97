#pragma once
// The rules of the house as a function of one file's path and text, so that the test can show that each rule bites.
#include <algorithm>
#include <array>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace hearth::test {

// Who includes whom: exactly these, in the code, in CMake and in docs/explanation/architecture.md. A folder may always include
// itself; tests and bench everything.
struct Arrows {
  std::string_view from;
  std::vector<std::string_view> to;
};
inline const std::vector<Arrows>& arrows() {
  static const std::vector<Arrows> table = {
      {"core", {}},
      {"hub", {"core"}},
      {"gguf", {"core"}},
      {"text", {"gguf", "core"}},
      {"cpu", {"core"}},
      {"cuda", {"core"}},
      {"model", {"gguf", "core"}},
      {"predictor", {"core"}},
      {"engine", {"model", "core"}},
      {"serve", {"engine", "text", "core"}},
      {"offline", {"engine", "predictor", "model", "text", "gguf", "core"}},
      {"tools", {"serve", "offline", "engine", "model", "cuda", "cpu", "text", "gguf", "hub", "core"}},
  };
  return table;
}

constexpr int kMostLines = 500;

// "src/engine/forward.cpp" -> "engine", "cpu/isa.cpp" -> "cpu", "CMakeLists.txt" -> "".
inline std::string module_of(const std::string& path) {
  std::string rest = path.rfind("src/", 0) == 0 ? path.substr(4) : path;
  const size_t slash = rest.find('/');
  return slash == std::string::npos ? std::string() : rest.substr(0, slash);
}

inline bool ends_with(const std::string& s, std::string_view end) {
  return s.size() >= end.size() && s.compare(s.size() - end.size(), end.size(), end) == 0;
}

namespace detail {

inline const Arrows* arrows_of(const std::string& module) {
  for (const Arrows& a : arrows()) {
    if (a.from == module) return &a;
  }
  return nullptr;
}

inline std::string check_include(const std::string& path, const std::string& target, bool quoted) {
  static const std::regex cuda_header(
      R"((cuda|cuda_\w+|cuda_runtime\w*|cublas\w*|cublas_\w+|cooperative_groups|mma|nvml|nvToolsExt|device_\w+_parameters)\.h|cub/.*|cuda/std/.*|thrust/.*|cooperative_groups/.*)");
  if (std::regex_match(target, cuda_header) && !(quoted && target == "cuda/cuda.h")) {
    if (!ends_with(path, ".cu") && !ends_with(path, ".cuh")) return "CUDA header <" + target + "> outside .cu and .cuh";
    return {};
  }
  const Arrows* from = arrows_of(module_of(path));
  const size_t slash = target.find('/');
  if (!quoted || from == nullptr || slash == std::string::npos) return {};
  const std::string to = target.substr(0, slash);
  if (to == from->from || std::find(from->to.begin(), from->to.end(), to) != from->to.end()) return {};
  return std::string(from->from) + " may not include \"" + target + "\"";
}

}  // namespace detail

// What is wrong with a source file, one "PATH:LINE: what" each. `path` is relative to the repository, with slashes.
inline std::vector<std::string> violations(const std::string& path, const std::string& text) {
  static const std::regex include(R"(^\s*#\s*include\s*(["<])([^">]+)[">].*)");
  static const std::regex unfinished(R"(.*\b()"
                                     "TO"
                                     "DO|FIX"
                                     "ME|X"
                                     "XX"
                                     R"()\b.*)");
  static const std::regex conditional(R"(^\s*#\s*(if|ifdef|ifndef|elif)\b.*\bHEARTH_(HAS_)?CUDA\b.*)");
  const bool source =
      ends_with(path, ".cpp") || ends_with(path, ".h") || ends_with(path, ".cu") || ends_with(path, ".cuh");
  std::vector<std::string> found;
  std::istringstream lines(text);
  int number = 0;
  const auto add = [&](const std::string& what) { found.push_back(path + ":" + std::to_string(number) + ": " + what); };
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::smatch match;
    if (line.size() > 4000) continue;  // data, and std::regex recurses
    if (std::regex_match(line, unfinished)) add("unfinished work is marked here");
    if (!source) continue;
    if (std::regex_match(line, match, include)) {
      const std::string problem = detail::check_include(path, match[2], match[1] == "\"");
      if (!problem.empty()) add(problem);
    }
    if (module_of(path) != "cuda" && std::regex_match(line, conditional)) {
      add("whether CUDA is there is decided in cuda/ and CMake only");
    }
  }
  if (source && number > kMostLines) add("the file has more than " + std::to_string(kMostLines) + " lines");
  return found;
}

}  // namespace hearth::test
