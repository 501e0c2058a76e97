#pragma once
// A vocabulary as GGUF stores it (`tokenizer.ggml.*`), checked: every array as long as the token list, every id in
// range, every merge two non-empty parts.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "gguf/gguf.h"

namespace hearth::text {

// Numbers as stored in `tokenizer.ggml.token_type`.
enum class TokenType : int32_t {
  undefined = 0,
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6
};

enum class VocabKind {
  bpe,  // `tokenizer.ggml.model` = gpt2: byte-level BPE, ranked merges
  spm,  // `tokenizer.ggml.model` = llama: SentencePiece BPE, scored tokens, byte fallback
};

struct Vocab {
  struct Token {
    std::string text;  // as stored: byte-level BPE in GPT-2's printable alphabet, SPM with U+2581 for a space
    float score = 0.0f;
    TokenType type = TokenType::normal;
    bool lstrip = false;  // a special token that swallows the whitespace to its left / right
    bool rstrip = false;
  };
  VocabKind kind = VocabKind::bpe;
  std::string pre = "default";  // `tokenizer.ggml.pre`
  std::vector<Token> tokens;
  std::vector<std::pair<std::string, std::string>> merges;  // BPE: rank = index
  std::optional<int32_t> bos, eos, unk;
  std::unordered_set<int32_t> end_of_generation;
  bool add_bos = false, add_eos = false;
  bool add_space_prefix = false;          // SPM: a text starts as if with a space
  bool remove_extra_whitespaces = false;  // SPM: runs of spaces become one, none at the ends
  std::string model_name;                 // `general.name`
  std::string chat_template;              // empty when the model has none

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }

  // Throws Error when the metadata lack a vocabulary, name a tokenizer other than gpt2 or llama, or contradict
  // themselves.
  static Vocab load(const gguf::File& file);
  // Checks what every tokenizer relies on (Error says what is wrong), and adds what follows from the tokens' texts:
  // end-of-generation tokens and the whitespace oddities of some models' special tokens. Tokenizer::create calls it.
  void finish();
};

}  // namespace hearth::text
