#include "text/template/strings.h"

#include <algorithm>

#include "core/error.h"
#include "text/utf8.h"

namespace hearth::text::jinja {
namespace {

std::string_view first_character(std::string_view text) {
  return text.substr(0, utf8::next(text).length);
}
std::string_view last_character(std::string_view text) {
  size_t n = 1;
  while (n < text.size() && n < 4 && (static_cast<unsigned char>(text[text.size() - n]) & 0xC0) == 0x80) ++n;
  return text.substr(text.size() - n);
}
uint32_t code(std::string_view character) {
  return utf8::next(character).kind == utf8::Step::Kind::valid ? utf8::code_point(character) : 0xFFFD;
}

constexpr uint32_t kSharpS = 0xDF, kSharpSUpper = 0x1E9E;  // which Python writes as SS

uint32_t lower(uint32_t c) {
  if ((c >= 'A' && c <= 'Z') || (c >= 0xC0 && c <= 0xDE && c != 0xD7)) return c + 32;
  if ((c >= 0x391 && c <= 0x3A9 && c != 0x3A2) || (c >= 0x410 && c <= 0x42F)) return c + 32;
  return c >= 0x400 && c <= 0x40F ? c + 80 : c;
}
uint32_t upper(uint32_t c) {
  if (c == kSharpS) return kSharpSUpper;
  if ((c >= 'a' && c <= 'z') || (c >= 0xE0 && c <= 0xFE && c != 0xF7)) return c - 32;
  if ((c >= 0x3B1 && c <= 0x3C9 && c != 0x3C2) || (c >= 0x430 && c <= 0x44F)) return c - 32;
  return c >= 0x450 && c <= 0x45F ? c - 80 : c;
}
bool is_letter(uint32_t c) {
  return lower(c) != c || upper(c) != c || c == kSharpS;
}

// Each character through `change`, which is told whether a letter stood before it.
template <typename Change>
std::string changed(std::string_view text, Change change) {
  std::string out;
  bool behind_letter = false;
  while (!text.empty()) {
    const std::string_view character = first_character(text);
    const uint32_t c = code(character);
    const uint32_t now = change(c, behind_letter, out.empty());
    if (now == kSharpSUpper) {
      out += "SS";
    } else if (now == c) {
      out += character;
    } else {
      utf8::append(out, now);
    }
    behind_letter = is_letter(c);
    text.remove_prefix(character.size());
  }
  return out;
}

}  // namespace

size_t count_characters(std::string_view text) {
  size_t n = 0;
  for (; !text.empty(); ++n) text.remove_prefix(first_character(text).size());
  return n;
}

bool is_space(std::string_view character) {
  const uint32_t c = code(character);
  return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x1F) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string strip(std::string_view text, std::optional<std::string_view> characters, bool left, bool right) {
  const auto goes = [&](std::string_view c) {
    return characters ? characters->find(c) != std::string_view::npos : is_space(c);
  };
  while (left && !text.empty() && goes(first_character(text))) text.remove_prefix(first_character(text).size());
  while (right && !text.empty() && goes(last_character(text))) text.remove_suffix(last_character(text).size());
  return std::string(text);
}

std::vector<std::string> split(std::string_view text, std::optional<std::string_view> separator, int64_t most,
                               bool from_right) {
  if (separator && separator->empty()) fail("split() needs a separator that is not empty");
  std::vector<std::string> parts;
  const auto more = [&] { return most < 0 || std::ssize(parts) < most; };
  if (separator) {
    while (more()) {
      const size_t at = from_right ? text.rfind(*separator) : text.find(*separator);
      if (at == std::string_view::npos) break;
      parts.emplace_back(from_right ? text.substr(at + separator->size()) : text.substr(0, at));
      text = from_right ? text.substr(0, at) : text.substr(at + separator->size());
    }
    parts.emplace_back(text);
  } else {
    std::string rest(text);
    while (true) {
      rest = strip(rest, std::nullopt, !from_right, from_right);
      if (rest.empty()) break;
      std::string_view word = rest;
      if (!more()) {
        parts.push_back(strip(rest, std::nullopt, true, false));
        if (!from_right) break;
        parts.back() = strip(rest, std::nullopt, false, true);
        break;
      }
      size_t n = 0;
      while (n < rest.size()) {
        const std::string_view left = from_right ? word.substr(0, word.size() - n) : word.substr(n);
        const std::string_view c = from_right ? last_character(left) : first_character(left);
        if (is_space(c)) break;
        n += c.size();
      }
      parts.emplace_back(from_right ? word.substr(word.size() - n) : word.substr(0, n));
      rest = std::string(from_right ? word.substr(0, word.size() - n) : word.substr(n));
    }
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    size_t end = text.find_first_of("\n\r");
    if (end == std::string_view::npos) end = text.size();
    const size_t after = end == text.size() ? end : text.substr(end).starts_with("\r\n") ? end + 2 : end + 1;
    lines.emplace_back(text.substr(0, keep_ends ? after : end));
    text.remove_prefix(after);
  }
  return lines;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to, int64_t most) {
  std::string out;
  if (from.empty()) {  // before every character and at the end
    int64_t n = 0;
    while (true) {
      if (most < 0 || n++ < most) out += to;
      if (text.empty()) return out;
      out += first_character(text);
      text.remove_prefix(first_character(text).size());
    }
  }
  for (int64_t n = 0; most < 0 || n < most; ++n) {
    const size_t at = text.find(from);
    if (at == std::string_view::npos) break;
    out += text.substr(0, at);
    out += to;
    text.remove_prefix(at + from.size());
  }
  return out += text;
}

std::string lower(std::string_view text) {
  return changed(text, [](uint32_t c, bool, bool) { return lower(c); });
}
std::string upper(std::string_view text) {
  return changed(text, [](uint32_t c, bool, bool) { return upper(c); });
}
std::string capitalize(std::string_view text) {
  return changed(text, [](uint32_t c, bool, bool first) { return first ? upper(c) : lower(c); });
}
std::string title(std::string_view text) {
  return changed(text, [](uint32_t c, bool behind_letter, bool) { return behind_letter ? lower(c) : upper(c); });
}

}  // namespace hearth::text::jinja
