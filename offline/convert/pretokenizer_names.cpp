// Which of llama.cpp's pre-tokenizers a tokenizer.json describes. llama.cpp's own converter hashes the tokens of a test
// text instead; the structure says the same without running the tokenizer, and says what differs when nothing fits.
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "offline/convert/hf_tokenizer.h"

namespace hearth::convert {
namespace {

#define GPT2_SPLIT R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"
#define CONTRACTION R"((?i:'s|'t|'re|'ve|'m|'ll|'d))"
#define CL100K_SPLIT(digits) \
  CONTRACTION R"(|[^\r\n\p{L}\p{N}]?\p{L}+|)" digits R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"
#define UPPER R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
#define LOWER R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])"
#define CASED_SPLIT(suffix, digits)                                                                                 \
  R"([^\r\n\p{L}\p{N}]?)" UPPER "*" LOWER "+" suffix R"(|[^\r\n\p{L}\p{N}]?)" UPPER "+" LOWER "*" suffix "|" digits \
  R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"

// The steps of a pre-tokenizer, in order, each in words; see describe().
struct Signature {
  std::vector<std::string_view> steps;
  std::string_view name;
};
const std::vector<Signature>& signatures() {
  static const std::vector<Signature> all = {
      {{"bytes+words"}, "gpt-2"},
      {{"split " GPT2_SPLIT, "bytes"}, "gpt-2"},
      {{"split " CL100K_SPLIT(R"(\p{N}{1,3})"), "bytes"}, "llama-bpe"},
      {{"split " CL100K_SPLIT(R"(\p{N})"), "bytes"}, "qwen2"},
      {{"split " CONTRACTION
        R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
        "bytes"},
       "qwen35"},
      {{"punctuation", "bytes+words", "digits", "split [0-9][0-9][0-9]"}, "falcon"},
      {{"single digits", "bytes+words"}, "starcoder"},
      {{"split " CASED_SPLIT("", R"(\p{N})"), "bytes"}, "tekken"},
      {{"split " CASED_SPLIT(CONTRACTION "?", R"(\p{N}{1,3})"), "bytes"}, "gpt-4o"},
      {{R"(split [\r\n])", R"(split \s?\p{L}+)", R"(split \s?\p{P}+)", "split [一-龥ࠀ-一가-퟿]+",
        "single digits", "bytes"},
       "deepseek-coder"},
  };
  return all;
}

std::string member_text(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}
bool member_flag(const Json& object, const char* key, bool otherwise) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() ? it->get<bool>() : otherwise;
}

// Cutting out the matches as words of their own: "Isolated", or the inverse of removing what does not match.
std::string describe_split(const Json& step) {
  const auto pattern = step.find("pattern");
  const std::string regex = pattern != step.end() && pattern->is_object() ? member_text(*pattern, "Regex") : "";
  const std::string behavior = member_text(step, "behavior");
  const bool invert = member_flag(step, "invert", false);
  const bool isolates = (behavior == "Isolated" && !invert) || (behavior == "Removed" && invert);
  return regex.empty() || !isolates ? "unknown split " + shown(step) : "split " + regex;
}

void describe(const Json& step, std::vector<std::string>& steps) {
  const std::string type = step.is_object() ? member_text(step, "type") : "";
  if (type == "Sequence") {
    const auto list = step.find("pretokenizers");
    if (list == step.end() || !list->is_array()) return steps.push_back("a Sequence without pretokenizers");
    for (const Json& inner : *list) describe(inner, steps);  // nesting is bounded by the JSON reader
  } else if (type == "ByteLevel") {
    steps.push_back(member_flag(step, "use_regex", true) ? "bytes+words" : "bytes");
  } else if (type == "Digits") {
    steps.push_back(member_flag(step, "individual_digits", false) ? "single digits" : "digits");
  } else if (type == "Punctuation") {
    steps.push_back("punctuation");
  } else if (type == "Split") {
    steps.push_back(describe_split(step));
  } else {
    steps.push_back(type.empty() ? shown(step) : type);
  }
}

}  // namespace

std::string detect_pretokenizer(const Json& tokenizer, const std::string& where) {
  std::vector<std::string> steps;
  if (const auto it = tokenizer.find("pre_tokenizer"); it != tokenizer.end() && !it->is_null()) describe(*it, steps);
  const auto model = tokenizer.find("model");
  const bool ignore_merges =
      model != tokenizer.end() && model->is_object() && member_flag(*model, "ignore_merges", false);
  for (const Signature& s : signatures()) {
    if (!std::equal(steps.begin(), steps.end(), s.steps.begin(), s.steps.end())) continue;
    // llama3's expression with merges always applied is the one that llama.cpp calls smaug-bpe.
    return s.name == "llama-bpe" && !ignore_merges ? "smaug-bpe" : std::string(s.name);
  }
  std::string found, known;
  for (const std::string& step : steps) found += (found.empty() ? "" : ", ") + step;
  for (const Signature& s : signatures()) known += (known.empty() ? "" : ", ") + std::string(s.name);
  fail("{}: the pre-tokenizer ({}) is not one of {}; name the nearest with --pre if you know it", where,
       found.empty() ? "none" : found, known);
}

}  // namespace hearth::convert
