#include "offline/convert/json.h"

#include <cmath>
#include <unordered_set>
#include <vector>

#include "core/error.h"
#include "core/file.h"

namespace hearth::convert {
namespace {

constexpr size_t kMaxDepth = 64;  // real files nest less than 10 deep

// Follows the parser's events: how deep it is, and which keys the open objects have.
class StructureCheck {
 public:
  explicit StructureCheck(const std::string& where) : where_(where) {}

  void on_event(Json::parse_event_t event, const Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        if (open_.size() == kMaxDepth) fail("{}: the JSON nests deeper than {} levels", where_, kMaxDepth);
        open_.emplace_back();
        break;
      case Json::parse_event_t::object_end:
      case Json::parse_event_t::array_end:
        open_.pop_back();
        break;
      case Json::parse_event_t::key:
        if (!open_.back().insert(parsed.get<std::string>()).second) {
          fail("{}: the JSON has the key {} twice in one object", where_, shown(parsed));
        }
        break;
      case Json::parse_event_t::value:
        break;
    }
  }

 private:
  const std::string& where_;
  std::vector<std::unordered_set<std::string>> open_;
};

}  // namespace

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

Json parse_json_object(std::string_view text, const std::string& where) {
  StructureCheck check(where);
  Json result;
  try {
    result = Json::parse(text.begin(), text.end(), [&](int, Json::parse_event_t event, Json& parsed) {
      check.on_event(event, parsed);
      return true;
    });
  } catch (const Json::parse_error& e) {
    fail("{}: not valid JSON near byte {} of {}", where, e.byte, text.size());
  } catch (const Json::out_of_range&) {
    fail("{}: not valid JSON: a number is too large", where);
  }
  if (!result.is_object()) fail("{}: expected a JSON object, found {}", where, result.type_name());
  return result;
}

Json read_json_object(const std::filesystem::path& path, size_t limit) {
  return parse_json_object(read_text_file(path, limit), fmt::format("'{}'", path.string()));
}

const Json* Fields::find(const char* key) const {
  const auto it = object_->find(key);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

void Fields::wrong(const char* key, const Json& found, const std::string& expected) const {
  fail("{}: {} is {}, expected {}", where_, key, shown(found), expected);
}
void Fields::missing(const char* key) const {
  fail("{}: {} is missing", where_, key);
}

std::optional<int64_t> Fields::integer(const char* key, int64_t low, int64_t high) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto expected = [&] { return fmt::format("an integer from {} to {}", low, high); };
  if (!value->is_number_integer()) wrong(key, *value, expected());
  // Numbers above 2^63 are unsigned in the parser and would wrap.
  if (value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    wrong(key, *value, expected());
  const auto n = value->get<int64_t>();
  if (n < low || n > high) wrong(key, *value, expected());
  return n;
}

std::optional<double> Fields::number(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number() || !std::isfinite(value->get<double>())) wrong(key, *value, "a number");
  return value->get<double>();
}

std::optional<bool> Fields::boolean(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) wrong(key, *value, "true or false");
  return value->get<bool>();
}

std::optional<std::string> Fields::text(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) wrong(key, *value, "a string");
  return value->get<std::string>();
}

std::optional<Fields> Fields::object(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) wrong(key, *value, "an object");
  return Fields(*value, fmt::format("{}: {}", where_, key));
}

int64_t Fields::require_integer(const char* key, int64_t low, int64_t high) const {
  const auto value = integer(key, low, high);
  if (!value) missing(key);
  return *value;
}

double Fields::require_number(const char* key) const {
  const auto value = number(key);
  if (!value) missing(key);
  return *value;
}

}  // namespace hearth::convert
