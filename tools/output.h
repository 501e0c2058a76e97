#pragma once
// Results go to stdout through these, so that a full disk or a closed pipe is an error and not a shorter result.
#include <nlohmann/json.hpp>
#include <string_view>

namespace hearth::tools {

// Throws Error with the system's reason.
void write_out(std::string_view text);
// Makes what was written visible. Throws Error likewise.
void flush_out();

// One line of JSON. Bytes that are not UTF-8 become U+FFFD.
void write_json(const nlohmann::json& value);
// The shortest decimal that reads back as the same float; null when it is not finite.
nlohmann::json json_number(float value);

}  // namespace hearth::tools
