#include "offline/synth_vocab.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "offline/synth.h"
#include "offline/synth_random.h"
#include "text/vocab.h"

namespace hearth::offline {
namespace {

constexpr const char* kSpace = "\u2581";
constexpr uint64_t kTextStream = uint64_t{1} << 41;

}  // namespace

std::string synth_word(int64_t k) {  // bijective base 26
  std::string word;
  for (int64_t n = k + 1; n > 0; n = (n - 1) / 26) word.push_back(static_cast<char>('a' + (n - 1) % 26));
  std::reverse(word.begin(), word.end());
  return word;
}

void set_synth_vocab(gguf::Writer& writer, int64_t n_vocab) {
  using text::TokenType;
  HEARTH_CHECK(n_vocab > kFirstWord);
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {static_cast<int32_t>(TokenType::unknown), static_cast<int32_t>(TokenType::control),
                                static_cast<int32_t>(TokenType::control)};
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(fmt::format("<0x{:02X}>", byte));
  types.resize(tokens.size(), static_cast<int32_t>(TokenType::byte));
  tokens.emplace_back(kSpace);
  for (char letter = 'a'; letter <= 'z'; ++letter) tokens.emplace_back(1, letter);
  HEARTH_CHECK(static_cast<int64_t>(tokens.size()) == kFirstWord);
  for (int64_t k = 0; k < n_vocab - kFirstWord; ++k) tokens.push_back(kSpace + synth_word(k));
  types.resize(tokens.size(), static_cast<int32_t>(TokenType::normal));
  std::vector<float> scores(tokens.size());
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = 0.0f - static_cast<float>(i);  // earlier merges first
  writer.set("tokenizer.ggml.model", std::string("llama"));
  writer.set("tokenizer.ggml.pre", std::string("default"));
  writer.set("tokenizer.ggml.tokens", gguf::Array(std::move(tokens)));
  writer.set("tokenizer.ggml.scores", gguf::Array(std::move(scores)));
  writer.set("tokenizer.ggml.token_type", gguf::Array(std::move(types)));
  writer.set("tokenizer.ggml.bos_token_id", uint32_t{1});
  writer.set("tokenizer.ggml.eos_token_id", uint32_t{2});
  writer.set("tokenizer.ggml.unknown_token_id", uint32_t{0});
  writer.set("tokenizer.ggml.add_bos_token", true);
  writer.set("tokenizer.ggml.add_eos_token", false);
}

std::vector<int32_t> synthetic_text(int64_t n_vocab, int64_t n, int64_t words_per_topic, uint64_t seed) {
  HEARTH_CHECK(n_vocab > kFirstWord && n >= 0 && words_per_topic > 0);
  const RandomStream random(seed, kTextStream);
  const int64_t topics = topic_count(n_vocab), words = n_vocab - kFirstWord;
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < n; ++t) {
    const int64_t topic = t / words_per_topic % topics;
    // The words w with w * topics / words == topic.
    const int64_t first = (topic * words + topics - 1) / topics, last = ((topic + 1) * words + topics - 1) / topics;
    const auto offset = random.below(static_cast<uint64_t>(t), static_cast<uint32_t>(last - first));
    ids.push_back(static_cast<int32_t>(kFirstWord + first + offset));
  }
  return ids;
}

}  // namespace hearth::offline
