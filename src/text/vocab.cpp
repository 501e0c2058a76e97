#include "text/vocab.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/log.h"
#include "text/pretokenizer.h"
#include "text/spm.h"

namespace hearth::text {
namespace {

// GGUF has no list of the tokens that end a generation. llama.cpp goes by these texts, and so does everybody's model.
constexpr std::array<std::string_view, 23> kEndOfGeneration = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",  // DeepSeek
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",  // fill-in-the-middle: padding, the next file or repository
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
};

std::vector<Vocab::Token> load_tokens(const gguf::File& file) {
  auto texts = file.require<std::vector<std::string>>("tokenizer.ggml.tokens");
  if (texts.empty()) fail("tokenizer.ggml.tokens is empty");
  if (texts.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max() / 4)) {
    fail("tokenizer.ggml.tokens has {} entries, more than ids can number", texts.size());
  }
  std::vector<Vocab::Token> tokens(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) tokens[i].text = std::move(texts[i]);
  const auto check_length = [&](const char* key, size_t n) {
    if (n != tokens.size()) fail("{} has {} entries, but tokenizer.ggml.tokens has {}", key, n, tokens.size());
  };
  if (const auto scores = file.get<std::vector<float>>("tokenizer.ggml.scores")) {
    check_length("tokenizer.ggml.scores", scores->size());
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i].score = (*scores)[i];
  }
  if (const auto types = file.get<std::vector<int32_t>>("tokenizer.ggml.token_type")) {
    check_length("tokenizer.ggml.token_type", types->size());
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i].type = static_cast<TokenType>((*types)[i]);
  }
  return tokens;
}

std::vector<std::pair<std::string, std::string>> load_merges(const gguf::File& file) {
  std::vector<std::pair<std::string, std::string>> merges;
  const auto lines = file.require<std::vector<std::string>>("tokenizer.ggml.merges");
  merges.reserve(lines.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    // From the second character on: the left part may begin with a space only in vocabularies that are not byte-level.
    const size_t space = line.find(' ', 1);
    if (space == std::string::npos || space + 1 == line.size()) {
      fail("tokenizer.ggml.merges[{}] is '{}'; two parts with a space between them were expected", i, line);
    }
    merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  return merges;
}

std::optional<int32_t> load_id(const gguf::File& file, const char* key, size_t n_vocab) {
  const auto id = file.get<int64_t>(key);
  if (!id) return std::nullopt;
  if (*id < 0 || *id >= static_cast<int64_t>(n_vocab))
    fail("{} is {}, but the vocabulary has {} tokens", key, *id, n_vocab);
  return static_cast<int32_t>(*id);
}

void load_kind(const gguf::File& file, Vocab& vocab) {
  const auto model = file.require<std::string>("tokenizer.ggml.model");
  if (model == "gpt2") {
    vocab.kind = VocabKind::bpe;
    if (const auto pre = file.get<std::string>("tokenizer.ggml.pre")) {
      vocab.pre = *pre;
    } else {
      log::warn(
          "tokenizer.ggml.pre is missing: words are split by the default rules; converting the model anew sets it");
    }
  } else if (model == "llama") {
    vocab.kind = VocabKind::spm;
    if (file.find("tokenizer.ggml.scores") == nullptr)
      fail("tokenizer.ggml.scores is missing; a SentencePiece vocabulary needs it");
  } else {
    fail("tokenizer.ggml.model is '{}'; hearth knows 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)", model);
  }
}

void load_special_ids(const gguf::File& file, Vocab& vocab) {
  const auto id = [&](const char* key) { return load_id(file, key, vocab.tokens.size()); };
  vocab.bos = id("tokenizer.ggml.bos_token_id");
  vocab.eos = id("tokenizer.ggml.eos_token_id");
  vocab.unk = id("tokenizer.ggml.unknown_token_id");
  for (const char* key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    if (const auto end = id(key)) vocab.end_of_generation.insert(*end);
  }
  const bool spm = vocab.kind == VocabKind::spm;
  if (spm && vocab.tokens.size() > 2) {  // SentencePiece's own numbering
    if (!vocab.unk) vocab.unk = 0;
    if (!vocab.bos) vocab.bos = 1;
    if (!vocab.eos) vocab.eos = 2;
  }
  const bool bos_by_default = vocab.bos && (spm || PreTokenizer::adds_bos(vocab.pre));
  vocab.add_bos = file.get<bool>("tokenizer.ggml.add_bos_token").value_or(bos_by_default);
  vocab.add_eos = file.get<bool>("tokenizer.ggml.add_eos_token").value_or(false);
}

void check_token(const Vocab& vocab, int32_t id) {
  const Vocab::Token& token = vocab.tokens[id];
  const auto type = static_cast<int32_t>(token.type);
  if (type < 0 || type > static_cast<int32_t>(TokenType::byte)) {
    fail("tokenizer.ggml.token_type[{}] is {}; 0 to 6 were expected", id, type);
  }
  if (std::isnan(token.score)) fail("tokenizer.ggml.scores[{}] is not a number", id);
  if (vocab.kind == VocabKind::spm && token.type == TokenType::byte && parse_byte_token(token.text) < 0) {
    fail("tokenizer.ggml.tokens[{}] is '{}'; a byte token must look like <0x0A>", id, token.text);
  }
}

void find_end_of_generation(Vocab& vocab) {
  const auto is_end = [](std::string_view text) {
    return std::find(kEndOfGeneration.begin(), kEndOfGeneration.end(), text) != kEndOfGeneration.end();
  };
  const auto has = [&](std::string_view text) {
    return std::any_of(vocab.tokens.begin(), vocab.tokens.end(), [&](const auto& token) { return token.text == text; });
  };
  // OpenAI's harmony format ends single messages with <|end|>, and goes on.
  const bool harmony = has("<|return|>") && has("<|call|>");
  for (int32_t id = 0; id < vocab.size(); ++id) {
    Vocab::Token& token = vocab.tokens[id];
    if (!is_end(token.text)) continue;
    if (harmony && token.text == "<|end|>") {
      token.type = TokenType::user_defined;
      continue;
    }
    vocab.end_of_generation.insert(id);
    token.type = TokenType::control;  // some conversions call it a normal token, which would print it
  }
  if (vocab.eos) vocab.end_of_generation.insert(*vocab.eos);
}

// GGUF does not store which special tokens swallow whitespace; llama.cpp knows these models.
void set_strips(Vocab& vocab) {
  std::string name = vocab.model_name;
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return c < 0x80 ? std::tolower(c) : c; });
  const bool phi3 = name.find("phi-3") != std::string::npos || name.find("phi3") != std::string::npos;
  const bool jina = vocab.pre.starts_with("jina-v2");
  for (Vocab::Token& token : vocab.tokens) {
    if (jina && token.text == "<mask>") token.lstrip = true;
    if (!phi3) continue;
    const bool special =
        token.type == TokenType::control || token.type == TokenType::user_defined || token.type == TokenType::unknown;
    const bool plain = token.text == "<unk>" || token.text == "<s>" || token.text == "<|endoftext|>";
    token.rstrip = (special || token.text == "</s>") && !plain;
  }
}

}  // namespace

Vocab Vocab::load(const gguf::File& file) {
  Vocab vocab;
  load_kind(file, vocab);
  vocab.tokens = load_tokens(file);
  if (vocab.kind == VocabKind::bpe) vocab.merges = load_merges(file);
  load_special_ids(file, vocab);
  vocab.add_space_prefix = file.get<bool>("tokenizer.ggml.add_space_prefix").value_or(vocab.kind == VocabKind::spm);
  vocab.remove_extra_whitespaces = file.get<bool>("tokenizer.ggml.remove_extra_whitespaces").value_or(false);
  vocab.model_name = file.get<std::string>("general.name").value_or("");
  vocab.chat_template = file.get<std::string>("tokenizer.chat_template").value_or("");
  return vocab;
}

void Vocab::finish() {
  if (tokens.empty()) fail("the vocabulary has no tokens");
  for (int32_t id = 0; id < size(); ++id) check_token(*this, id);
  for (size_t i = 0; i < merges.size(); ++i) {
    if (merges[i].first.empty() || merges[i].second.empty()) fail("tokenizer.ggml.merges[{}] has an empty part", i);
  }
  const auto check_id = [&](const char* what, std::optional<int32_t> id, bool needed) {
    if (id && (*id < 0 || *id >= size()))
      fail("the {} token is {}, but the vocabulary has {} tokens", what, *id, size());
    if (needed && !id) fail("tokenizer.ggml.add_{0}_token is set, but there is no tokenizer.ggml.{0}_token_id", what);
  };
  check_id("bos", bos, add_bos);
  check_id("eos", eos, add_eos);
  check_id("unknown", unk, false);
  for (const int32_t id : end_of_generation) check_id("end-of-generation", id, false);
  find_end_of_generation(*this);
  set_strips(*this);
}

}  // namespace hearth::text
