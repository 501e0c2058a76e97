#include "tools/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
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

namespace {

void put(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

LiveLine::LiveLine(bool beside_text)
    : terminal_(isatty(STDERR_FILENO) != 0 && log::level() != log::Level::quiet), next_(Clock::now()) {
  winsize size{};
  if (!terminal_ || ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0) return;
  if (size.ws_col > 0) columns_ = size.ws_col;
  if (!beside_text || isatty(STDOUT_FILENO) == 0) return;
  if (size.ws_row < 3) {  // no room for both
    terminal_ = false;
    return;
  }
  rows_ = size.ws_row;
  std::fflush(stdout);
  // A free line below, then text scrolls above the last row only; setting that moves the cursor, which is put back.
  put(fmt::format("\n\0337\033[1;{}r\0338\033[1A", rows_ - 1));
}

LiveLine::~LiveLine() {
  clear();
  if (rows_ > 0) put("\0337\033[r\0338");
}

void LiveLine::show(const std::string& text) {
  if (!due()) return;
  next_ = Clock::now() + std::chrono::milliseconds(200);
  const std::string line = text.substr(0, static_cast<size_t>(columns_ - 1));
  std::fflush(stdout);
  put(rows_ > 0 ? fmt::format("\0337\033[{};1H\033[K{}\0338", rows_, line) : "\r\033[K" + line);
  drawn_ = true;
}

void LiveLine::clear() {
  if (!drawn_) return;
  put(rows_ > 0 ? fmt::format("\0337\033[{};1H\033[K\0338", rows_) : std::string("\r\033[K"));
  drawn_ = false;
}

std::string live_text(const std::string& unit, int64_t done, int64_t total, double rate, double hits, double seconds) {
  std::string text = fmt::format("{} of {} {}", done, total, unit);
  if (rate > 0) text += fmt::format(", {:.1f} tokens/s", rate);
  if (!std::isnan(hits)) text += fmt::format(", {:.1f} % hits", 100 * hits);
  if (seconds >= 0) text += fmt::format(", {} left", human_duration(seconds));
  return text;
}

TransferProgress::TransferProgress(std::string name, uint64_t total, uint64_t have)
    : name_(std::move(name)), total_(total), have_(have), last_(Clock::now()), begin_(last_) {}

void TransferProgress::update(uint64_t have) {
  if (!line_.due()) return;
  constexpr double kInterval = 0.2, kMemory = 5;  // seconds
  const auto now = Clock::now();
  const double passed = std::max(std::chrono::duration<double>(now - last_).count(), 1e-3);
  const double age = std::chrono::duration<double>(now - begin_).count();
  const double recent = have > have_ ? static_cast<double>(have - have_) / passed : 0;
  const double weight = std::min(1.0, passed / std::min(std::max(age, kInterval), kMemory));
  rate_ += weight * (recent - rate_);
  have_ = have, last_ = now;
  std::string text = fmt::format("{}: {} of {}, {}/s", name_, human_bytes(have), human_bytes(total_),
                                 human_bytes(static_cast<size_t>(rate_)));
  if (rate_ > 0) text += ", " + human_duration(static_cast<double>(total_ - have) / rate_) + " left";
  line_.show(text);
}

}  // namespace hearth::tools
