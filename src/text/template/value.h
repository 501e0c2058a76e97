#pragma once
// Values of a chat template, with Python's meaning of truth, equality, order and text. Lists, dicts and what is callable are
// shared, as in Python; nothing but a namespace can be changed once it is made.
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace hearth::text::jinja {

class Value;
class Interpreter;
struct Arguments;

using List = std::vector<Value>;

// In the order in which they came.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
  bool is_namespace = false;  // namespace(): {% set ns.name = … %} may change it
  const Value* find(std::string_view key) const;
  const Value* at(const Value& key) const;
  void set(const Value& key, Value value);
};

struct Callable {
  std::string name;
  std::function<Value(Interpreter&, const Arguments&)> call;
};

// A variable, attribute or item that is not there: empty as text, false, no items; anything else is an error.
struct Undefined {
  std::string what;  // "'x' is undefined"
};

class Value {
 public:
  static constexpr int kMostNesting = 100;

  Value() = default;  // none
  Value(std::nullptr_t) {}
  Value(bool b) : v_(b) {}
  Value(int64_t i) : v_(i) {}
  Value(int i) : v_(int64_t{i}) {}
  Value(double d) : v_(d) {}
  Value(std::string s) : v_(std::make_shared<const std::string>(std::move(s))) {}
  Value(std::string_view s) : Value(std::string(s)) {}
  Value(const char* s) : Value(std::string(s)) {}
  // Throws Error when more than kMostNesting of them are inside each other.
  Value(List items);
  Value(Dict dict);
  Value(Callable c) : v_(std::make_shared<const Callable>(std::move(c))) {}
  Value(Undefined u) : v_(std::make_shared<const Undefined>(std::move(u))) {}

  bool is_none() const { return std::holds_alternative<std::monostate>(v_); }
  bool is_bool() const { return std::holds_alternative<bool>(v_); }
  bool is_int() const { return std::holds_alternative<int64_t>(v_); }
  bool is_float() const { return std::holds_alternative<double>(v_); }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_string() const { return std::holds_alternative<std::shared_ptr<const std::string>>(v_); }
  bool is_list() const { return std::holds_alternative<std::shared_ptr<const List>>(v_); }
  bool is_dict() const { return std::holds_alternative<std::shared_ptr<Dict>>(v_); }
  bool is_callable() const { return std::holds_alternative<std::shared_ptr<const Callable>>(v_); }
  bool is_undefined() const { return std::holds_alternative<std::shared_ptr<const Undefined>>(v_); }

  const std::string& string() const { return *std::get<std::shared_ptr<const std::string>>(v_); }
  const List& list() const { return *std::get<std::shared_ptr<const List>>(v_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<Dict>>(v_); }
  Dict& mutable_dict() { return *std::get<std::shared_ptr<Dict>>(v_); }
  const Callable& callable() const { return *std::get<std::shared_ptr<const Callable>>(v_); }
  const Undefined& undefined() const { return *std::get<std::shared_ptr<const Undefined>>(v_); }
  int64_t integer() const { return is_bool() ? int64_t{std::get<bool>(v_)} : std::get<int64_t>(v_); }
  double number() const { return is_float() ? std::get<double>(v_) : static_cast<double>(integer()); }
  // Text that |safe or |escape made: a plain text that is added to it is escaped, as MarkupSafe does.
  bool is_markup() const { return markup_; }
  static Value markup(std::string s) {
    Value v(std::move(s));
    v.markup_ = true;
    return v;
  }
  bool same_object(const Value& other) const { return v_ == other.v_; }

  bool truth() const;
  const char* type_name() const;  // Python's: "str", "int", …

 private:
  std::variant<std::monostate, bool, int64_t, double, std::shared_ptr<const std::string>, std::shared_ptr<const List>,
               std::shared_ptr<Dict>, std::shared_ptr<const Callable>, std::shared_ptr<const Undefined>>
      v_;
  bool markup_ = false;
  int depth_ = 0;  // of lists and dicts inside each other; a namespace counts as none
};

struct Arguments {
  List positional;
  std::vector<std::pair<std::string, Value>> named;
};

bool equal(const Value& a, const Value& b);
// Negative, 0, positive. Throws Error when Python could not order the two.
int compare(const Value& a, const Value& b);
bool contains(const Value& container, const Value& item);

std::string to_text(const Value& value);  // Python's str()
std::string repr(const Value& value);     // Python's repr()

struct JsonStyle {
  int64_t indent = -1;  // spaces a level; -1: all on one line
  bool ensure_ascii = false, sort_keys = false;
  std::string item_separator, key_separator;  // empty: Python's defaults
};
std::string to_json(const Value& value, const JsonStyle& style = {});  // Python's json.dumps

Value from_json(const nlohmann::ordered_json& json);
// The function that `map` applies to each text and key in it.
using TextMap = std::function<std::string(const std::string&)>;
Value from_json(const nlohmann::ordered_json& json, const TextMap& map);

}  // namespace hearth::text::jinja
