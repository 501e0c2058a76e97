#include "core/error.h"

#include <cstdio>
#include <cstdlib>

namespace hearth {

void check_failed(const char* expression, const char* file, int line, const std::string& message) {
  fmt::print(stderr, "{}:{}: internal error: {} does not hold{}{}\n", file, line, expression,
             message.empty() ? "" : ": ", message);
  std::fflush(stderr);
  std::abort();
}

}  // namespace hearth
