#pragma once
// Text to token ids and back, equal to llama.cpp's for the same GGUF metadata.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf/gguf.h"
#include "text/vocab.h"

namespace hearth::text {

struct EncodeOptions {
  bool add_special = true;    // BOS before and EOS after, where the vocabulary asks for them
  bool parse_special = true;  // control tokens written out in the text (`<|im_start|>`) become those tokens
  std::span<const size_t> plain = {};  // ascending positions of bytes that are no part of a control token
};

// Immutable once loaded: may be used from several threads at the same time.
class Tokenizer {
 public:
  // Throws Error on metadata that are missing, contradictory, or of an unsupported tokenizer.
  static std::unique_ptr<Tokenizer> load(const gguf::File& file);
  // From a vocabulary made otherwise, which is checked as load() checks.
  static std::unique_ptr<Tokenizer> create(Vocab vocab);
  virtual ~Tokenizer();

  // Any bytes are accepted; what is not valid UTF-8 is kept as byte tokens. Work is O(n log n) in the longest word.
  // Throws Error when the text is longer than about 700 MB.
  std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const;

  // Positions where a control token's text begins, and where the text ends, white space aside, with the beginning of one.
  std::vector<size_t> control_starts(std::string_view text) const;

  // The bytes of one token. May be part of a UTF-8 sequence: print through StreamDecoder. Control and unknown tokens
  // are empty unless render_special. Throws Error when the id is out of range.
  std::string piece(int32_t id, bool render_special = false) const;
  // The bytes of several tokens; an SPM vocabulary's artificial space at the beginning is taken off.
  std::string decode(std::span<const int32_t> ids, bool render_special = false) const;

  int32_t n_vocab() const { return vocab_.size(); }
  std::optional<int32_t> bos() const { return vocab_.bos; }
  std::optional<int32_t> eos() const { return vocab_.eos; }
  bool add_bos() const { return vocab_.add_bos; }
  // EOS, end-of-turn and their like: generation stops there.
  bool is_end_of_generation(int32_t id) const { return vocab_.end_of_generation.contains(id); }
  std::vector<int32_t> end_of_generation() const;                  // sorted; what --ignore-eos has to suppress
  bool is_special(int32_t id) const;                               // control or unknown
  std::optional<int32_t> find(std::string_view token_text) const;  // by the text as stored
  const std::string& chat_template() const { return vocab_.chat_template; }  // empty when the model has none
  const Vocab& vocab() const { return vocab_; }

 protected:
  explicit Tokenizer(Vocab vocab);
  // Appends the ids of text without special tokens. `after_special`: it begins the text or follows a special token.
  virtual void encode_text(std::string_view text, bool after_special, std::vector<int32_t>& ids) const = 0;
  virtual std::string normal_piece(int32_t id) const = 0;

  const Vocab vocab_;
  std::unordered_map<std::string_view, int32_t> ids_;  // views into vocab_

 private:
  class SpecialTokens;
  std::unique_ptr<SpecialTokens> special_;
};

}  // namespace hearth::text
