#pragma once
// Texts as the sequences that a profiler evaluates: documents between `<|endoftext|>`, cut into windows.
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "model/sidecar.h"
#include "text/tokenizer.h"

namespace hearth::offline {

struct Sequence {
  std::vector<int32_t> ids;
  bool heldout = false;
};

struct Corpus {
  std::vector<model::ProfiledText> texts;
  std::vector<Sequence> sequences;
  uint64_t tokens() const;
};

struct CorpusOptions {
  int64_t window = 512;  // longest sequence, tokens
  int64_t heldout_every =
      8;  // one document of this many is held out (one window, when there are fewer documents); 0: none
};

// Throws Error when a file cannot be read, or when all of them together hold no token.
Corpus read_corpus(std::span<const std::filesystem::path> files, const text::Tokenizer& tokenizer,
                   const CorpusOptions& options);

// Splits at every `<|endoftext|>`; documents of white space alone are dropped.
std::vector<std::string_view> split_documents(std::string_view text);

// Cuts documents into windows and marks the held-out ones.
std::vector<Sequence> make_sequences(std::vector<std::vector<int32_t>> documents, const CorpusOptions& options);

}  // namespace hearth::offline
