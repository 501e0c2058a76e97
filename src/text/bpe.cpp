#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "text/utf8.h"

namespace hearth::text {
namespace {

constexpr bool is_printable(uint32_t byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct ByteAlphabet {
  std::array<uint16_t, 256> to_code_point{};
  std::array<int16_t, 512> to_byte{};  // -1: not in the alphabet
};

// The bytes that are not printable take the code points from U+0100 on, in order.
constexpr ByteAlphabet make_alphabet() {
  ByteAlphabet a;
  for (int16_t& byte : a.to_byte) byte = -1;
  uint16_t next = 256;
  for (uint16_t b = 0; b < 256; ++b) {
    a.to_code_point[b] = is_printable(b) ? b : next++;
    a.to_byte[a.to_code_point[b]] = static_cast<int16_t>(b);
  }
  return a;
}
constexpr ByteAlphabet kAlphabet = make_alphabet();

}  // namespace

uint32_t byte_to_code_point(uint8_t byte) {
  return kAlphabet.to_code_point[byte];
}

std::string byte_level_encode(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const char c : bytes) utf8::append(text, byte_to_code_point(static_cast<uint8_t>(c)));
  return text;
}

std::string byte_level_decode(std::string_view token_text) {
  std::string bytes;
  while (!token_text.empty()) {
    const utf8::Step step = utf8::next(token_text);
    const std::string_view sequence = token_text.substr(0, step.length);
    token_text.remove_prefix(step.length);
    const uint32_t c = step.kind == utf8::Step::Kind::valid ? utf8::code_point(sequence) : UINT32_MAX;
    if (c < kAlphabet.to_byte.size() && kAlphabet.to_byte[c] >= 0) {
      bytes.push_back(static_cast<char>(kAlphabet.to_byte[c]));
    } else {
      bytes += sequence;
    }
  }
  return bytes;
}

PairTable::PairTable(size_t n_pairs) : entries_(std::bit_ceil(2 * n_pairs + 1)) {}

uint64_t PairTable::key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

size_t PairTable::slot(uint64_t key) const {
  key *= 0x9E3779B97F4A7C15u;  // Fibonacci hashing; the high bits are the well-mixed ones
  return (key ^ key >> 32) & (entries_.size() - 1);
}

void PairTable::insert(int32_t left, int32_t right, uint32_t rank) {
  const uint64_t k = key(left, right);
  size_t i = slot(k);
  while (entries_[i].key != kEmpty && entries_[i].key != k) i = (i + 1) & (entries_.size() - 1);
  if (entries_[i].key == kEmpty) entries_[i] = {k, rank};
}

bool PairTable::find(int32_t left, int32_t right, uint32_t& rank) const {
  const uint64_t k = key(left, right);
  for (size_t i = slot(k); entries_[i].key != kEmpty; i = (i + 1) & (entries_.size() - 1)) {
    if (entries_[i].key == k) {
      rank = entries_[i].rank;
      return true;
    }
  }
  return false;
}

BpeTokenizer::BpeTokenizer(Vocab vocab)
    : Tokenizer(std::move(vocab)), ranks_(vocab_.merges.size()), pre_tokenizer_(vocab_.pre) {
  for (const auto& token : vocab_.tokens) longest_token_ = std::max(longest_token_, token.text.size());
  index_bytes();
  index_merges();
}

int32_t BpeTokenizer::symbol(const std::string& text) {
  if (const auto token = find(text)) return *token;
  const auto next = n_vocab() + static_cast<int32_t>(extra_symbols_.size());
  return extra_symbols_.try_emplace(text, next).first->second;
}

void BpeTokenizer::index_bytes() {
  int missing = 0;
  for (int b = 0; b < 256; ++b) {
    const char byte = static_cast<char>(b);
    byte_symbols_[b] = symbol(byte_level_encode({&byte, 1}));
    // C0, C1 and F5 to FF occur in no UTF-8 text, and many vocabularies leave them out.
    const bool in_utf8 = b < 0xC0 || (b > 0xC1 && b < 0xF5);
    if (byte_symbols_[b] >= n_vocab() && in_utf8) ++missing;
  }
  if (missing > 0 && !vocab_.unk) {
    log::warn("the vocabulary has no tokens for {} of the bytes that occur in UTF-8 text; they are dropped", missing);
  }
}

void BpeTokenizer::index_merges() {
  merged_.reserve(vocab_.merges.size());
  for (const auto& [left, right] : vocab_.merges) {
    const auto rank = static_cast<uint32_t>(merged_.size());
    ranks_.insert(symbol(left), symbol(right), rank);
    merged_.push_back(symbol(left + right));
  }
}

void BpeTokenizer::encode_text(std::string_view text, bool /*after_special*/, std::vector<int32_t>& ids) const {
  std::vector<std::string_view> words;
  pre_tokenizer_.split(text, words);
  Merger merger;
  for (const std::string_view word : words) encode_word(word, merger, ids);
}

void BpeTokenizer::encode_word(std::string_view word, Merger& merger, std::vector<int32_t>& ids) const {
  if (pre_tokenizer_.ignore_merges() && word.size() <= longest_token_) {
    if (const auto token = find(byte_level_encode(word)); token && !is_special(*token)) {
      ids.push_back(*token);
      return;
    }
  }
  merger.clear();
  for (uint32_t i = 0; i < word.size(); ++i) merger.add(i, 1, byte_symbols_[static_cast<uint8_t>(word[i])]);
  merger.run([&](const Symbol& left, const Symbol& right, MergeTo& merge) {
    if (!ranks_.find(left.id, right.id, merge.priority)) return false;
    merge.id = merged_[merge.priority];
    return true;
  });
  merger.for_each([&](const Symbol& symbol) {
    if (symbol.id < n_vocab() && !is_special(symbol.id)) {
      ids.push_back(symbol.id);
      return;
    }
    // A merge led to a text that is no token: back to bytes, as llama.cpp does.
    for (uint32_t i = symbol.begin; i < symbol.begin + symbol.length; ++i) {
      const int32_t byte = byte_symbols_[static_cast<uint8_t>(word[i])];
      if (byte < n_vocab()) {
        ids.push_back(byte);
      } else if (vocab_.unk) {
        ids.push_back(*vocab_.unk);
      }
    }
  });
}

std::string BpeTokenizer::normal_piece(int32_t id) const {
  return byte_level_decode(vocab_.tokens[id].text);
}

}  // namespace hearth::text
