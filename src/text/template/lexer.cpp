#include "text/template/lexer.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "core/error.h"
#include "text/utf8.h"

namespace hearth::text::jinja {

void fail_at(Position at, const std::string& told) {
  std::string what = told;  // in one line, whatever the template's strings hold
  std::replace_if(
      what.begin(), what.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  fail("chat template, line {}, column {}: {}", at.line, at.column, what);
}

namespace {

bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}
bool is_name_start(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || static_cast<unsigned char>(c) >= 0x80;
}
bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : s_(source) {
    if (s_.ends_with('\n')) s_.remove_suffix(1);  // keep_trailing_newline is off
    if (s_.ends_with('\r')) s_.remove_suffix(1);
  }

  std::vector<Token> run() {
    while (i_ < s_.size()) text_and_tag();
    add(Token::Kind::end, "end of the template", here());
    return std::move(tokens_);
  }

 private:
  Position here() const { return at_; }
  void advance(size_t n) {
    for (; n > 0; --n, ++i_) {
      if (s_[i_] == '\n') {
        ++at_.line, at_.column = 1;
      } else {
        ++at_.column;
      }
    }
  }
  bool at(std::string_view what) const { return s_.substr(i_).starts_with(what); }
  void add(Token::Kind kind, std::string text, Position where) { tokens_.push_back({kind, std::move(text), where}); }

  // The text up to the next tag, then the tag.
  void text_and_tag() {
    size_t tag = i_;
    while (tag < s_.size() && !is_tag(tag)) ++tag;
    const Position begin = here();
    std::string_view text = s_.substr(i_, tag - i_);
    const bool found = tag < s_.size();
    const char mark = found && tag + 2 < s_.size() ? s_[tag + 2] : '\0';
    if (found && mark == '-') {
      while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
    } else if (found && mark != '+' && s_[tag + 1] != '{') {
      strip_indent(text);
    }
    if (!text.empty()) add(Token::Kind::text, std::string(text), begin);
    advance(tag - i_);
    if (!found) return;
    const bool marked = mark == '-' || mark == '+';
    switch (s_[i_ + 1]) {
      case '#':
        return comment();
      case '{': {
        add(Token::Kind::print_begin, "{{", here());
        advance(marked ? 3 : 2);
        return inside("}}", Token::Kind::print_end);
      }
      default:
        if (raw(marked)) return;
        add(Token::Kind::block_begin, "{%", here());
        advance(marked ? 3 : 2);
        return inside("%}", Token::Kind::block_end);
    }
  }

  bool is_tag(size_t i) const {
    return s_[i] == '{' && i + 1 < s_.size() && (s_[i + 1] == '{' || s_[i + 1] == '%' || s_[i + 1] == '#');
  }

  // lstrip_blocks: spaces between the beginning of a line and a tag. A text that begins behind a tag begins no line.
  void strip_indent(std::string_view& text) const {
    size_t n = text.size();
    while (n > 0 && is_space(text[n - 1]) && text[n - 1] != '\n') --n;
    const bool line_begins = n > 0 ? text[n - 1] == '\n' : i_ == 0 || s_[i_ - 1] == '\n';
    if (line_begins) text = text.substr(0, n);
  }

  // Behind a tag: "-" takes all whitespace, else trim_blocks takes one newline.
  void after_tag(char mark, bool trims) {
    if (mark == '-') {
      while (i_ < s_.size() && is_space(s_[i_])) advance(1);
    } else if (trims && mark != '+' && at("\n")) {
      advance(1);
    }
  }

  void comment() {
    const Position begin = here();
    const size_t end = s_.find("#}", i_ + 2);
    if (end == std::string_view::npos) fail_at(begin, "a comment '{#' is not closed by '#}'");
    const char mark = end > i_ + 2 ? s_[end - 1] : '\0';
    advance(end + 2 - i_);
    after_tag(mark, true);
  }

  // {% raw %} … {% endraw %}: text as it is.
  bool raw(bool marked) {
    const Position begin = here();
    size_t i = i_ + (marked ? 3 : 2);
    const auto skip_spaces = [&] {
      while (i < s_.size() && is_space(s_[i])) ++i;
    };
    skip_spaces();
    if (!s_.substr(i).starts_with("raw")) return false;
    i += 3;
    skip_spaces();
    char mark = '\0';
    if (i < s_.size() && (s_[i] == '-' || s_[i] == '+')) mark = s_[i++];
    if (!s_.substr(i).starts_with("%}")) return false;
    advance(i + 2 - i_);
    after_tag(mark, true);
    const size_t from = i_;
    for (size_t end = s_.find("{%", from); end != std::string_view::npos; end = s_.find("{%", end + 2)) {
      i = end + 2;
      const char open = i < s_.size() && (s_[i] == '-' || s_[i] == '+') ? s_[i++] : '\0';
      skip_spaces();
      if (!s_.substr(i).starts_with("endraw")) continue;
      i += 6;
      skip_spaces();
      char close = '\0';
      if (i < s_.size() && (s_[i] == '-' || s_[i] == '+')) close = s_[i++];
      if (!s_.substr(i).starts_with("%}")) continue;
      std::string_view text = s_.substr(from, end - from);
      if (open == '-') {
        while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
      } else if (open != '+') {
        strip_indent(text);
      }
      if (!text.empty()) add(Token::Kind::text, std::string(text), here());
      advance(i + 2 - i_);
      after_tag(close, true);
      return true;
    }
    fail_at(begin, "{% raw %} is not closed by {% endraw %}");
  }

  void inside(std::string_view close, Token::Kind kind) {
    const Position begin = here();
    std::string brackets;
    while (true) {
      while (i_ < s_.size() && is_space(s_[i_])) advance(1);
      if (i_ >= s_.size()) fail_at(begin, "a tag is not closed by '" + std::string(close) + "'");
      if (brackets.empty()) {
        const char mark = s_[i_] == '-' || s_[i_] == '+' ? s_[i_] : '\0';
        if (s_.substr(i_ + (mark != '\0' ? 1 : 0)).starts_with(close)) {
          add(kind, std::string(close), here());
          advance(close.size() + (mark != '\0' ? 1 : 0));
          return after_tag(mark, kind == Token::Kind::block_end);
        }
      }
      token(brackets);
    }
  }

  void token(std::string& brackets) {
    const Position begin = here();
    const char c = s_[i_];
    if (is_name_start(c)) {
      size_t end = i_;
      while (end < s_.size() && (is_name_start(s_[end]) || is_digit(s_[end]))) ++end;
      add(Token::Kind::name, std::string(s_.substr(i_, end - i_)), begin);
      return advance(end - i_);
    }
    if (is_digit(c)) return number();
    if (c == '"' || c == '\'') return string();
    static constexpr std::array<std::string_view, 6> kLong = {"**", "//", "==", "!=", "<=", ">="};
    for (const std::string_view op : kLong) {
      if (!at(op)) continue;
      add(Token::Kind::op, std::string(op), begin);
      return advance(2);
    }
    static constexpr std::string_view kOps = "+-*/%~<>=()[]{}.,:|";
    if (kOps.find(c) == std::string_view::npos) fail_at(begin, fmt::format("unexpected character '{}'", c));
    static constexpr std::string_view kOpen = "([{", kClose = ")]}";
    if (kOpen.find(c) != std::string_view::npos) brackets += kClose[kOpen.find(c)];
    if (kClose.find(c) != std::string_view::npos) {
      if (brackets.empty() || brackets.back() != c) fail_at(begin, fmt::format("'{}' closes nothing", c));
      brackets.pop_back();
    }
    add(Token::Kind::op, std::string(1, c), begin);
    advance(1);
  }

  void number() {
    const Position begin = here();
    size_t end = i_;
    bool real = false;
    const auto digits = [&] {
      while (end < s_.size() && (is_digit(s_[end]) || s_[end] == '_')) ++end;
    };
    digits();
    if (end + 1 < s_.size() && s_[end] == '.' && is_digit(s_[end + 1])) real = true, ++end, digits();
    if (end < s_.size() && (s_[end] == 'e' || s_[end] == 'E')) {
      size_t exponent = end + 1;
      if (exponent < s_.size() && (s_[exponent] == '+' || s_[exponent] == '-')) ++exponent;
      if (exponent < s_.size() && is_digit(s_[exponent])) real = true, end = exponent, digits();
    }
    std::string text(s_.substr(i_, end - i_));
    std::erase(text, '_');
    add(real ? Token::Kind::real : Token::Kind::integer, text, begin);
    advance(end - i_);
  }

  void string() {
    const Position begin = here();
    const char quote = s_[i_];
    std::string text;
    size_t i = i_ + 1;
    for (; i < s_.size() && s_[i] != quote; ++i) {
      if (s_[i] == '\\' && i + 1 < s_.size()) {
        escape(text, ++i, begin);
      } else {
        text += s_[i];
      }
    }
    if (i >= s_.size()) fail_at(begin, "a string is not closed");
    add(Token::Kind::string, std::move(text), begin);
    advance(i + 1 - i_);
  }

  // Python's escapes; s_[i] is the character behind the backslash, and afterwards the last one that was read.
  void escape(std::string& text, size_t& i, Position begin) const {
    static constexpr std::string_view kLetters = "ntrbfav0\\'\"", kMeaning("\n\t\r\b\f\a\v\0\\'\"", 11);
    const char c = s_[i];
    if (const size_t n = kLetters.find(c); n != std::string_view::npos) {
      text += kMeaning[n];
    } else if (c == '\n') {
      // a line that goes on
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      const std::string hex(s_.substr(i + 1, digits));
      const bool sound = hex.size() == digits &&
                         std::all_of(hex.begin(), hex.end(), [](unsigned char h) { return std::isxdigit(h) != 0; });
      if (!sound) fail_at(begin, fmt::format("\\{} needs {} hexadecimal digits", c, digits));
      const unsigned long code = std::stoul(hex, nullptr, 16);
      if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) fail_at(begin, "\\" + (c + hex) + " is no character");
      utf8::append(text, static_cast<uint32_t>(code));
      i += digits;
    } else {
      text += '\\', text += c;
    }
  }

  std::string_view s_;
  size_t i_ = 0;
  Position at_;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace hearth::text::jinja
