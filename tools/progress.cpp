#include "tools/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
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

TransferProgress::TransferProgress(std::string name, uint64_t total, uint64_t have)
    : name_(std::move(name)),
      total_(total),
      have_(have),
      shown_(isatty(STDERR_FILENO) != 0 && log::level() != log::Level::quiet),
      last_(Clock::now()),
      begin_(last_) {}

TransferProgress::~TransferProgress() {
  clear();
}

void TransferProgress::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void TransferProgress::update(uint64_t have) {
  constexpr double kInterval = 0.2, kMemory = 5;  // seconds
  const auto now = Clock::now();
  const double passed = std::chrono::duration<double>(now - last_).count();
  if (!shown_ || (passed < kInterval && have < total_)) return;
  const double recent = have > have_ ? static_cast<double>(have - have_) / std::max(passed, 1e-3) : 0;
  const double age = std::chrono::duration<double>(now - begin_).count();
  const double weight = std::min(1.0, passed / std::min(std::max(age, kInterval), kMemory));
  rate_ += weight * (recent - rate_);
  have_ = have, last_ = now;
  std::string left;
  if (rate_ > 0) left = ", " + human_duration(static_cast<double>(total_ - have) / rate_) + " left";
  const std::string line = fmt::format("\r\033[K{}: {} of {}, {}/s{}", name_, human_bytes(have), human_bytes(total_),
                                       human_bytes(static_cast<size_t>(rate_)), left);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace hearth::tools
