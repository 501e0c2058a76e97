#pragma once
// The vocabulary of synthetic models, and their topics.
#include <cstdint>
#include <string>

#include "gguf/gguf.h"

namespace hearth::offline {

// <unk> <s> </s>, 256 byte tokens, U+2581 and a … z; then words.
inline constexpr int64_t kFirstWord = 3 + 256 + 27;
inline constexpr int64_t kMaxTopics = 64;

// Word k of an endless list in order of length: "a" … "z", "aa", "ab", … Each is an earlier one and a letter, so that
// SentencePiece's merges reach it from the letters.
std::string synth_word(int64_t k);

// Writes tokenizer.ggml.* for n_vocab > kFirstWord tokens.
void set_synth_vocab(gguf::Writer& writer, int64_t n_vocab);

inline int64_t topic_count(int64_t n_vocab) {
  const int64_t words = n_vocab - kFirstWord;
  return words < 2 * kMaxTopics ? 1 : kMaxTopics;
}
// The topic of a token; -1 for tokens that are no words.
inline int64_t topic_of(int64_t token, int64_t n_vocab) {
  return token < kFirstWord ? -1 : (token - kFirstWord) * topic_count(n_vocab) / (n_vocab - kFirstWord);
}

}  // namespace hearth::offline
