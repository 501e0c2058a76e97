#include "offline/profile/corpus.h"

#include <xxhash.h>

#include <algorithm>

#include "core/error.h"
#include "core/file.h"

namespace hearth::offline {
namespace {

constexpr std::string_view kSeparator = "<|endoftext|>";

bool blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

}  // namespace

uint64_t Corpus::tokens() const {
  uint64_t sum = 0;
  for (const Sequence& s : sequences) sum += s.ids.size();
  return sum;
}

std::vector<std::string_view> split_documents(std::string_view text) {
  std::vector<std::string_view> documents;
  for (;;) {
    const size_t end = text.find(kSeparator);
    const std::string_view document = text.substr(0, end);
    if (!blank(document)) documents.push_back(document);
    if (end == std::string_view::npos) return documents;
    text.remove_prefix(end + kSeparator.size());
  }
}

std::vector<Sequence> make_sequences(std::vector<std::vector<int32_t>> documents, const CorpusOptions& options) {
  HEARTH_CHECK(options.window > 0);
  const auto every = static_cast<size_t>(options.heldout_every), window = static_cast<size_t>(options.window);
  const bool by_document = documents.size() >= every;  // windows of one document resemble each other
  std::vector<Sequence> sequences;
  for (size_t d = 0; d < documents.size(); ++d) {
    const std::vector<int32_t>& ids = documents[d];
    for (size_t first = 0; first < ids.size(); first += window) {
      const size_t unit = by_document ? d : sequences.size();
      const auto begin = ids.begin() + static_cast<ptrdiff_t>(first);
      const auto count = static_cast<ptrdiff_t>(std::min(window, ids.size() - first));
      sequences.push_back({{begin, begin + count}, every > 0 && unit % every == every - 1});
    }
  }
  return sequences;
}

Corpus read_corpus(std::span<const std::filesystem::path> files, const text::Tokenizer& tokenizer,
                   const CorpusOptions& options) {
  if (options.window < 2) fail("a window of {} tokens was asked for, expected 2 or more", options.window);
  if (options.heldout_every < 0 || options.heldout_every == 1) {
    fail("one document of {} held out leaves nothing to profile; expected 0 (none) or 2 and more",
         options.heldout_every);
  }
  Corpus corpus;
  std::vector<std::vector<int32_t>> documents;
  for (const std::filesystem::path& path : files) {
    const std::string text = read_text_file(path);
    corpus.texts.push_back(
        {path.filename().string(), fmt::format("{:016x}", XXH3_64bits(text.data(), text.size())), text.size()});
    for (const std::string_view document : split_documents(text)) {
      documents.push_back(tokenizer.encode(document, {.add_special = true, .parse_special = false}));
    }
  }
  corpus.sequences = make_sequences(std::move(documents), options);
  if (corpus.tokens() == 0) fail("the texts hold nothing to profile; give files with text (-f)");
  return corpus;
}

}  // namespace hearth::offline
