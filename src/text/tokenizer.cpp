#include "text/tokenizer.h"

#include <algorithm>
#include <bitset>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "text/bpe.h"
#include "text/spm.h"

namespace hearth::text {
namespace {

constexpr size_t kMaxText = (size_t{1} << 31) / 3 - 16;  // SPM writes a space as 3 bytes; positions are 31 bits

// A stretch of text, or a special token found in it.
struct Fragment {
  std::string_view text;
  int32_t token = -1;
};

bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

void strip_left(std::string_view& text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
}

void strip_right(std::string_view& text) {
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
}

}  // namespace

// Finds special tokens in text. As in llama.cpp the longest token has the first choice of the whole text, then the
// next.
class Tokenizer::SpecialTokens {
 public:
  explicit SpecialTokens(const Vocab& vocab) : vocab_(vocab) {
    for (int32_t id = 0; id < vocab.size(); ++id) {
      const Vocab::Token& token = vocab.tokens[id];
      const bool special =
          token.type == TokenType::control || token.type == TokenType::user_defined || token.type == TokenType::unknown;
      if (special && !token.text.empty()) by_length_.push_back(id);
    }
    std::stable_sort(by_length_.begin(), by_length_.end(),
                     [&](int32_t a, int32_t b) { return vocab.tokens[a].text.size() > vocab.tokens[b].text.size(); });
    for (size_t order = 0; order < by_length_.size(); ++order) insert(vocab.tokens[by_length_[order]].text, order);
  }

  // `plain`: as EncodeOptions has it.
  std::vector<Fragment> partition(std::string_view text, bool parse_special, std::span<const size_t> plain) const {
    const char* const begin = text.data();
    const auto may_begin = [&](const char* at, size_t length) {
      const auto from = static_cast<size_t>(at - begin);
      const auto next = std::lower_bound(plain.begin(), plain.end(), from);
      return next == plain.end() || *next >= from + length;
    };
    std::vector<Fragment> fragments;
    if (!text.empty()) fragments.push_back({text});
    for (const int32_t id : occurring(text)) {
      const TokenType type = vocab_.tokens[id].type;
      // User-defined tokens are found in any case, as in Hugging Face's tokenizers.
      if (!parse_special && type != TokenType::user_defined) continue;
      std::vector<Fragment> split;
      for (const Fragment& fragment : fragments) {
        if (fragment.token >= 0) {
          split.push_back(fragment);
        } else if (type == TokenType::user_defined || plain.empty()) {
          split_at(fragment.text, id, split, [](const char*, size_t) { return true; });
        } else {
          split_at(fragment.text, id, split, may_begin);
        }
      }
      fragments = std::move(split);
    }
    return fragments;
  }

  std::vector<size_t> control_starts(std::string_view text) const {
    std::vector<size_t> starts;
    std::string_view trimmed = text;
    strip_right(trimmed);
    for (size_t i = 0; i < text.size(); ++i) {
      bool starts_here = false;
      const size_t matched = follow(text, i, [&](size_t order) {
        starts_here = starts_here || vocab_.tokens[by_length_[order]].type != TokenType::user_defined;
      });
      if (starts_here || (matched > 0 && i + matched >= trimmed.size())) starts.push_back(i);
    }
    return starts;
  }

 private:
  void insert(std::string_view text, size_t order) {
    uint32_t node = 0;
    first_.set(static_cast<uint8_t>(text[0]));
    for (const char c : text) {
      node = children_.try_emplace(edge(node, c), static_cast<uint32_t>(children_.size() + 1)).first->second;
    }
    ends_.try_emplace(node, order);  // of two tokens with one text, the smaller id
  }

  // The special tokens whose text occurs, longest first: one pass instead of one search for each of thousands of
  // tokens.
  std::vector<int32_t> occurring(std::string_view text) const {
    std::vector<bool> found(by_length_.size());
    for (size_t i = 0; i < text.size(); ++i) follow(text, i, [&](size_t order) { found[order] = true; });
    std::vector<int32_t> ids;
    for (size_t order = 0; order < found.size(); ++order) {
      if (found[order]) ids.push_back(by_length_[order]);
    }
    return ids;
  }

  // Follows the trie along text[i], text[i + 1], …, tells which tokens end on the way, and returns the bytes it came.
  template <typename OnToken>
  size_t follow(std::string_view text, size_t i, OnToken on_token) const {
    if (!first_.test(static_cast<uint8_t>(text[i]))) return 0;
    uint32_t node = 0;
    size_t j = i;
    for (; j < text.size(); ++j) {
      const auto child = children_.find(edge(node, text[j]));
      if (child == children_.end()) break;
      node = child->second;
      if (const auto end = ends_.find(node); end != ends_.end()) on_token(end->second);
    }
    return j - i;
  }

  // `may_be`: asked of every place where the token stands.
  template <typename MayBe>
  void split_at(std::string_view text, int32_t id, std::vector<Fragment>& out, MayBe may_be) const {
    const Vocab::Token& token = vocab_.tokens[id];
    size_t from = 0;  // what is before was looked at
    for (size_t at = text.find(token.text); at != std::string_view::npos; at = text.find(token.text, from)) {
      if (!may_be(text.data() + at, token.text.size())) {
        from = at + 1;
        continue;
      }
      from = 0;
      std::string_view left = text.substr(0, at);
      if (token.lstrip) strip_right(left);
      if (!left.empty()) out.push_back({left});
      out.push_back({{}, id});
      text.remove_prefix(at + token.text.size());
      if (token.rstrip) strip_left(text);
    }
    if (!text.empty()) out.push_back({text});
  }

  static uint64_t edge(uint32_t node, char c) { return uint64_t{node} << 8 | static_cast<uint8_t>(c); }

  const Vocab& vocab_;
  std::vector<int32_t> by_length_;
  std::bitset<256> first_;
  std::unordered_map<uint64_t, uint32_t> children_;  // a trie of the texts; node 0 is its root
  std::unordered_map<uint32_t, size_t> ends_;        // node -> index in by_length_
};

Tokenizer::Tokenizer(Vocab vocab) : vocab_(std::move(vocab)) {
  ids_.reserve(vocab_.tokens.size());
  for (int32_t id = 0; id < vocab_.size(); ++id) {
    // The later of two tokens with one text is used, as in llama.cpp.
    if (!vocab_.tokens[id].text.empty()) ids_[vocab_.tokens[id].text] = id;
  }
  special_ = std::make_unique<SpecialTokens>(vocab_);
}

Tokenizer::~Tokenizer() = default;

std::unique_ptr<Tokenizer> Tokenizer::load(const gguf::File& file) {
  try {
    return create(Vocab::load(file));
  } catch (const Error& error) {
    fail("'{}': {}", file.path().string(), error.what());
  }
}

std::unique_ptr<Tokenizer> Tokenizer::create(Vocab vocab) {
  vocab.finish();
  if (vocab.kind == VocabKind::spm) return std::make_unique<SpmTokenizer>(std::move(vocab));
  return std::make_unique<BpeTokenizer>(std::move(vocab));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  if (text.size() > kMaxText) fail("the text has {} bytes; at most {} can be encoded at once", text.size(), kMaxText);
  std::vector<int32_t> ids;
  if (options.add_special && vocab_.add_bos) ids.push_back(*vocab_.bos);
  bool after_special = true;
  for (const Fragment& fragment : special_->partition(text, options.parse_special, options.plain)) {
    if (fragment.token >= 0) {
      ids.push_back(fragment.token);
    } else {
      encode_text(fragment.text, after_special, ids);
    }
    after_special = fragment.token >= 0;
  }
  if (options.add_special && vocab_.add_bos && ids.size() > 1 && ids[1] == *vocab_.bos) {
    log::warn("the text begins with '{}', which the model adds by itself: it is there twice",
              vocab_.tokens[ids[1]].text);
  }
  if (options.add_special && vocab_.add_eos) ids.push_back(*vocab_.eos);
  return ids;
}

std::vector<size_t> Tokenizer::control_starts(std::string_view text) const {
  return special_->control_starts(text);
}

std::string Tokenizer::piece(int32_t id, bool render_special) const {
  if (id < 0 || id >= n_vocab()) fail("token id {} is out of range: the vocabulary has {} tokens", id, n_vocab());
  const Vocab::Token& token = vocab_.tokens[id];
  switch (token.type) {
    case TokenType::control:
    case TokenType::unknown:
      return render_special ? token.text : std::string();
    case TokenType::user_defined:
      return token.text;
    case TokenType::normal:
    case TokenType::byte:
      return normal_piece(id);
    case TokenType::undefined:
    case TokenType::unused:
      break;  // padding of the vocabulary
  }
  return {};
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool render_special) const {
  std::string text;
  bool at_start = vocab_.add_space_prefix;
  for (const int32_t id : ids) {
    std::string bytes = piece(id, render_special);
    if (at_start && !is_special(id)) {
      if (bytes.starts_with(' ')) bytes.erase(0, 1);
      at_start = false;
    }
    text += bytes;
  }
  return text;
}

std::vector<int32_t> Tokenizer::end_of_generation() const {
  std::vector<int32_t> ids(vocab_.end_of_generation.begin(), vocab_.end_of_generation.end());
  std::sort(ids.begin(), ids.end());
  return ids;
}

bool Tokenizer::is_special(int32_t id) const {
  if (id < 0 || id >= n_vocab()) return false;
  const TokenType type = vocab_.tokens[id].type;
  return type == TokenType::control || type == TokenType::unknown;
}

std::optional<int32_t> Tokenizer::find(std::string_view token_text) const {
  const auto found = ids_.find(token_text);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

}  // namespace hearth::text
