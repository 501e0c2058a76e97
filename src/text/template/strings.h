#pragma once
// Python's string operations on UTF-8. Letters change case in ASCII, Latin-1, Greek and Cyrillic.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hearth::text::jinja {

size_t count_characters(std::string_view text);
// Without `characters` (Python's whitespace when absent) at its ends.
std::string strip(std::string_view text, std::optional<std::string_view> characters, bool left, bool right);
// str.split(): at runs of whitespace when `separator` is absent. At most `most` cuts, from the right for rsplit; negative: all.
std::vector<std::string> split(std::string_view text, std::optional<std::string_view> separator, int64_t most,
                               bool from_right);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);
std::string replace(std::string_view text, std::string_view from, std::string_view to, int64_t most);
std::string lower(std::string_view text);
std::string upper(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);
bool is_space(std::string_view character);

}  // namespace hearth::text::jinja
