#pragma once
// SentencePiece BPE (Kudo and Richardson 2018) as Llama 1 and 2 use it: the best-scored pair that forms a token is
// merged first; characters without a token become byte tokens.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "text/merge.h"
#include "text/tokenizer.h"

namespace hearth::text {

class SpmTokenizer final : public Tokenizer {
 public:
  explicit SpmTokenizer(Vocab vocab);

 protected:
  void encode_text(std::string_view text, bool after_special, std::vector<int32_t>& ids) const override;
  std::string normal_piece(int32_t id) const override;

 private:
  std::string normalise(std::string_view text, bool after_special) const;
  void encode_segment(std::string_view text, Merger& merger, std::vector<int32_t>& ids) const;

  // Pairs of characters that stand side by side in some token. A merge never crosses any other pair, so text is cut
  // there: the result is the same, and short segments stay in the cache.
  std::unordered_set<uint64_t> neighbours_;
  std::array<int32_t, 256> byte_tokens_{};
  size_t longest_token_ = 0;  // bytes
};

// The byte of a token text like `<0x0A>`; -1 when it is none.
int parse_byte_token(std::string_view text);

}  // namespace hearth::text
