// Methods of strings, lists and dicts. What would change a value is refused, as in Jinja2's immutable sandbox.
#include <algorithm>
#include <array>
#include <unordered_map>

#include "core/error.h"
#include "text/template/interpreter.h"
#include "text/template/strings.h"

namespace hearth::text::jinja {
namespace {

using Method = Value (*)(Interpreter&, const Value& self, const Arguments&);

List to_list(const std::vector<std::string>& parts) {
  return {parts.begin(), parts.end()};
}

std::optional<std::string_view> optional_text(const Value& v, const char* callee) {
  if (v.is_none()) return std::nullopt;
  if (!v.is_string()) fail("{}() needs a string, found '{}'", callee, v.type_name());
  return v.string();
}

template <bool left, bool right>
Value strip_method(Interpreter& in, const Value& self, const Arguments& a) {
  ArgumentReader args("strip", a);
  const Value characters = args.next("chars", nullptr);
  args.finish();
  in.charge(self.string().size());
  return strip(self.string(), optional_text(characters, "strip"), left, right);
}

template <bool from_right>
Value split_method(Interpreter& in, const Value& self, const Arguments& a) {
  ArgumentReader args("split", a);
  const Value separator = args.next("sep", nullptr), most = args.next("maxsplit", -1);
  args.finish();
  if (!most.is_int()) fail("split() needs a whole number for 'maxsplit', found '{}'", most.type_name());
  in.charge(self.string().size() * 4);
  return to_list(split(self.string(), optional_text(separator, "split"), most.integer(), from_right));
}

template <bool at_start>
Value starts_or_ends(Interpreter&, const Value& self, const Arguments& a) {
  ArgumentReader args(at_start ? "startswith" : "endswith", a);
  const Value& what = args.require("prefix");
  const auto fits = [&](const Value& part) {
    if (!part.is_string()) fail("startswith() and endswith() need a string, found '{}'", part.type_name());
    return at_start ? self.string().starts_with(part.string()) : self.string().ends_with(part.string());
  };
  args.finish();
  if (!what.is_list()) return fits(what);
  return std::any_of(what.list().begin(), what.list().end(), fits);
}

template <std::string (*change)(std::string_view)>
Value change_method(Interpreter& in, const Value& self, const Arguments& a) {
  ArgumentReader("this method", a).finish();
  in.charge(self.string().size());
  return change(self.string());
}

template <bool last>
Value find_in(Interpreter&, const Value& self, const Arguments& a) {
  ArgumentReader args("find", a);
  const std::string& what = args.require_string("sub");
  args.finish();
  const size_t at = last ? self.string().rfind(what) : self.string().find(what);
  if (at == std::string::npos) return -1;
  return static_cast<int64_t>(count_characters(std::string_view(self.string()).substr(0, at)));
}

// Every character, and there is one.
template <typename Is>
bool all_of(const Value& self, Is is) {
  const std::string& s = self.string();
  return !s.empty() && std::all_of(s.begin(), s.end(), [&](char c) { return is(static_cast<unsigned char>(c)); });
}

Value format_method(Interpreter& in, const Value& self, const Arguments& a) {
  std::string out;
  const std::string& s = self.string();
  size_t next = 0;
  for (size_t i = 0; i < s.size(); ++i) {
    if ((s[i] == '{' || s[i] == '}') && i + 1 < s.size() && s[i + 1] == s[i]) {
      out += s[i++];
    } else if (s[i] == '{') {
      const size_t end = s.find('}', i);
      if (end == std::string::npos) fail("format(): a '{{' is not closed");
      const std::string field = s.substr(i + 1, end - i - 1);
      i = end;
      const bool number = !field.empty() &&
                          std::all_of(field.begin(), field.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
      if (field.empty() || number) {
        const size_t n = field.empty() ? next++ : field.size() > 4 ? SIZE_MAX : std::stoul(field);
        if (n >= a.positional.size()) fail("format(): there is no argument for '{{{}}}'", field);
        out += to_text(a.positional[n]);
        continue;
      }
      const auto named =
          std::find_if(a.named.begin(), a.named.end(), [&](const auto& item) { return item.first == field; });
      if (named == a.named.end()) fail("format() knows plain fields by number or name, found '{{{}}}'", field);
      out += to_text(named->second);
    } else if (s[i] == '}') {
      fail("format(): a '}}' closes nothing");
    } else {
      out += s[i];
    }
    in.charge(0);
  }
  in.charge(out.size());
  return out;
}

const std::unordered_map<std::string_view, Method>& string_methods() {
  static const std::unordered_map<std::string_view, Method> table = {
      {"strip", strip_method<true, true>},
      {"lstrip", strip_method<true, false>},
      {"rstrip", strip_method<false, true>},
      {"split", split_method<false>},
      {"rsplit", split_method<true>},
      {"startswith", starts_or_ends<true>},
      {"endswith", starts_or_ends<false>},
      {"lower", change_method<lower>},
      {"upper", change_method<upper>},
      {"title", change_method<title>},
      {"capitalize", change_method<capitalize>},
      {"find", find_in<false>},
      {"rfind", find_in<true>},
      {"format", format_method},
      {"replace",
       [](Interpreter& in, const Value& self, const Arguments& a) -> Value {
         ArgumentReader args("replace", a);
         const std::string from = args.require_string("old"), to = args.require_string("new");
         const int64_t most = args.integer("count", -1);
         args.finish();
         in.charge(self.string().size() +
                   (from.empty() ? self.string().size() : self.string().size() / from.size()) * to.size());
         return replace(self.string(), from, to, most);
       }},
      {"count",
       [](Interpreter&, const Value& self, const Arguments& a) -> Value {
         ArgumentReader args("count", a);
         const std::string& what = args.require_string("sub");
         args.finish();
         return static_cast<int64_t>(what.empty() ? count_characters(self.string()) + 1
                                                  : split(self.string(), what, -1, false).size() - 1);
       }},
      {"join",
       [](Interpreter& in, const Value& self, const Arguments& a) -> Value {
         ArgumentReader args("join", a);
         std::string text;
         bool first = true;
         for (const Value& v : in.items(args.require("items"))) {
           if (!v.is_string()) fail("join() needs strings, found '{}'", v.type_name());
           text += (first ? "" : self.string()) + v.string();
           first = false;
           in.charge(v.string().size() + self.string().size());
         }
         return text;
       }},
      {"splitlines",
       [](Interpreter& in, const Value& self, const Arguments& a) -> Value {
         ArgumentReader args("splitlines", a);
         in.charge(self.string().size() * 4);
         return to_list(split_lines(self.string(), args.next("keepends", false).truth()));
       }},
      {"removeprefix",
       [](Interpreter&, const Value& self, const Arguments& a) -> Value {
         const std::string& what = ArgumentReader("removeprefix", a).require_string("prefix");
         return self.string().starts_with(what) ? Value(self.string().substr(what.size())) : self;
       }},
      {"removesuffix",
       [](Interpreter&, const Value& self, const Arguments& a) -> Value {
         const std::string& s = self.string();
         const std::string& what = ArgumentReader("removesuffix", a).require_string("suffix");
         return s.ends_with(what) ? Value(s.substr(0, s.size() - what.size())) : self;
       }},
      {"isdigit", [](Interpreter&, const Value& self, const Arguments&) -> Value { return all_of(self, isdigit); }},
      {"isalpha", [](Interpreter&, const Value& self, const Arguments&) -> Value { return all_of(self, isalpha); }},
      {"isalnum", [](Interpreter&, const Value& self, const Arguments&) -> Value { return all_of(self, isalnum); }},
      {"isspace", [](Interpreter&, const Value& self, const Arguments&) -> Value { return all_of(self, isspace); }},
      {"isupper",
       [](Interpreter&, const Value& self, const Arguments&) -> Value {
         return upper(self.string()) == self.string() && lower(self.string()) != self.string();
       }},
      {"islower",
       [](Interpreter&, const Value& self, const Arguments&) -> Value {
         return lower(self.string()) == self.string() && upper(self.string()) != self.string();
       }},
  };
  return table;
}

const std::unordered_map<std::string_view, Method>& list_methods() {
  static const std::unordered_map<std::string_view, Method> table = {
      {"index",
       [](Interpreter&, const Value& self, const Arguments& a) -> Value {
         const Value& what = ArgumentReader("index", a).require("value");
         for (size_t i = 0; i < self.list().size(); ++i) {
           if (equal(self.list()[i], what)) return static_cast<int64_t>(i);
         }
         fail("index(): {} is not in the list", repr(what));
       }},
      {"count",
       [](Interpreter&, const Value& self, const Arguments& a) -> Value {
         const Value& what = ArgumentReader("count", a).require("value");
         return static_cast<int64_t>(
             std::count_if(self.list().begin(), self.list().end(), [&](const Value& v) { return equal(v, what); }));
       }},
      {"copy", [](Interpreter&, const Value& self, const Arguments&) -> Value { return self; }},
  };
  return table;
}

const std::unordered_map<std::string_view, Method>& dict_methods() {
  static const std::unordered_map<std::string_view, Method> table = {
      {"items",
       [](Interpreter& in, const Value& self, const Arguments&) -> Value {
         List all;
         for (const auto& [key, value] : self.dict().items) all.emplace_back(List{key, value});
         in.charge(all.size() * 64);
         return all;
       }},
      {"keys",
       [](Interpreter& in, const Value& self, const Arguments&) -> Value {
         List all;
         for (const auto& [key, value] : self.dict().items) all.push_back(key);
         in.charge(all.size() * 64);
         return all;
       }},
      {"values",
       [](Interpreter& in, const Value& self, const Arguments&) -> Value {
         List all;
         for (const auto& [key, value] : self.dict().items) all.push_back(value);
         in.charge(all.size() * 64);
         return all;
       }},
      {"get",
       [](Interpreter&, const Value& self, const Arguments& a) -> Value {
         ArgumentReader args("get", a);
         const Value key = args.require("key"), otherwise = args.next("default", nullptr);
         args.finish();
         const Value* found = self.dict().at(key);
         return found != nullptr ? *found : otherwise;
       }},
      {"copy", [](Interpreter&, const Value& self, const Arguments&) -> Value { return Value(Dict(self.dict())); }},
  };
  return table;
}

constexpr std::array<std::string_view, 11> kChanging = {"append",  "extend", "insert",     "remove", "pop",    "sort",
                                                        "reverse", "clear",  "setdefault", "update", "popitem"};

}  // namespace

std::optional<Value> find_method(const Value& object, std::string_view name) {
  const auto& table = object.is_string() ? string_methods() : object.is_list() ? list_methods() : dict_methods();
  if (!object.is_string() && !object.is_list() && !object.is_dict()) return std::nullopt;
  const auto found = table.find(name);
  if (found != table.end()) {
    return Callable{std::string(name), [object, method = found->second](Interpreter& in, const Arguments& a) {
                      return method(in, object, a);
                    }};
  }
  const bool changing = std::find(kChanging.begin(), kChanging.end(), name) != kChanging.end();
  if (object.is_string() || !changing) return std::nullopt;
  if (object.is_dict() && (name == "sort" || name == "append" || name == "extend" || name == "insert" ||
                           name == "remove" || name == "reverse" || object.dict().find(name) != nullptr)) {
    return std::nullopt;
  }
  return Undefined{fmt::format("'{}()' would change a {}, which templates may not", name, object.type_name())};
}

}  // namespace hearth::text::jinja
