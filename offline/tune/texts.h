#pragma once
// The texts of a tuning run: one part that thresholds are chosen on, and one that they are then judged on.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/sidecar.h"
#include "offline/tune/metrics.h"
#include "text/tokenizer.h"

namespace hearth::offline {

struct TextPart {
  std::vector<int32_t> ids;
  std::vector<Window> windows;  // those in use, in the order of the text
  std::optional<int32_t> bos;   // evaluated before each window
  int64_t targets() const;      // tokens that are predicted
};

// As `hearth perplexity -f` evaluates it. max_tokens: that many are predicted at most, in whole windows spread evenly
// over the text; 0 = all. Throws Error when the text is too short.
TextPart make_part(std::string_view text, const text::Tokenizer& tokenizer, int64_t window, uint64_t max_tokens);

// Name, size and hash of a text's file.
model::ProfiledText identify_text(const std::filesystem::path& file);

struct SplitText {
  std::string fit, validation;
};
// Every third document (between `<|endoftext|>`) is for validation; of fewer than three documents, the last third of
// the text. Throws Error when a part would be empty.
SplitText split_text(std::string_view text);

}  // namespace hearth::offline
