#pragma once
// The tokenizer of a Hugging Face directory, turned into llama.cpp's `tokenizer.*` metadata: byte-level BPE from
// tokenizer.json (or vocab.json and merges.txt), SentencePiece from tokenizer.model (or a tokenizer.json made from
// one).
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gguf/gguf.h"
#include "offline/convert/hf_config.h"
#include "offline/convert/json.h"
#include "text/vocab.h"

namespace hearth::convert {

using Notice = std::function<void(std::string_view)>;

struct HfVocabulary {
  std::string model;                // "gpt2" (byte-level BPE) or "llama" (SentencePiece)
  std::string pre = "default";      // the way words are split, by llama.cpp's names
  std::vector<std::string> tokens;  // index = id; [PADn] where the embedding has more rows than the tokenizer tokens
  std::vector<float> scores;        // SentencePiece only
  std::vector<text::TokenType> types;
  std::vector<std::string> merges;  // "left right", best first; BPE only
  std::optional<int64_t> bos, eos, unk, pad, eot;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  std::string chat_template;
  std::vector<std::pair<std::string, std::string>> named_templates;
};

// Throws Error naming the file when there is no tokenizer, when it is of a kind that hearth cannot reproduce, or when
// its tables contradict each other. `pre` overrides the detected pre-tokenizer.
HfVocabulary read_hf_tokenizer(const std::filesystem::path& directory, const HfConfig& config,
                               const std::optional<std::string>& pre, const Notice& notice);
// The part of it that reads tokenizer.json alone.
HfVocabulary parse_tokenizer_json(const Json& tokenizer, int64_t n_vocab, const std::optional<std::string>& pre,
                                  const std::string& where);
// The part of it that reads tokenizer.model alone.
HfVocabulary parse_tokenizer_model(std::span<const std::byte> bytes, int64_t n_vocab, const std::string& where,
                                   const Notice& notice);

// llama.cpp's name of a byte-level BPE pre-tokenizer, from the structure of tokenizer.json. Throws Error when none
// fits.
std::string detect_pretokenizer(const Json& tokenizer, const std::string& where);

void write_vocabulary(const HfVocabulary& vocabulary, gguf::Writer& writer);

}  // namespace hearth::convert
