#pragma once
// Two kinds of failure (docs/explanation/architecture.md, "Errors"):
//  * the user's: a bad file, flag or machine. Throw hearth::Error with one line that says what was expected, what was
//  found
//    and what to do. tools/ prints it and exits 1.
//  * ours: a broken invariant. HEARTH_CHECK prints file and line and aborts.
#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace hearth {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void check_failed(const char* expression, const char* file, int line, const std::string& message);

}  // namespace hearth

#define HEARTH_CHECK(condition, ...)                                                                  \
  do {                                                                                                \
    if (!(condition)) [[unlikely]] {                                                                  \
      ::hearth::check_failed(#condition, __FILE__, __LINE__, ::hearth::detail::message(__VA_ARGS__)); \
    }                                                                                                 \
  } while (0)

namespace hearth::detail {
inline std::string message() {
  return {};
}
template <typename... Args>
std::string message(fmt::format_string<Args...> format, Args&&... args) {
  return fmt::format(format, std::forward<Args>(args)...);
}
}  // namespace hearth::detail
