#include "offline/tune/texts.h"

#include <xxhash.h>

#include <algorithm>

#include "core/error.h"
#include "core/file.h"
#include "offline/profile/corpus.h"

namespace hearth::offline {
namespace {

constexpr size_t kEvery = 3;  // documents to one for validation
constexpr std::string_view kSeparator = "<|endoftext|>";

void append(std::string& part, std::string_view document) {
  if (!part.empty()) part += kSeparator;
  part += document;
}

}  // namespace

int64_t TextPart::targets() const {
  int64_t sum = 0;
  for (const Window& w : windows) sum += w.n_targets;
  return sum;
}

TextPart make_part(std::string_view text, const text::Tokenizer& tokenizer, int64_t window, uint64_t max_tokens) {
  TextPart part;
  part.ids = tokenizer.encode(text, {.add_special = false});
  if (tokenizer.add_bos()) part.bos = tokenizer.bos();
  const auto n_ids = static_cast<int64_t>(part.ids.size());
  const std::vector<Window> all = make_windows(n_ids, window, window, part.bos.has_value());
  const auto per_window = static_cast<uint64_t>(window);
  const size_t wanted =
      max_tokens == 0 ? all.size() : std::clamp<size_t>((max_tokens + per_window - 1) / per_window, 1, all.size());
  for (size_t i = 0; i < wanted; ++i) part.windows.push_back(all[i * all.size() / wanted]);
  return part;
}

model::ProfiledText identify_text(const std::filesystem::path& file) {
  const std::string text = read_text_file(file);
  return {file.filename().string(), fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())), text.size()};
}

SplitText split_text(std::string_view text) {
  SplitText split;
  const std::vector<std::string_view> documents = split_documents(text);
  if (documents.size() >= kEvery) {
    for (size_t d = 0; d < documents.size(); ++d)
      append(d % kEvery == kEvery - 1 ? split.validation : split.fit, documents[d]);
  } else {
    size_t cut = text.size() - text.size() / kEvery;
    cut = std::min(text.find_first_of(" \n", cut), text.size());
    split.fit = text.substr(0, cut);
    split.validation = text.substr(cut);
  }
  if (split.fit.empty() || split.validation.empty())
    fail("the text is too short to be divided into one to tune on and one to judge on; give a longer one (-f)");
  return split;
}

}  // namespace hearth::offline
