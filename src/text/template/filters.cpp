// Jinja2's filters, with transformers' tojson.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "core/error.h"
#include "text/template/interpreter.h"
#include "text/template/strings.h"

namespace hearth::text::jinja {
namespace {

// --- what a filter works on ---

std::string text_of(Interpreter& in, const Value& v) {
  std::string text = to_text(v);
  in.charge(text.size());
  return text;
}

// value.a.b.0 of "a.b.0", as map(attribute=…) and the like take it.
Value dotted(Interpreter& in, const Value& v, const Value& path) {
  if (path.is_int()) return in.item(v, path);
  if (!path.is_string()) fail("an attribute's name is of type '{}'; a string was expected", path.type_name());
  Value found = v;
  for (const std::string& part : split(path.string(), ".", -1, false)) {
    const bool number = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    found = number ? in.item(found, static_cast<int64_t>(std::stoll(part))) : in.item(found, part);
  }
  return found;
}

Value folded(const Value& v, bool case_sensitive) {
  return v.is_string() && !case_sensitive ? Value(lower(v.string())) : v;
}

template <std::string (*change)(std::string_view)>
Value change_filter(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader("this filter", a).finish();
  return change(text_of(in, v));
}

Value trim(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("trim", a);
  const Value characters = args.next("chars", nullptr);
  args.finish();
  if (!characters.is_none() && !characters.is_string()) fail("trim needs a string, found '{}'", characters.type_name());
  const auto which = characters.is_none() ? std::nullopt : std::optional<std::string_view>(characters.string());
  return strip(text_of(in, v), which, true, true);
}

Value length(Interpreter&, const Value& v, const Arguments&) {
  if (v.is_string()) return static_cast<int64_t>(count_characters(v.string()));
  if (v.is_list()) return static_cast<int64_t>(v.list().size());
  if (v.is_dict()) return static_cast<int64_t>(v.dict().items.size());
  if (v.is_undefined()) return 0;
  fail("a value of type '{}' has no length", v.type_name());
}

Value default_value(Interpreter&, const Value& v, const Arguments& a) {
  ArgumentReader args("default", a);
  const Value otherwise = args.next("default_value", ""), also_false = args.next("boolean", false);
  args.finish();
  return v.is_undefined() || (also_false.truth() && !v.truth()) ? otherwise : v;
}

Value json(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("tojson", a);
  JsonStyle style;
  style.ensure_ascii = args.next("ensure_ascii", false).truth();
  const Value indent = args.next("indent", nullptr), separators = args.next("separators", nullptr);
  if (!indent.is_none()) {
    if (!indent.is_int() || indent.integer() < 0 || indent.integer() > 16) fail("tojson needs an indent of 0 to 16");
    style.indent = indent.integer();
  }
  if (separators.is_list() && separators.list().size() == 2) {
    style.item_separator = to_text(separators.list()[0]), style.key_separator = to_text(separators.list()[1]);
  }
  style.sort_keys = args.next("sort_keys", false).truth();
  args.finish();
  std::string text = to_json(v, style);
  in.charge(text.size());
  return text;
}

Value join(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("join", a);
  const std::string between = to_text(args.next("d", ""));
  const Value attribute = args.next("attribute", nullptr);
  args.finish();
  std::string text;
  bool first = true;
  for (const Value& item : in.items(v)) {
    text += (first ? "" : between) + to_text(attribute.is_none() ? item : dotted(in, item, attribute));
    first = false;
    if (text.size() > (size_t{1} << 26)) in.charge(text.size() + (size_t{1} << 26));
    in.charge(between.size());
  }
  in.charge(text.size());
  return text;
}

// Words begin behind whitespace and opening brackets; unlike str.title(), not behind every other character.
std::string title_filter(std::string_view text) {
  std::string out, word;
  const auto end_word = [&] { out += capitalize(word), word.clear(); };
  for (const char c : text) {
    if (std::string_view("- \t\n\r\f\v({[<").find(c) == std::string_view::npos) {
      word += c;
    } else {
      end_word(), out += c;
    }
  }
  end_word();
  return out;
}

// --- of lists ---

Value sorted(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("sort", a);
  const bool reverse = args.next("reverse", false).truth(), exact = args.next("case_sensitive", false).truth();
  const Value attribute = args.next("attribute", nullptr);
  args.finish();
  List all = in.items(v);
  in.charge(all.size() * 1024);
  const auto key = [&](const Value& item) {
    return folded(attribute.is_none() ? item : dotted(in, item, attribute), exact);
  };
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : all) keyed.emplace_back(key(item), item);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& x, const auto& y) {
    const int order = compare(x.first, y.first);
    return reverse ? order > 0 : order < 0;
  });
  List out;
  for (auto& [k, item] : keyed) out.push_back(std::move(item));
  return out;
}

Value dict_sorted(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("dictsort", a);
  const bool exact = args.next("case_sensitive", false).truth();
  const std::string by = to_text(args.next("by", "key"));
  const Value reverse = args.next("reverse", false);
  args.finish();
  if (!v.is_dict()) fail("dictsort needs a dict, found '{}'", v.type_name());
  const Value items = in.call(*find_method(v, "items"), {});
  return sorted(in, items,
                {{}, {{"attribute", by == "value" ? 1 : 0}, {"case_sensitive", exact}, {"reverse", reverse}}});
}

Value reversed(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader("reverse", a).finish();
  if (v.is_string()) return slice(in, v, nullptr, nullptr, -1);
  List all = in.items(v);
  std::reverse(all.begin(), all.end());
  in.charge(all.size() * 16);
  return all;
}

Value unique(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("unique", a);
  const bool exact = args.next("case_sensitive", false).truth();
  const Value attribute = args.next("attribute", nullptr);
  args.finish();
  List seen, kept;
  for (const Value& item : in.items(v)) {
    Value key = folded(attribute.is_none() ? item : dotted(in, item, attribute), exact);
    in.charge(seen.size() * 16);
    if (contains(seen, key)) continue;
    seen.push_back(std::move(key));
    kept.push_back(item);
  }
  return kept;
}

template <bool largest>
Value extreme(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args(largest ? "max" : "min", a);
  const bool exact = args.next("case_sensitive", false).truth();
  const Value attribute = args.next("attribute", nullptr);
  args.finish();
  const List all = in.items(v);
  if (all.empty()) return Undefined{"No aggregated item, sequence was empty."};
  const auto key = [&](const Value& item) {
    return folded(attribute.is_none() ? item : dotted(in, item, attribute), exact);
  };
  Value best = all[0];
  for (const Value& item : all) {
    const int order = compare(key(item), key(best));
    if (largest ? order > 0 : order < 0) best = item;
  }
  return best;
}

Value sum(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("sum", a);
  const Value attribute = args.next("attribute", nullptr);
  Value total = args.next("start", 0);
  args.finish();
  for (const Value& item : in.items(v)) {
    total = arithmetic(in, "+", total, attribute.is_none() ? item : dotted(in, item, attribute));
  }
  return total;
}

// map('filter', …) and map(attribute='name', default=…).
Value map(Interpreter& in, const Value& v, const Arguments& a) {
  if (!v.truth()) return List{};  // none, too
  List out;
  Arguments rest = a;
  if (a.positional.empty()) {
    ArgumentReader args("map", a);
    const Value attribute = args.require("attribute");
    const Value* otherwise = args.next("default");
    args.finish();
    for (const Value& item : in.items(v)) {
      Value found = dotted(in, item, attribute);
      out.push_back(found.is_undefined() && otherwise != nullptr ? *otherwise : std::move(found));
      in.charge(16);
    }
    return out;
  }
  const std::string name = to_text(a.positional[0]);
  rest.positional.erase(rest.positional.begin());
  for (const Value& item : in.items(v)) out.push_back(in.apply_filter(name, item, rest));
  return out;
}

// select, reject (by_attribute false) and selectattr, rejectattr.
template <bool by_attribute, bool wanted>
Value chosen(Interpreter& in, const Value& v, const Arguments& a) {
  const size_t n_names = by_attribute ? 1 : 0, n = a.positional.size();
  if (n < n_names) fail("selectattr and rejectattr need an attribute's name");
  const Value attribute = n_names > 0 ? a.positional[0] : Value(nullptr);
  const Value test = n > n_names ? a.positional[n_names] : Value(nullptr);
  Arguments rest;  // the test's own
  rest.named = a.named;
  for (size_t i = n_names + 1; i < n; ++i) rest.positional.push_back(a.positional[i]);
  if (!v.truth()) return List{};  // none, too
  List out;
  for (const Value& item : in.items(v)) {
    const Value what = by_attribute ? dotted(in, item, attribute) : item;
    const bool holds = test.is_none() ? what.truth() : in.apply_test(to_text(test), what, rest);
    if (holds == wanted) out.push_back(item);
    in.charge(16);
  }
  return out;
}

Value grouped(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("groupby", a);
  const Value attribute = args.require("attribute");
  args.finish();
  List groups;
  std::vector<std::pair<Value, List>> found;
  for (const Value& item : in.items(sorted(in, v, {{}, {{"attribute", attribute}}}))) {
    const Value key = dotted(in, item, attribute);
    if (found.empty() || !equal(folded(found.back().first, false), folded(key, false))) found.emplace_back(key, List{});
    found.back().second.push_back(item);
  }
  for (auto& [key, list] : found) groups.emplace_back(List{key, Value(std::move(list))});
  return groups;
}

// --- numbers ---

Value to_int(Interpreter&, const Value& v, const Arguments& a) {
  ArgumentReader args("int", a);
  const Value otherwise = args.next("default", 0);
  if (v.is_int() || v.is_bool()) return v.integer();
  if (v.is_float()) return std::fabs(v.number()) < 9e18 ? Value(static_cast<int64_t>(v.number())) : otherwise;
  if (!v.is_string()) return otherwise;
  const std::string text = strip(v.string(), std::nullopt, true, true);
  const size_t sign = text.starts_with('+') ? 1 : 0;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + sign, text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  double real = 0;
  const auto [end2, error2] = std::from_chars(text.data() + sign, text.data() + text.size(), real);
  if (error2 == std::errc() && end2 == text.data() + text.size() && std::fabs(real) < 9e18)
    return static_cast<int64_t>(real);
  return otherwise;
}

Value to_float(Interpreter&, const Value& v, const Arguments& a) {
  ArgumentReader args("float", a);
  const Value otherwise = args.next("default", 0.0);
  if (v.is_number()) return v.number();
  if (!v.is_string()) return otherwise;
  const std::string text = strip(v.string(), std::nullopt, true, true);
  double real = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), real);
  return error == std::errc() && end == text.data() + text.size() ? Value(real) : otherwise;
}

Value rounded(Interpreter&, const Value& v, const Arguments& a) {
  ArgumentReader args("round", a);
  const Value precision = args.next("precision", 0);
  const std::string method = to_text(args.next("method", "common"));
  args.finish();
  if (!v.is_number() || !precision.is_int() || precision.integer() > 15 || precision.integer() < -15)
    fail("round needs numbers");
  const double scale = std::pow(10.0, static_cast<double>(precision.integer())), x = v.number() * scale;
  // Python rounds halves to even, which is the default rounding mode.
  return (method == "ceil" ? std::ceil(x) : method == "floor" ? std::floor(x) : std::nearbyint(x)) / scale;
}

Value absolute(Interpreter& in, const Value& v, const Arguments&) {
  if (v.is_float()) return std::fabs(v.number());
  if (!v.is_number()) fail("abs needs a number, found '{}'", v.type_name());
  return v.integer() < 0 ? arithmetic(in, "-", 0, v) : Value(v.integer());
}

// --- text ---

Value indented(Interpreter& in, const Value& v, const Arguments& a) {
  ArgumentReader args("indent", a);
  const Value width = args.next("width", 4);
  const bool first = args.next("first", false).truth(), blank = args.next("blank", false).truth();
  args.finish();
  if (!width.is_string() && (!width.is_int() || width.integer() < 0 || width.integer() > 1000)) {
    fail("indent needs a width of 0 to 1000, or a text");
  }
  const std::string margin =
      width.is_string() ? width.string() : std::string(static_cast<size_t>(width.integer()), ' ');
  std::vector<std::string> lines = split(text_of(in, v), "\n", -1, false);
  std::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i == 0 ? first : blank || !lines[i].empty()) out += margin;
    out += lines[i];
    in.charge(margin.size());
  }
  return out;
}

Value escaped(Interpreter& in, const Value& v, const Arguments&) {
  if (v.is_markup()) return v;
  std::string out;
  for (const char c : text_of(in, v)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return Value::markup(std::move(out));
}

Value as_list(Interpreter& in, const Value& v, const Arguments&) {
  return in.items(v);
}
Value as_text(Interpreter& in, const Value& v, const Arguments&) {
  if (v.is_markup()) return v;
  return text_of(in, v);
}

const std::unordered_map<std::string_view, Filter>& filters() {
  static const std::unordered_map<std::string_view, Filter> table = {
      {"trim", trim},
      {"length", length},
      {"count", length},
      {"default", default_value},
      {"d", default_value},
      {"tojson", json},
      {"join", join},
      {"lower", change_filter<lower>},
      {"upper", change_filter<upper>},
      {"capitalize", change_filter<capitalize>},
      {"title", change_filter<title_filter>},
      {"string", as_text},
      {"safe", [](Interpreter& in, const Value& v, const Arguments&) { return Value::markup(text_of(in, v)); }},
      {"list", as_list},
      {"sort", sorted},
      {"dictsort", dict_sorted},
      {"reverse", reversed},
      {"unique", unique},
      {"min", extreme<false>},
      {"max", extreme<true>},
      {"sum", sum},
      {"map", map},
      {"select", chosen<false, true>},
      {"reject", chosen<false, false>},
      {"selectattr", chosen<true, true>},
      {"rejectattr", chosen<true, false>},
      {"groupby", grouped},
      {"int", to_int},
      {"float", to_float},
      {"round", rounded},
      {"abs", absolute},
      {"indent", indented},
      {"escape", escaped},
      {"e", escaped},
      {"replace", [](Interpreter& in, const Value& v,
                     const Arguments& a) { return in.call(*find_method(text_of(in, v), "replace"), a); }},
      {"first",
       [](Interpreter& in, const Value& v, const Arguments&) -> Value {
         const List all = in.items(v);
         return all.empty() ? Value(Undefined{"No first item, sequence was empty."}) : all.front();
       }},
      {"last",
       [](Interpreter& in, const Value& v, const Arguments&) -> Value {
         const List all = in.items(v);
         return all.empty() ? Value(Undefined{"No last item, sequence was empty."}) : all.back();
       }},
      {"items",
       [](Interpreter& in, const Value& v, const Arguments&) -> Value {
         if (v.is_undefined()) return List{};
         if (!v.is_dict()) fail("items needs a dict, found '{}'", v.type_name());
         return in.call(*find_method(v, "items"), {});
       }},
      {"attr",
       [](Interpreter& in, const Value& v, const Arguments& a) -> Value {
         return in.attribute(v, ArgumentReader("attr", a).require_string("name"));
       }},
      {"format",
       [](Interpreter& in, const Value& v, const Arguments& a) -> Value {
         return percent_format(text_of(in, v), a.positional);
       }},
      {"wordcount",
       [](Interpreter& in, const Value& v, const Arguments&) -> Value {
         return static_cast<int64_t>(split(text_of(in, v), std::nullopt, -1, false).size());
       }},
  };
  return table;
}

}  // namespace

Filter find_filter(std::string_view name) {
  const auto found = filters().find(name);
  return found == filters().end() ? nullptr : found->second;
}

}  // namespace hearth::text::jinja
