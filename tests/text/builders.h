#pragma once
// Small vocabularies for tests.
#include <string>
#include <utility>
#include <vector>

#include "support/paths.h"
#include "text/bpe.h"
#include "text/tokenizer.h"

namespace hearth::text {

inline Vocab data_vocab(const char* name) {
  return Vocab::load(gguf::File::open(test::data_dir() / "vocab" / name));
}

// Byte-level BPE: the 256 bytes, then what each merge makes. Merges are written in the stored alphabet (a space is
// "Ġ").
inline Vocab byte_vocab(const std::vector<std::pair<std::string, std::string>>& merges = {}) {
  Vocab vocab;
  vocab.kind = VocabKind::bpe;
  vocab.pre = "gpt-2";
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    vocab.tokens.push_back({.text = byte_level_encode({&byte, 1})});
  }
  for (const auto& [left, right] : merges) vocab.tokens.push_back({.text = left + right});
  vocab.merges = merges;
  return vocab;
}

inline int32_t add_token(Vocab& vocab, std::string text, TokenType type) {
  vocab.tokens.push_back({.text = std::move(text), .type = type});
  return vocab.size() - 1;
}

}  // namespace hearth::text
