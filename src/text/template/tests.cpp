// Jinja2's tests: what stands behind "is".
#include <cmath>
#include <unordered_map>

#include "core/error.h"
#include "text/template/interpreter.h"
#include "text/template/strings.h"

namespace hearth::text::jinja {
namespace {

const Value& other(const Arguments& a) {
  if (a.positional.size() != 1) fail("this test needs one value to compare with");
  return a.positional[0];
}

bool is_string_of(const Value& v, std::string (*change)(std::string_view)) {
  const std::string text = to_text(v);
  return change(text) == text && (lower(text) != text || upper(text) != text);
}

int64_t whole(const Value& v) {
  if (v.is_undefined()) fail("{}", v.undefined().what);
  if (!v.is_int() && !v.is_bool()) fail("this test needs a whole number, found '{}'", v.type_name());
  return v.integer();
}

bool is_equal(Interpreter&, const Value& v, const Arguments& a) {
  return equal(v, other(a));
}
bool is_not_equal(Interpreter&, const Value& v, const Arguments& a) {
  return !equal(v, other(a));
}
bool is_greater(Interpreter&, const Value& v, const Arguments& a) {
  return compare(v, other(a)) > 0;
}
bool is_at_least(Interpreter&, const Value& v, const Arguments& a) {
  return compare(v, other(a)) >= 0;
}
bool is_less(Interpreter&, const Value& v, const Arguments& a) {
  return compare(v, other(a)) < 0;
}
bool is_at_most(Interpreter&, const Value& v, const Arguments& a) {
  return compare(v, other(a)) <= 0;
}

const std::unordered_map<std::string_view, Test>& tests() {
  static const std::unordered_map<std::string_view, Test> table = {
      {"defined", [](Interpreter&, const Value& v, const Arguments&) { return !v.is_undefined(); }},
      {"undefined", [](Interpreter&, const Value& v, const Arguments&) { return v.is_undefined(); }},
      {"none", [](Interpreter&, const Value& v, const Arguments&) { return v.is_none(); }},
      {"boolean", [](Interpreter&, const Value& v, const Arguments&) { return v.is_bool(); }},
      {"true", [](Interpreter&, const Value& v, const Arguments&) { return v.is_bool() && v.truth(); }},
      {"false", [](Interpreter&, const Value& v, const Arguments&) { return v.is_bool() && !v.truth(); }},
      {"string", [](Interpreter&, const Value& v, const Arguments&) { return v.is_string(); }},
      {"number", [](Interpreter&, const Value& v, const Arguments&) { return v.is_number(); }},
      {"integer", [](Interpreter&, const Value& v, const Arguments&) { return v.is_int(); }},
      {"float", [](Interpreter&, const Value& v, const Arguments&) { return v.is_float(); }},
      {"mapping", [](Interpreter&, const Value& v, const Arguments&) { return v.is_dict() && !v.dict().is_namespace; }},
      {"sequence",  // whatever has a length and items
       [](Interpreter&, const Value& v, const Arguments&) {
         return v.is_list() || v.is_string() || v.is_dict() || v.is_undefined();
       }},
      {"iterable", [](Interpreter&, const Value& v,
                      const Arguments&) { return v.is_list() || v.is_string() || v.is_dict() || v.is_undefined(); }},
      {"callable", [](Interpreter&, const Value& v, const Arguments&) { return v.is_callable(); }},
      {"odd", [](Interpreter&, const Value& v, const Arguments&) { return whole(v) % 2 != 0; }},
      {"even", [](Interpreter&, const Value& v, const Arguments&) { return whole(v) % 2 == 0; }},
      {"divisibleby",
       [](Interpreter&, const Value& v, const Arguments& a) {
         if (whole(other(a)) == 0) fail("division by zero");
         return whole(other(a)) == -1 || whole(v) % whole(other(a)) == 0;
       }},
      {"lower", [](Interpreter&, const Value& v, const Arguments&) { return is_string_of(v, lower); }},
      {"upper", [](Interpreter&, const Value& v, const Arguments&) { return is_string_of(v, upper); }},
      {"in", [](Interpreter&, const Value& v, const Arguments& a) { return contains(other(a), v); }},
      {"sameas",
       [](Interpreter&, const Value& v, const Arguments& a) {
         const Value& w = other(a);
         const bool plain = v.is_none() || v.is_number();
         return plain ? equal(v, w) && v.is_bool() == w.is_bool() && v.is_float() == w.is_float() : v.same_object(w);
       }},
      {"filter", [](Interpreter&, const Value& v,
                    const Arguments&) { return v.is_string() && find_filter(v.string()) != nullptr; }},
      {"test", [](Interpreter&, const Value& v,
                  const Arguments&) { return v.is_string() && find_test(v.string()) != nullptr; }},
      {"==", is_equal},
      {"eq", is_equal},
      {"equalto", is_equal},
      {"!=", is_not_equal},
      {"ne", is_not_equal},
      {">", is_greater},
      {"gt", is_greater},
      {"greaterthan", is_greater},
      {">=", is_at_least},
      {"ge", is_at_least},
      {"<", is_less},
      {"lt", is_less},
      {"lessthan", is_less},
      {"<=", is_at_most},
      {"le", is_at_most},
  };
  return table;
}

}  // namespace

Test find_test(std::string_view name) {
  const auto found = tests().find(name);
  return found == tests().end() ? nullptr : found->second;
}

}  // namespace hearth::text::jinja
