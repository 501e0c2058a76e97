#include "core/log.h"

#include <atomic>
#include <cstdio>
#include <string>

namespace hearth::log {
namespace {
std::atomic<Level> g_level{Level::normal};
}

void set_level(Level level) {
  g_level = level;
}
Level level() {
  return g_level;
}

void write(Level level, std::string_view prefix, std::string_view text) {
  if (static_cast<int>(level) > static_cast<int>(g_level.load())) return;
  // One fwrite a line, so that lines of several threads do not mix.
  std::string line;
  line.reserve(prefix.size() + text.size() + 1);
  line.append(prefix).append(text).push_back('\n');
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace hearth::log
