#pragma once
// Byte-level BPE (Radford et al. 2019, "GPT-2"): text is bytes, words are merged by rank, nothing is unknown.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/merge.h"
#include "text/pretokenizer.h"
#include "text/tokenizer.h"

namespace hearth::text {

// GPT-2's printable alphabet: every byte has a character of its own, the printable ones themselves.
uint32_t byte_to_code_point(uint8_t byte);
// The bytes that a token's text stands for. Characters outside the alphabet stand for their own UTF-8 bytes.
std::string byte_level_decode(std::string_view token_text);
std::string byte_level_encode(std::string_view bytes);

// (left id, right id) -> rank. Open addressing: half of encoding is spent here, twice as fast as std::unordered_map.
class PairTable {
 public:
  explicit PairTable(size_t n_pairs);
  // Keeps the first rank of a pair that is inserted twice.
  void insert(int32_t left, int32_t right, uint32_t rank);
  bool find(int32_t left, int32_t right, uint32_t& rank) const;

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static uint64_t key(int32_t left, int32_t right);
  size_t slot(uint64_t key) const;
  struct Entry {
    uint64_t key = kEmpty;
    uint32_t rank = 0;
  };
  std::vector<Entry> entries_;  // a power of two, at most half full
};

class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(Vocab vocab);

 protected:
  void encode_text(std::string_view text, bool after_special, std::vector<int32_t>& ids) const override;
  std::string normal_piece(int32_t id) const override;

 private:
  void index_bytes();
  void index_merges();
  int32_t symbol(const std::string& text);
  void encode_word(std::string_view word, Merger& merger, std::vector<int32_t>& ids) const;

  // A symbol is a token id, or n_vocab + k for a text that occurs in merges without being a token.
  std::unordered_map<std::string, int32_t> extra_symbols_;
  std::array<int32_t, 256> byte_symbols_{};
  std::vector<int32_t> merged_;  // by rank
  PairTable ranks_;
  PreTokenizer pre_tokenizer_;
  size_t longest_token_ = 0;  // bytes of text as stored
};

}  // namespace hearth::text
