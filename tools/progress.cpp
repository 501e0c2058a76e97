#include "tools/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "core/log.h"
#include "tools/figures.h"

namespace hearth::tools {

Progress::Progress(int64_t total)
    : total_(total), terminal_(isatty(STDERR_FILENO) != 0), begin_(Clock::now()), next_(begin_) {}

Progress::~Progress() {
  if (line_open_) std::fputc('\n', stderr);
}

void Progress::update(int64_t done, const std::string& note) {
  const auto now = Clock::now();
  if (log::level() == log::Level::quiet || (now < next_ && done < total_)) return;
  next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
  const double elapsed = std::chrono::duration<double>(now - begin_).count();
  const double left = done > 0 ? elapsed / static_cast<double>(done) * static_cast<double>(total_ - done) : 0;
  const std::string line = fmt::format("[{}/{}] {}, {} left", done, total_, note, human_duration(left));
  const std::string shown = terminal_ ? "\r\033[K" + line : line + "\n";
  std::fwrite(shown.data(), 1, shown.size(), stderr);
  line_open_ = terminal_;
}

}  // namespace hearth::tools
