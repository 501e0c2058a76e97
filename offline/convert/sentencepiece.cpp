#include "offline/convert/sentencepiece.h"

#include <cmath>
#include <cstring>

#include "core/error.h"

namespace hearth::convert {
namespace {

// Protocol buffers' wire format (protobuf.dev, "Encoding"): a message is a run of (key, value), key = number << 3 |
// wire type.
class Message {
 public:
  enum class Wire : uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

  Message(std::span<const std::byte> bytes, const std::string& where) : rest_(bytes), where_(where) {}

  // Moves to the next field; false at the end.
  bool next() {
    if (rest_.empty()) return false;
    const uint64_t key = read_varint();
    number_ = key >> 3;
    wire_ = static_cast<Wire>(key & 7);
    switch (wire_) {
      case Wire::varint:
        integer_ = read_varint();
        break;
      case Wire::fixed64:
        value_ = take(8);
        break;
      case Wire::bytes:
        value_ = take(read_varint());
        break;
      case Wire::fixed32:
        value_ = take(4);
        break;
      default:
        fail("{}: no SentencePiece model: wire type {} is unknown", where_, key & 7);
    }
    return true;
  }

  uint64_t number() const { return number_; }
  std::span<const std::byte> bytes() const {
    expect(Wire::bytes);
    return value_;
  }
  std::string text() const {
    expect(Wire::bytes);
    return {reinterpret_cast<const char*>(value_.data()), value_.size()};
  }
  bool boolean() const { return integer() != 0; }
  int32_t integer() const {
    expect(Wire::varint);
    return static_cast<int32_t>(static_cast<uint32_t>(integer_));  // int32 fields are stored sign-extended to 64 bits
  }
  float real() const {
    expect(Wire::fixed32);
    float value = 0;
    std::memcpy(&value, value_.data(), sizeof value);
    return value;
  }

 private:
  void expect(Wire wire) const {
    if (wire_ != wire) {
      fail("{}: no SentencePiece model: field {} has wire type {}, expected {}", where_, number_,
           static_cast<uint32_t>(wire_), static_cast<uint32_t>(wire));
    }
  }
  std::span<const std::byte> take(uint64_t n) {
    if (n > rest_.size()) fail("{}: truncated: a field of {} bytes, but only {} are left", where_, n, rest_.size());
    const auto taken = rest_.first(n);
    rest_ = rest_.subspan(n);
    return taken;
  }
  uint64_t read_varint() {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint64_t>(take(1)[0]);
      value |= (byte & 127) << shift;
      if (byte < 128) return value;
    }
    fail("{}: no SentencePiece model: a number runs over 10 bytes", where_);
  }

  std::span<const std::byte> rest_;
  const std::string& where_;
  uint64_t number_ = 0, integer_ = 0;
  Wire wire_ = Wire::varint;
  std::span<const std::byte> value_;
};

SentencePieceModel::Piece parse_piece(std::span<const std::byte> bytes, size_t id, const std::string& where) {
  SentencePieceModel::Piece piece;
  for (Message m(bytes, where); m.next();) {
    if (m.number() == 1) piece.text = m.text();
    if (m.number() == 2) piece.score = m.real();
    if (m.number() == 3) {
      const int32_t type = m.integer();
      if (type < 1 || type > 6) fail("{}: piece {} has the unknown type {}", where, id, type);
      piece.type = static_cast<SentencePieceModel::PieceType>(type);
    }
  }
  if (!std::isfinite(piece.score)) fail("{}: piece {} has no finite score", where, id);
  return piece;
}

void parse_trainer(std::span<const std::byte> bytes, SentencePieceModel& model, const std::string& where) {
  for (Message m(bytes, where); m.next();) {
    switch (m.number()) {
      case 3:
        model.algorithm = static_cast<SentencePieceModel::Algorithm>(m.integer());
        break;
      case 40:
        model.unk_id = m.integer();
        break;
      case 41:
        model.bos_id = m.integer();
        break;
      case 42:
        model.eos_id = m.integer();
        break;
      case 43:
        model.pad_id = m.integer();
        break;
      default:
        break;
    }
  }
}

void parse_normalizer(std::span<const std::byte> bytes, SentencePieceModel& model, const std::string& where) {
  for (Message m(bytes, where); m.next();) {
    switch (m.number()) {
      case 1:
        model.normalizer = m.text();
        break;
      case 2:
        model.has_normalization_map = !m.bytes().empty();
        break;
      case 3:
        model.add_dummy_prefix = m.boolean();
        break;
      case 4:
        model.remove_extra_whitespaces = m.boolean();
        break;
      case 5:
        model.escape_whitespaces = m.boolean();
        break;
      default:
        break;
    }
  }
}

}  // namespace

SentencePieceModel parse_sentencepiece(std::span<const std::byte> bytes, const std::string& where) {
  SentencePieceModel model;
  for (Message m(bytes, where); m.next();) {
    if (m.number() == 1) model.pieces.push_back(parse_piece(m.bytes(), model.pieces.size(), where));
    if (m.number() == 2) parse_trainer(m.bytes(), model, where);
    if (m.number() == 3) parse_normalizer(m.bytes(), model, where);
  }
  if (model.pieces.empty()) fail("{}: no SentencePiece model: it holds no pieces", where);
  return model;
}

}  // namespace hearth::convert
