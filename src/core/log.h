#pragma once
// Messages for people go to stderr; stdout belongs to the program's result.
#include <fmt/format.h>

#include <string_view>

namespace hearth::log {

enum class Level { quiet, normal, verbose };
void set_level(Level level);
Level level();

void write(Level level, std::string_view prefix, std::string_view text);

template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::normal, "", fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (level() == Level::verbose) write(Level::verbose, "", fmt::format(format, std::forward<Args>(args)...));
}
// Shown even with --quiet: something the user asked for is not what they get.
template <typename... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::quiet, "warning: ", fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace hearth::log
