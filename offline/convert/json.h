#pragma once
// JSON files of a Hugging Face directory, read as data from a stranger: size, nesting and duplicate keys are checked
// while parsing, and values are taken with their type and range.
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace hearth::convert {

using Json = nlohmann::json;

// The object in `text`. Throws Error, starting with `where`, when it is no JSON object, nests deeper than 64 levels, or
// names a key twice in one object (readers would disagree about which one counts).
Json parse_json_object(std::string_view text, const std::string& where);
// The same from a file of at most `limit` bytes.
Json read_json_object(const std::filesystem::path& path, size_t limit = size_t{256} << 20);

// Typed access to the members of an object. A member that is null counts as absent, as in Hugging Face's own readers.
class Fields {
 public:
  // `object` must outlive this; `where` starts the error messages.
  Fields(const Json& object, std::string where) : object_(&object), where_(std::move(where)) {}

  const Json* find(const char* key) const;
  bool has(const char* key) const { return object_->contains(key); }  // also as null
  // The member, if present. Throws Error when it has another type or lies outside [low, high].
  std::optional<int64_t> integer(const char* key, int64_t low, int64_t high) const;
  std::optional<double> number(const char* key) const;  // finite
  std::optional<bool> boolean(const char* key) const;
  std::optional<std::string> text(const char* key) const;
  std::optional<Fields> object(const char* key) const;
  // As above; throws Error when absent.
  int64_t require_integer(const char* key, int64_t low, int64_t high) const;
  double require_number(const char* key) const;

  bool flag(const char* key, bool otherwise) const { return boolean(key).value_or(otherwise); }
  const std::string& where() const { return where_; }

 private:
  [[noreturn]] void wrong(const char* key, const Json& found, const std::string& expected) const;
  [[noreturn]] void missing(const char* key) const;

  const Json* object_;
  std::string where_;
};

// A value for an error message: short, on one line.
std::string shown(const Json& value);

}  // namespace hearth::convert
