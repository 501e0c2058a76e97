#include "text/template/value.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/error.h"
#include "text/utf8.h"

namespace hearth::text::jinja {

const Value* Dict::find(std::string_view key) const {
  for (const auto& [k, v] : items) {
    if (k.is_string() && k.string() == key) return &v;
  }
  return nullptr;
}

const Value* Dict::at(const Value& key) const {
  for (const auto& [k, v] : items) {
    if (equal(k, key)) return &v;
  }
  return nullptr;
}

void Dict::set(const Value& key, Value value) {
  for (auto& [k, v] : items) {
    if (equal(k, key)) {
      v = std::move(value);
      return;
    }
  }
  items.emplace_back(key, std::move(value));
}

Value::Value(List items) {
  for (const Value& v : items) depth_ = std::max(depth_, v.depth_);
  if (++depth_ > kMostNesting) fail("more than {} lists and dicts are inside each other", kMostNesting);
  v_ = std::make_shared<const List>(std::move(items));
}

Value::Value(Dict dict) {
  if (!dict.is_namespace) {
    for (const auto& [key, v] : dict.items) depth_ = std::max(depth_, v.depth_);
    if (++depth_ > kMostNesting) fail("more than {} lists and dicts are inside each other", kMostNesting);
  }
  v_ = std::make_shared<Dict>(std::move(dict));
}

bool Value::truth() const {
  if (is_none() || is_undefined()) return false;
  if (is_bool() || is_int()) return integer() != 0;
  if (is_float()) return number() != 0;
  if (is_string()) return !string().empty();
  if (is_list()) return !list().empty();
  if (is_dict()) return dict().is_namespace || !dict().items.empty();
  return true;
}

const char* Value::type_name() const {
  static constexpr const char* kNames[] = {"NoneType", "bool", "int",      "float",    "str",
                                           "list",     "dict", "function", "Undefined"};
  return kNames[v_.index()];
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (!a.is_float() && !b.is_float()) return a.integer() == b.integer();
    return a.number() == b.number();
  }
  if (a.is_undefined() && b.is_undefined()) return true;
  if (a.is_string() && b.is_string()) return a.string() == b.string();
  if (a.is_list() && b.is_list()) {
    return std::equal(a.list().begin(), a.list().end(), b.list().begin(), b.list().end(), equal);
  }
  if (a.is_dict() && b.is_dict() && !a.dict().is_namespace && !b.dict().is_namespace) {
    if (a.dict().items.size() != b.dict().items.size()) return false;
    return std::all_of(a.dict().items.begin(), a.dict().items.end(), [&](const auto& item) {
      const Value* other = b.dict().at(item.first);
      return other != nullptr && equal(item.second, *other);
    });
  }
  return a.same_object(b);
}

int compare(const Value& a, const Value& b) {
  const auto order = [](const auto& x, const auto& y) { return x < y ? -1 : y < x ? 1 : 0; };
  if (a.is_number() && b.is_number()) {
    if (!a.is_float() && !b.is_float()) return order(a.integer(), b.integer());
    return order(a.number(), b.number());
  }
  if (a.is_string() && b.is_string()) return order(a.string(), b.string());  // UTF-8 orders as code points do
  if (a.is_list() && b.is_list()) {
    const List &x = a.list(), &y = b.list();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(x[i], y[i])) return compare(x[i], y[i]);
    }
    return order(x.size(), y.size());
  }
  if (a.is_undefined()) fail("{}", a.undefined().what);
  if (b.is_undefined()) fail("{}", b.undefined().what);
  fail("'{}' and '{}' cannot be compared by size", a.type_name(), b.type_name());
}

bool contains(const Value& container, const Value& item) {
  if (container.is_string()) {
    if (!item.is_string()) fail("'in' of a string needs a string, found '{}'", item.type_name());
    return container.string().find(item.string()) != std::string::npos;
  }
  if (container.is_list()) {
    return std::any_of(container.list().begin(), container.list().end(),
                       [&](const Value& v) { return equal(v, item); });
  }
  if (container.is_dict()) return container.dict().at(item) != nullptr;
  if (container.is_undefined()) return false;
  fail("a value of type '{}' contains nothing", container.type_name());
}

namespace {

// Python's repr of a double: the shortest digits that read back the same.
std::string float_text(double d) {
  if (std::isnan(d)) return "nan";
  if (std::isinf(d)) return d > 0 ? "inf" : "-inf";
  const double magnitude = std::fabs(d);
  if (magnitude != 0 && (magnitude < 1e-4 || magnitude >= 1e16)) {
    std::string text = fmt::format("{:e}", d);
    for (int digits = 0; digits < 18; ++digits) {
      text = fmt::format("{:.{}e}", d, digits);
      if (std::strtod(text.c_str(), nullptr) == d) break;
    }
    return text;
  }
  std::string text = fmt::format("{}", d);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string quoted(const std::string& s) {
  const bool double_quotes = s.find('\'') != std::string::npos && s.find('"') == std::string::npos;
  const char quote = double_quotes ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : s) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == quote || c == '\\') {
      out += '\\', out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + quote;
}

}  // namespace

std::string repr(const Value& value) {
  if (value.is_string()) return quoted(value.string());
  std::string text;
  if (value.is_list()) {
    for (const Value& v : value.list()) (text += text.empty() ? "" : ", ") += repr(v);
    return fmt::format("[{}]", text);
  }
  if (value.is_dict()) {
    if (value.dict().is_namespace) return "<Namespace>";
    for (const auto& [k, v] : value.dict().items) {
      ((text += text.empty() ? "" : ", ") += repr(k)) += ": " + repr(v);
    }
    return fmt::format("{{{}}}", text);
  }
  if (value.is_undefined()) return "Undefined";
  return to_text(value);
}

std::string to_text(const Value& value) {
  if (value.is_string()) return value.string();
  if (value.is_none()) return "None";
  if (value.is_bool()) return value.truth() ? "True" : "False";
  if (value.is_int()) return std::to_string(value.integer());
  if (value.is_float()) return float_text(value.number());
  if (value.is_undefined()) return {};
  if (value.is_callable()) fail("'{}' is a function and has no text; call it", value.callable().name);
  return repr(value);
}

namespace {

std::string json_string(const std::string& s, bool ensure_ascii) {
  std::string out = "\"";
  for (size_t i = 0; i < s.size();) {
    const auto byte = static_cast<unsigned char>(s[i]);
    if (byte >= 0x80 && ensure_ascii) {
      const std::string_view rest = std::string_view(s).substr(i);
      const utf8::Step step = utf8::next(rest);
      const uint32_t c = step.kind == utf8::Step::Kind::valid ? utf8::code_point(rest.substr(0, step.length)) : 0xFFFD;
      if (c >= 0x10000) {
        out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((c - 0x10000) >> 10), 0xDC00 + ((c - 0x10000) & 0x3FF));
      } else {
        out += fmt::format("\\u{:04x}", c);
      }
      i += step.length;
      continue;
    }
    ++i;
    switch (byte) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (byte < 0x20) {
          out += fmt::format("\\u{:04x}", byte);
        } else {
          out += static_cast<char>(byte);
        }
    }
  }
  return out + '"';
}

class JsonWriter {
 public:
  explicit JsonWriter(const JsonStyle& style) : style_(style) {
    item_ = style.item_separator.empty() ? (style.indent >= 0 ? "," : ", ") : style.item_separator;
    key_ = style.key_separator.empty() ? ": " : style.key_separator;
  }

  std::string write(const Value& v, int64_t level = 0) const {
    if (v.is_string()) return json_string(v.string(), style_.ensure_ascii);
    if (v.is_none()) return "null";
    if (v.is_bool()) return v.truth() ? "true" : "false";
    if (v.is_float() && std::isnan(v.number())) return "NaN";
    if (v.is_float() && std::isinf(v.number())) return v.number() > 0 ? "Infinity" : "-Infinity";
    if (v.is_number()) return to_text(v);
    if (v.is_list()) {
      std::vector<std::string> parts;
      for (const Value& item : v.list()) parts.push_back(write(item, level + 1));
      return enclosed('[', parts, ']', level);
    }
    if (v.is_dict() && !v.dict().is_namespace) {
      auto items = v.dict().items;
      if (style_.sort_keys) {
        std::stable_sort(items.begin(), items.end(),
                         [](const auto& a, const auto& b) { return compare(a.first, b.first) < 0; });
      }
      std::vector<std::string> parts;
      for (const auto& [k, item] : items) {
        parts.push_back((k.is_string() ? write(k) : fmt::format("\"{}\"", write(k))) + key_ + write(item, level + 1));
      }
      return enclosed('{', parts, '}', level);
    }
    if (v.is_undefined()) fail("{}", v.undefined().what);
    fail("a value of type '{}' cannot be written as JSON", v.type_name());
  }

 private:
  std::string new_line(int64_t level) const {
    if (style_.indent < 0) return {};
    return fmt::format("\n{:{}}", "", style_.indent * level);
  }
  std::string enclosed(char open, const std::vector<std::string>& parts, char close, int64_t level) const {
    std::string text(1, open);
    for (size_t i = 0; i < parts.size(); ++i) text += (i == 0 ? "" : item_) + new_line(level + 1) + parts[i];
    if (!parts.empty()) text += new_line(level);
    return text + close;
  }

  const JsonStyle& style_;
  std::string item_, key_;
};

}  // namespace

std::string to_json(const Value& value, const JsonStyle& style) {
  return JsonWriter(style).write(value);
}

namespace {

Value from_json(const nlohmann::ordered_json& json, const TextMap& map, int depth) {
  if (depth > Value::kMostNesting) fail("more than {} levels of JSON are inside each other", Value::kMostNesting);
  using Type = nlohmann::ordered_json::value_t;
  switch (json.type()) {
    case Type::boolean:
      return json.get<bool>();
    case Type::number_integer:
      return json.get<int64_t>();
    case Type::number_unsigned: {
      const auto n = json.get<uint64_t>();
      if (n > static_cast<uint64_t>(INT64_MAX)) return static_cast<double>(n);
      return static_cast<int64_t>(n);
    }
    case Type::number_float:
      return json.get<double>();
    case Type::string:
      return map(json.get_ref<const std::string&>());
    case Type::array: {
      List items;
      for (const auto& item : json) items.push_back(from_json(item, map, depth + 1));
      return items;
    }
    case Type::object: {
      Dict dict;
      for (const auto& [k, v] : json.items()) dict.items.emplace_back(map(k), from_json(v, map, depth + 1));
      return dict;
    }
    default:
      return nullptr;
  }
}

}  // namespace

Value from_json(const nlohmann::ordered_json& json) {
  return from_json(json, [](const std::string& text) { return text; });
}

Value from_json(const nlohmann::ordered_json& json, const TextMap& map) {
  return from_json(json, map, 1);
}

}  // namespace hearth::text::jinja
