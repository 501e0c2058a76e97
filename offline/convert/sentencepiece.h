#pragma once
// Reader of tokenizer.model: the parts of SentencePiece's ModelProto (google/sentencepiece, sentencepiece_model.proto)
// that a converter needs. A protobuf reader of its own: every length is checked against the bytes that are there.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace hearth::convert {

struct SentencePieceModel {
  // Numbers as stored, the same as GGUF's token types.
  enum class PieceType : int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };
  enum class Algorithm : int32_t { unigram = 1, bpe = 2, word = 3, character = 4 };
  struct Piece {
    std::string text;  // UTF-8, U+2581 for a space
    float score = 0.0f;
    PieceType type = PieceType::normal;
  };
  std::vector<Piece> pieces;  // index = token id
  Algorithm algorithm = Algorithm::unigram;
  int32_t unk_id = 0, bos_id = 1, eos_id = 2, pad_id = -1;
  std::string normalizer;              // "identity", "nmt_nfkc", ...
  bool has_normalization_map = false;  // a table of character replacements
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
};

// Throws Error, starting with `where`, for bytes that are no ModelProto.
SentencePieceModel parse_sentencepiece(std::span<const std::byte> bytes, const std::string& where);

}  // namespace hearth::convert
