#include "text/utf8.h"

namespace hearth::text::utf8 {
namespace {

// Bytes that may follow a lead byte: `length` bytes in all, the second within [low, high], the others 80..BF. length 0: no
// lead byte.
struct Lead {
  size_t length;
  uint8_t low, high;
};

constexpr Lead lead(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};  // a continuation byte, or C0/C1, which could only begin overlong forms
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte < 0xF0) {
    const uint8_t low = byte == 0xE0 ? 0xA0 : 0x80;   // below: overlong
    const uint8_t high = byte == 0xED ? 0x9F : 0xBF;  // above: surrogates
    return {3, low, high};
  }
  if (byte < 0xF5) {
    const uint8_t low = byte == 0xF0 ? 0x90 : 0x80;   // below: overlong
    const uint8_t high = byte == 0xF4 ? 0x8F : 0xBF;  // above: past U+10FFFF
    return {4, low, high};
  }
  return {0, 0, 0};
}

}  // namespace

Step next(std::string_view bytes) {
  const Lead l = lead(static_cast<uint8_t>(bytes[0]));
  if (l.length == 0) return {Step::Kind::invalid, 1};
  for (size_t i = 1; i < l.length; ++i) {
    if (i == bytes.size()) return {Step::Kind::incomplete, i};
    const auto byte = static_cast<uint8_t>(bytes[i]);
    const uint8_t low = i == 1 ? l.low : 0x80;
    const uint8_t high = i == 1 ? l.high : 0xBF;
    if (byte < low || byte > high) return {Step::Kind::invalid, i};
  }
  return {Step::Kind::valid, l.length};
}

size_t valid_prefix(std::string_view bytes) {
  size_t i = 0;
  while (i < bytes.size()) {
    if (static_cast<uint8_t>(bytes[i]) < 0x80) {
      ++i;
      continue;
    }
    const Step step = next(bytes.substr(i));
    if (step.kind != Step::Kind::valid) break;
    i += step.length;
  }
  return i;
}

uint32_t code_point(std::string_view sequence) {
  const auto first = static_cast<uint8_t>(sequence[0]);
  if (sequence.size() == 1) return first;
  uint32_t value = first & (0xFFu >> (sequence.size() + 1));
  for (const char c : sequence.substr(1)) value = value << 6 | (static_cast<uint8_t>(c) & 0x3Fu);
  return value;
}

void append(std::string& text, uint32_t code_point) {
  const auto byte = [&](uint32_t b) { text.push_back(static_cast<char>(b)); };
  const auto rest = [&](int shift) { byte(0x80 | ((code_point >> shift) & 0x3F)); };
  if (code_point < 0x80) {
    byte(code_point);
  } else if (code_point < 0x800) {
    byte(0xC0 | code_point >> 6);
    rest(0);
  } else if (code_point < 0x10000) {
    byte(0xE0 | code_point >> 12);
    rest(6);
    rest(0);
  } else {
    byte(0xF0 | code_point >> 18);
    rest(12);
    rest(6);
    rest(0);
  }
}

}  // namespace hearth::text::utf8
