#pragma once
// Printing while tokens arrive: never half a UTF-8 character, never the beginning of a stop string.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace hearth::text {

// Joins byte chunks into valid UTF-8. A sequence that may still be completed is held back; bytes that cannot become
// valid are replaced by U+FFFD, one for each maximal ill-formed part (Unicode 15, section 3.9, "substitution of maximal
// subparts").
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);
  std::string flush();  // what is still held back becomes U+FFFD

 private:
  std::string pending_;  // at most 3 bytes: a proper prefix of a valid sequence
};

class StreamDecoder {
 public:
  // The tokenizer must outlive the decoder. The first token's artificial space is kept: generation continues a prompt.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool render_special = false)
      : tokenizer_(tokenizer), render_special_(render_special) {}
  // Valid UTF-8 that may be printed now; empty while a character is incomplete.
  std::string push(int32_t id) { return utf8_.push(tokenizer_.piece(id, render_special_)); }
  std::string flush() { return utf8_.flush(); }

 private:
  const Tokenizer& tokenizer_;
  bool render_special_;
  Utf8Stream utf8_;
};

// Cuts a stream off before the stop string that is complete first. Text that may be the beginning of one is held back.
class StopMatcher {
 public:
  // Throws Error on an empty stop string.
  explicit StopMatcher(std::vector<std::string> stops);
  // Text that may be printed now. After a match: the text before it, and nothing from then on.
  std::string push(std::string_view text);
  std::string flush();  // at the end of generation: what was held back, unless stopped
  bool stopped() const { return stopped_; }
  const std::string& met() const { return met_; }  // the stop string that was complete; empty before

 private:
  std::vector<std::string> stops_;
  std::string pending_;  // a proper prefix of a stop string
  bool stopped_ = false;
  std::string met_;
};

}  // namespace hearth::text
