// Arithmetic, slices, Python's % formatting, and how arguments are read.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "text/template/interpreter.h"
#include "text/utf8.h"

namespace hearth::text::jinja {
namespace {

[[noreturn]] void refuse(const std::string& op, const Value& a, const Value& b) {
  if (a.is_undefined()) fail("{}", a.undefined().what);
  if (b.is_undefined()) fail("{}", b.undefined().what);
  fail("'{}' {} '{}' is not possible", a.type_name(), op, b.type_name());
}

int64_t power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  for (; exponent > 0; --exponent) {
    if (__builtin_mul_overflow(result, base, &result)) fail("the number is too large");
    if (result == 0 || result == 1) break;
  }
  return result;
}

Value of_integers(const std::string& op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  if (op == "+") {
    overflow = __builtin_add_overflow(a, b, &result);
  } else if (op == "-") {
    overflow = __builtin_sub_overflow(a, b, &result);
  } else if (op == "*") {
    overflow = __builtin_mul_overflow(a, b, &result);
  } else if (op == "**") {
    if (b < 0) return std::pow(static_cast<double>(a), static_cast<double>(b));
    if (b > 64 && a != 0 && a != 1 && a != -1) fail("the number is too large");
    return power(a, a == -1 ? b % 2 : b);
  } else {
    if (b == 0) fail("division by zero");
    if (op == "/") return static_cast<double>(a) / static_cast<double>(b);
    if (b == -1) return of_integers(op == "//" ? "-" : "*", 0, op == "//" ? a : 0);
    const int64_t floor = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
    return op == "//" ? floor : a - floor * b;
  }
  if (overflow) fail("the number is too large");
  return result;
}

Value of_reals(const std::string& op, double a, double b) {
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (op == "**") return std::pow(a, b);
  if (b == 0) fail("division by zero");
  if (op == "/") return a / b;
  const double floor = std::floor(a / b);
  return op == "//" ? floor : a - floor * b;
}

// The text that 3 * "ab" builds.
Value repeated(Interpreter& in, const Value& what, int64_t times) {
  const auto n = static_cast<size_t>(std::max<int64_t>(times, 0));
  const size_t size = what.is_string() ? what.string().size() : what.list().size() * sizeof(Value);
  if (n > (size_t{1} << 30) || (size > 0 && n > (size_t{1} << 40) / size)) fail("'*' builds too much");
  in.charge(n * size);
  if (what.is_string()) {
    std::string text;
    for (size_t i = 0; i < n && size > 0; ++i) text += what.string();
    return text;
  }
  List list;
  for (size_t i = 0; i < n && size > 0; ++i) list.insert(list.end(), what.list().begin(), what.list().end());
  return list;
}

}  // namespace

Value arithmetic(Interpreter& in, const std::string& op, const Value& a, const Value& b) {
  if (a.is_markup() != b.is_markup() && op == "+" && a.is_string() && b.is_string()) {
    const auto part = [&](const Value& v) {
      return v.is_markup() ? v.string() : in.apply_filter("escape", v, {}).string();
    };
    return Value::markup(part(a) + part(b));
  }
  if (op == "~") {
    std::string text = to_text(a) + to_text(b);
    in.charge(text.size());
    return text;
  }
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return of_reals(op, a.number(), b.number());
    return of_integers(op, a.integer(), b.integer());
  }
  if (op == "+" && a.is_string() && b.is_string()) {
    in.charge(a.string().size() + b.string().size());
    return a.is_markup() ? Value::markup(a.string() + b.string()) : Value(a.string() + b.string());
  }
  if (op == "+" && a.is_list() && b.is_list()) {
    in.charge((a.list().size() + b.list().size()) * sizeof(Value));
    List all = a.list();
    all.insert(all.end(), b.list().begin(), b.list().end());
    return all;
  }
  const auto repeats = [](const Value& what, const Value& n) {
    return (what.is_string() || what.is_list()) && (n.is_int() || n.is_bool());
  };
  if (op == "*" && repeats(a, b)) return repeated(in, a, b.integer());
  if (op == "*" && repeats(b, a)) return repeated(in, b, a.integer());
  if (op == "%" && a.is_string()) return percent_format(a.string(), b.is_list() ? b.list() : List{b});
  refuse(op, a, b);
}

Value slice(Interpreter& in, const Value& object, const Value& from, const Value& to, const Value& step_value) {
  if (object.is_undefined()) fail("{}", object.undefined().what);
  if (!object.is_string() && !object.is_list()) fail("a value of type '{}' has no slices", object.type_name());
  std::vector<std::string_view> characters;
  if (object.is_string()) {
    for (std::string_view rest = object.string(); !rest.empty();) {
      const size_t n = utf8::next(rest).length;
      characters.push_back(rest.substr(0, n));
      rest.remove_prefix(n);
    }
  }
  const int64_t n = object.is_string() ? std::ssize(characters) : std::ssize(object.list());
  in.charge(static_cast<size_t>(n) * 16);
  const auto integer = [](const Value& v, int64_t otherwise) {
    if (v.is_none()) return otherwise;
    if (!v.is_int() && !v.is_bool())
      fail("a slice's bound is of type '{}'; a whole number was expected", v.type_name());
    return v.integer();
  };
  const int64_t step = integer(step_value, 1);
  if (step == 0) fail("a slice's step is 0");
  const int64_t lowest = step > 0 ? 0 : -1, highest = step > 0 ? n : n - 1;
  const auto bound = [&](const Value& v, int64_t otherwise) {
    int64_t i = integer(v, otherwise);
    if (!v.is_none() && i < 0) i += n;
    return std::clamp(i, lowest, highest);
  };
  const int64_t begin = bound(from, step > 0 ? 0 : n - 1), end = bound(to, step > 0 ? n : -1);
  std::string text;
  List list;
  for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
    if (object.is_string()) {
      text += characters[static_cast<size_t>(i)];
    } else {
      list.push_back(object.list()[static_cast<size_t>(i)]);
    }
    if (step > n || step < -n) break;  // the next one is outside, and i must not overflow
  }
  if (object.is_string()) return text;
  return list;
}

std::string percent_format(const std::string& format, const List& arguments) {
  std::string out;
  size_t used = 0;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out += format[i];
      continue;
    }
    size_t end = i + 1;
    while (end < format.size() && std::string_view("-+ 0#.123456789").find(format[end]) != std::string_view::npos)
      ++end;
    if (end >= format.size()) fail("a format ends within '%'");
    const char kind = format[end];
    const std::string flags = format.substr(i + 1, end - i - 1);
    i = end;
    if (kind == '%') {
      out += '%';
      continue;
    }
    if (flags.size() > 8 || used >= arguments.size()) fail("'%{}{}' has no argument", flags, kind);
    const Value& v = arguments[used++];
    const auto printed = [&](const char* type, auto value) {
      char text[512];
      const int n = std::snprintf(text, sizeof text, ("%" + flags + type).c_str(), value);
      if (n < 0 || n >= static_cast<int>(sizeof text)) fail("'%{}{}' is too wide", flags, kind);
      out.append(text, static_cast<size_t>(n));
    };
    if (kind == 's' || kind == 'r') {
      const std::string text = kind == 's' ? to_text(v) : repr(v);
      if (flags.empty()) {
        out += text;
      } else {
        printed("s", text.c_str());
      }
    } else if ((kind == 'd' || kind == 'i') && v.is_number()) {
      if (v.is_float() && !(std::fabs(v.number()) < 9e18)) fail("'%{}' of {}", kind, to_text(v));
      printed("lld", static_cast<long long>(v.is_float() ? static_cast<int64_t>(v.number()) : v.integer()));
    } else if (kind == 'x' && v.is_int()) {
      printed("llx", static_cast<unsigned long long>(v.integer()));
    } else if ((kind == 'f' || kind == 'g' || kind == 'e') && v.is_number()) {
      printed(std::string(1, kind).c_str(), v.number());
    } else {
      fail("'%{}' of a value of type '{}'", kind, v.type_name());
    }
  }
  if (used != arguments.size()) fail("a format has {} places for {} arguments", used, arguments.size());
  return out;
}

const Value* ArgumentReader::next(std::string_view name) {
  if (positional_ < a_.positional.size()) return &a_.positional[positional_++];
  for (const auto& [key, value] : a_.named) {
    if (key != name) continue;
    ++named_;
    return &value;
  }
  return nullptr;
}

Value ArgumentReader::next(std::string_view name, Value otherwise) {
  const Value* found = next(name);
  return found != nullptr ? *found : std::move(otherwise);
}

const Value& ArgumentReader::require(std::string_view name) {
  const Value* found = next(name);
  if (found == nullptr) fail("{}() needs '{}'", callee_, name);
  return *found;
}

const std::string& ArgumentReader::require_string(std::string_view name) {
  const Value& value = require(name);
  if (value.is_undefined()) fail("{}", value.undefined().what);
  if (!value.is_string()) fail("{}() needs a string for '{}', found '{}'", callee_, name, value.type_name());
  return value.string();
}

int64_t ArgumentReader::integer(std::string_view name, int64_t otherwise) {
  const Value* found = next(name);
  if (found == nullptr) return otherwise;
  if (!found->is_int() && !found->is_bool()) {
    fail("{}() needs a whole number for '{}', found '{}'", callee_, name, found->type_name());
  }
  return found->integer();
}

void ArgumentReader::finish() const {
  if (positional_ < a_.positional.size() || named_ < a_.named.size())
    fail("{}() was given more than it takes", callee_);
}

}  // namespace hearth::text::jinja
