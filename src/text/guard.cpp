#include "text/guard.h"

namespace hearth::text {

std::string guarded(const std::string& text, const Tokenizer& tokenizer) {
  const std::vector<size_t> starts = tokenizer.control_starts(text);
  if (starts.empty() && text.find(kGuardMark) == std::string::npos) return text;
  std::string marked;
  auto start = starts.begin();
  for (size_t i = 0; i < text.size();) {
    const bool starts_here = start != starts.end() && *start == i;
    const bool is_mark = std::string_view(text).substr(i).starts_with(kGuardMark);
    if (starts_here || is_mark) marked += kGuardMark;
    const size_t end = i + (is_mark ? kGuardMark.size() : 1);
    for (; i < end; ++i) marked += text[i];
    while (start != starts.end() && *start < end) ++start;
  }
  return marked;
}

Unguarded unguarded(std::string_view rendered) {
  Unguarded u;
  for (size_t i = 0; i < rendered.size();) {
    size_t length = 1;
    if (rendered.substr(i).starts_with(kGuardMark)) {
      i += kGuardMark.size();
      if (i == rendered.size()) break;
      u.plain.push_back(u.text.size());
      if (rendered.substr(i).starts_with(kGuardMark)) length = kGuardMark.size();
    }
    u.text += rendered.substr(i, length);
    i += length;
  }
  return u;
}

}  // namespace hearth::text
