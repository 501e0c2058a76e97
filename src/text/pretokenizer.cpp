#include "text/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "core/error.h"
#include "core/log.h"
#include "text/utf8.h"

namespace hearth::text {
namespace {

// The expressions come from the models' tokenizer.json. Each stage splits the words of the one before it; what an
// expression does not match is a word too.
#define GPT2_WORDS R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"
#define CONTRACTIONS R"((?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]))"
#define UPPER R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
#define LOWER R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])"
#define SPACES R"(\s*[\r\n]+|\s+(?!\S)|\s+)"
#define CL100K_WORDS(digits, punctuation) CONTRACTIONS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|)" digits "|" punctuation "|" SPACES
#define PUNCTUATION R"( ?[^\s\p{L}\p{N}]+[\r\n]*)"
// The cased letters of deepseek-llm's tokenizer.json, which are those of an older Unicode.
#define DEEPSEEK_LETTERS \
  R"(A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF})" \
  R"(\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1})" \
  R"(\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5})" \
  R"(\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A})" \
  R"(\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B})" \
  R"(\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC})" \
  R"(\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107})" \
  R"(\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134})" \
  R"(\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4})" \
  R"(\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787})" \
  R"(\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A})" \
  R"(\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2})" \
  R"(\x{118A0}-\x{118DF}\x{1E900}-\x{1E943})"

struct Family {
  std::vector<const char*> names;
  std::vector<const char*> stages;
  bool ignore_merges = false;
  bool add_bos = false;
};

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {{"default"}, {R"([\p{P}\$\+<=>\^~\|]+)", GPT2_WORDS, R"(\p{N}+)", "[0-9][0-9][0-9]"}},
      {{"gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
        "jina-v2-code", "roberta-bpe", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling"},
       {GPT2_WORDS}},
      {{"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"},
       {CL100K_WORDS(R"(\p{N}{1,3})", PUNCTUATION)},
       true,
       true},
      {{"dbrx", "smaug-bpe", "chatglm-bpe", "glm4"}, {CL100K_WORDS(R"(\p{N}{1,3})", PUNCTUATION)}},
      {{"qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "kormo"},
       {CL100K_WORDS(R"(\p{N})", PUNCTUATION)}},
      {{"qwen35"},  // marks belong to the letters
       {CONTRACTIONS
        R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)" SPACES}},
      {{"seed-coder"}, {CL100K_WORDS(R"(\p{N})", R"( ?[^\s\p{L}\p{N}\r\n]+)")}},
      {{"falcon"}, {R"([\p{P}\$\+<=>\^~\|`]+)", GPT2_WORDS, "[0-9][0-9][0-9]"}},
      {{"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}, {R"(\p{N})", GPT2_WORDS}},
      {{"bloom", "poro-chat", "gpt3-finnish"}, {R"( ?[^(\s|.,!?…。，、।۔،)]+)"}},
      {{"viking"}, {R"( ?[^(\s|.,!?…。，、।۔،)]+)", R"(\p{N})"}},
      {{"deepseek-coder"}, {R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)", "[一-龥ࠀ-一가-\\x{D7FF}]+", R"(\p{N})"}},
      {{"deepseek-llm"},
       {R"([\r\n])", R"(\s?[)" DEEPSEEK_LETTERS "]+",
        R"(\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+)", R"(\s+$)",
        "[一-龥ࠀ-一가-\\x{D7FF}]+", R"(\p{N}+)"}},
      {{"deepseek-v3", "hunyuan-dense"},
       {R"(\p{N}{1,3})", "[一-龥\\x{3040}-ゟ゠-ヿ]+",
        R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|)" SPACES}},
      {{"tekken"},
       {R"([^\r\n\p{L}\p{N}]?)" UPPER "*" LOWER R"(+|[^\r\n\p{L}\p{N}]?)" UPPER "+" LOWER
        R"(*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" SPACES},
       true,
       true},
      {{"gpt-4o", "llama4"},
       {R"([^\r\n\p{L}\p{N}]?)" UPPER "*" LOWER "+" CONTRACTIONS R"(?|[^\r\n\p{L}\p{N}]?)" UPPER "+" LOWER
        "*" CONTRACTIONS R"(?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" SPACES}},
  };
  return all;
}

const Family* find_family(std::string_view name) {
  for (const Family& family : families()) {
    if (std::find(family.names.begin(), family.names.end(), name) != family.names.end()) return &family;
  }
  return nullptr;
}

// PCRE2's \s includes U+180E, which Unicode's White_Space (meant by the models' expressions) does not: \s and \S are
// replaced by the explicit set.
std::string with_unicode_space(std::string_view pattern) {
  static constexpr std::string_view space =
      R"(\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
  std::string result;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      const char escaped = pattern[++i];
      if (escaped == 's') {
        result += in_class ? std::string(space) : fmt::format("[{}]", space);
      } else if (escaped == 'S') {
        HEARTH_CHECK(!in_class);
        result += fmt::format("[^{}]", space);
      } else {
        result += {c, escaped};
      }
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    result += c;
  }
  return result;
}

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* p) const {
    Free(p);
  }
};
using Code = std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

class PreTokenizer::Regex {
 public:
  explicit Regex(std::string_view pattern) {
    const std::string expanded = with_unicode_space(pattern);
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expanded.data()), expanded.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr));
    HEARTH_CHECK(code_ != nullptr, "expression {} at {}: {}", expanded, offset, pcre2_message(error));
    // Without JIT (no permission for executable memory) the interpreter does the same, more slowly.
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
    context_.reset(pcre2_match_context_create(nullptr));
    HEARTH_CHECK(context_ != nullptr);
    // The expressions backtrack at most once over what they matched; the limits guard against others and would only
    // refuse long texts.
    pcre2_set_match_limit(context_.get(), UINT32_MAX);
    pcre2_set_depth_limit(context_.get(), UINT32_MAX);
    pcre2_set_heap_limit(context_.get(), UINT32_MAX);
  }

  // Appends the matches and the gaps between them. `text` must be valid UTF-8.
  void split(std::string_view text, pcre2_match_data* match, std::vector<std::string_view>& words) const {
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(match);
    size_t done = 0;
    while (done < text.size() && find(text, done, match)) {
      HEARTH_CHECK(bounds[1] > bounds[0]);  // none of the expressions matches the empty string
      if (bounds[0] > done) words.push_back(text.substr(done, bounds[0] - done));
      words.push_back(text.substr(bounds[0], bounds[1] - bounds[0]));
      done = bounds[1];
    }
    if (done < text.size()) words.push_back(text.substr(done));
  }

 private:
  bool find(std::string_view text, size_t from, pcre2_match_data* match) const {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    // Checking UTF-8 at each call would make the whole quadratic; the caller has done it once.
    int rc = pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, match, context_.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match,
                       context_.get());
    }
    if (rc == PCRE2_ERROR_NOMATCH) return false;
    if (rc < 0) fail("cannot split a text of {} bytes into words: {}", text.size(), pcre2_message(rc));
    return true;
  }

  Code code_;
  MatchContext context_;
};

PreTokenizer::PreTokenizer(std::string_view name) {
  const Family* family = find_family(name);
  if (family == nullptr) {
    log::warn(
        "unknown tokenizer.ggml.pre '{}': words are split by the default rules, and tokens may differ from those the "
        "model was trained on",
        name);
    family = find_family("default");
  }
  for (const char* pattern : family->stages) stages_.push_back(std::make_unique<Regex>(pattern));
  ignore_merges_ = family->ignore_merges;
}

PreTokenizer::~PreTokenizer() = default;

bool PreTokenizer::knows(std::string_view name) {
  return find_family(name) != nullptr;
}

bool PreTokenizer::adds_bos(std::string_view name) {
  const Family* family = find_family(name);
  return family != nullptr && family->add_bos;
}

void PreTokenizer::split(std::string_view text, std::vector<std::string_view>& words) const {
  const MatchData match(pcre2_match_data_create(1, nullptr));
  HEARTH_CHECK(match != nullptr);
  std::vector<std::string_view> before, after;
  while (!text.empty()) {
    const size_t valid = utf8::valid_prefix(text);
    if (valid > 0) {
      before.assign(1, text.substr(0, valid));
      for (const auto& stage : stages_) {
        after.clear();
        for (const std::string_view word : before) stage->split(word, match.get(), after);
        before.swap(after);
      }
      words.insert(words.end(), before.begin(), before.end());
      text.remove_prefix(valid);
    }
    size_t invalid = 0;
    while (invalid < text.size()) {
      const utf8::Step step = utf8::next(text.substr(invalid));
      if (step.kind == utf8::Step::Kind::valid) break;
      invalid += step.length;
    }
    if (invalid > 0) words.push_back(text.substr(0, invalid));
    text.remove_prefix(invalid);
  }
}

}  // namespace hearth::text
