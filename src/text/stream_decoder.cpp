#include "text/stream_decoder.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "text/utf8.h"

namespace hearth::text {

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string text;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const utf8::Step step = utf8::next(rest);
    if (step.kind == utf8::Step::Kind::incomplete) break;
    text += step.kind == utf8::Step::Kind::valid ? rest.substr(0, step.length) : utf8::kReplacement;
    rest.remove_prefix(step.length);
  }
  pending_ = std::string(rest);
  return text;
}

std::string Utf8Stream::flush() {
  if (pending_.empty()) return {};
  pending_.clear();
  return std::string(utf8::kReplacement);
}

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) {
    if (stop.empty()) fail("a stop string is empty; give at least one character, or leave the option out");
  }
}

std::string StopMatcher::push(std::string_view text) {
  if (stopped_) return {};
  pending_ += text;
  // The stop string that is complete first, and of two that end together the longer: so it does not matter how the text
  // is cut into pushes.
  size_t begin = std::string::npos, end = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = pending_.find(stop);
    if (at == std::string::npos || at + stop.size() > end) continue;
    begin = at + stop.size() < end ? at : std::min(begin, at);
    end = at + stop.size();
  }
  if (begin != std::string::npos) {
    stopped_ = true;
    met_ = pending_.substr(begin, end - begin);
    return std::exchange(pending_, {}).substr(0, begin);
  }
  // The longest end of the text that begins a stop string.
  size_t held = 0;
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, pending_.size()); n > held; --n) {
      if (pending_.ends_with(std::string_view(stop).substr(0, n))) held = n;
    }
  }
  std::string ready = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, ready.size());
  return ready;
}

std::string StopMatcher::flush() {
  return std::exchange(pending_, {});
}

}  // namespace hearth::text
