#pragma once
// Splits text into the words that byte-level BPE merges within, by the regular expressions of a `tokenizer.ggml.pre`.
#include <memory>
#include <string_view>
#include <vector>

namespace hearth::text {

class PreTokenizer {
 public:
  // An unknown name gives a warning and the default expressions, as in llama.cpp.
  explicit PreTokenizer(std::string_view name);
  ~PreTokenizer();
  static bool knows(std::string_view name);

  // Appends the words, in order; together they are the whole text. Bytes that are not UTF-8 form words of their own.
  // Time is linear in the text's length.
  void split(std::string_view text, std::vector<std::string_view>& words) const;

  // llama3's and tekken's: a word that is a token as a whole is not built from merges.
  bool ignore_merges() const { return ignore_merges_; }
  // llama3's and tekken's default for tokenizer.ggml.add_bos_token.
  static bool adds_bos(std::string_view name);

 private:
  class Regex;
  std::vector<std::unique_ptr<Regex>> stages_;
  bool ignore_merges_ = false;
};

}  // namespace hearth::text
