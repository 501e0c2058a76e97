#include "tools/output.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace hearth::tools {
namespace {

[[noreturn]] void fail_out(int reason) {
  fail("standard output could not be written: {}", std::strerror(reason));
}

}  // namespace

void write_out(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) fail_out(errno);
}

void flush_out() {
  errno = 0;
  if (std::fflush(stdout) != 0) fail_out(errno);
}

void write_json(const nlohmann::json& value) {
  write_out(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

nlohmann::json json_number(float value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{}", value).c_str(), nullptr);
}

}  // namespace hearth::tools
