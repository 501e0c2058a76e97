#include "offline/convert/hf_tokenizer.h"

#include <algorithm>
#include <unordered_map>

#include "core/error.h"
#include "core/file.h"
#include "offline/convert/sentencepiece.h"

namespace hearth::convert {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581, SentencePiece's space
constexpr std::string_view kBytesSpace = "\xC4\xA0";     // U+0120, the space of byte-level BPE's alphabet
constexpr size_t kFileLimit = size_t{256} << 20;

using text::TokenType;

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

std::string member_text(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

const Json& require_member(const Json& object, const char* key, Json::value_t type, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->type() != type) fail("{}: {} is missing or of the wrong type", where, key);
  return *it;
}

// llama.cpp's treatment of tokens that look special but are not marked so (get_vocab_base, does_token_look_special).
bool looks_special(std::string_view t) {
  return t == "<pad>" || t == "<mask>" || (t.starts_with("<|") && t.ends_with("|>")) ||
         (t.starts_with("<\xEF\xBD\x9C") && t.ends_with("\xEF\xBD\x9C>"));
}

struct AddedToken {
  std::string text;
  bool special = false;
};

void set_size(HfVocabulary& v, int64_t n_vocab) {
  const auto n = static_cast<size_t>(n_vocab);
  v.tokens.resize(n);
  v.types.assign(n, TokenType::unused);
  for (size_t i = 0; i < n; ++i) v.tokens[i] = fmt::format("[PAD{}]", i);
}

int64_t token_id(const Json& value, int64_t n_vocab, const std::string& token, const std::string& where) {
  if (!value.is_number_integer())
    fail("{}: token {} has the id {}, expected an integer", where, shown(Json(token)), shown(value));
  const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  const int64_t id = huge ? INT64_MAX : value.get<int64_t>();
  if (id < 0 || id >= n_vocab) {
    fail("{}: token {} has the id {}, but config.json's vocab_size is {}", where, shown(Json(token)), shown(value),
         n_vocab);
  }
  return id;
}

void place(HfVocabulary& v, int64_t id, std::string text, TokenType type) {
  v.tokens[static_cast<size_t>(id)] = std::move(text);
  v.types[static_cast<size_t>(id)] = type;
}

std::unordered_map<std::string_view, int64_t> index_tokens(const HfVocabulary& v) {
  std::unordered_map<std::string_view, int64_t> index;
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    if (v.types[i] != TokenType::unused) index.emplace(v.tokens[i], static_cast<int64_t>(i));
  }
  return index;
}

void place_base_vocabulary(HfVocabulary& v, const Json& table, const std::string& where) {
  const auto n_vocab = static_cast<int64_t>(v.tokens.size());
  for (const auto& [token, value] : table.items()) {
    const int64_t id = token_id(value, n_vocab, token, where);
    if (v.types[static_cast<size_t>(id)] != TokenType::unused) {
      fail("{}: tokens {} and {} share the id {}", where, shown(Json(v.tokens[static_cast<size_t>(id)])),
           shown(Json(token)), id);
    }
    place(v, id, token, TokenType::normal);
  }
}

// An added token replaces what the base vocabulary has under its id (they agree in every sound tokenizer).
void place_added(HfVocabulary& v, int64_t id, const AddedToken& added) {
  TokenType& type = v.types[static_cast<size_t>(id)];
  const bool same = v.tokens[static_cast<size_t>(id)] == added.text;
  if (same && (type == TokenType::unknown || type == TokenType::byte || type == TokenType::control)) return;
  std::string text = added.text;
  const bool control = added.special || looks_special(text);
  if (!control) replace_all(text, kSpaceMark, " ");  // user-defined tokens are matched in the text as it is
  place(v, id, std::move(text), control ? TokenType::control : TokenType::user_defined);
  if (!v.scores.empty()) v.scores[static_cast<size_t>(id)] = -1000.0f;  // llama.cpp's value: never made by merging
}

// The entries of tokenizer.json's `added_tokens`.
void place_added_tokens(HfVocabulary& v, const Json& tokenizer, const std::string& where) {
  const auto list = tokenizer.find("added_tokens");
  if (list == tokenizer.end() || list->is_null()) return;
  if (!list->is_array()) fail("{}: added_tokens is no list", where);
  for (const Json& item : *list) {
    if (!item.is_object() || !item.contains("id"))
      fail("{}: added_tokens holds {}, expected an object with an id", where, shown(item));
    const Fields f(item, where + ": added_tokens");
    const auto text = f.text("content");
    if (!text) fail("{}: added_tokens holds a token without content", where);
    place_added(v, token_id(item["id"], static_cast<int64_t>(v.tokens.size()), *text, where),
                {*text, f.flag("special", false)});
  }
}

// "left right" strings, or pairs (newer files: a part may then contain spaces).
std::pair<std::string, std::string> merge_parts(const Json& merge, size_t rank, const std::string& where) {
  std::pair<std::string, std::string> parts;
  if (merge.is_string()) {
    const auto& text = merge.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
      parts = {text.substr(0, space), text.substr(space + 1)};
    }
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    parts = {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  if (parts.first.empty() || parts.second.empty()) {
    fail("{}: merge {} is {}, expected two tokens", where, rank, shown(merge));
  }
  return parts;
}

std::vector<std::pair<std::string, std::string>> read_merges(const HfVocabulary& v, const Json& list,
                                                             const std::string& where) {
  const auto index = index_tokens(v);
  std::vector<std::pair<std::string, std::string>> merges;
  merges.reserve(list.size());
  for (const Json& item : list) {
    auto parts = merge_parts(item, merges.size(), where);
    for (const std::string& token : {parts.first, parts.second, parts.first + parts.second}) {
      if (!index.contains(token)) {
        fail("{}: merge {} needs the token {}, which the vocabulary lacks", where, merges.size(), shown(Json(token)));
      }
    }
    merges.push_back(std::move(parts));
  }
  return merges;
}

void set_bpe_merges(HfVocabulary& v, std::vector<std::pair<std::string, std::string>> merges) {
  for (auto& [left, right] : merges) {
    // GGUF joins the parts with a space; a space within one is written as byte-level BPE's own sign for it.
    replace_all(left, " ", kBytesSpace);
    replace_all(right, " ", kBytesSpace);
    v.merges.push_back(left + " " + right);
  }
}

// The tokens of a template that stand before and after the text. Only these make add_bos and add_eos.
void read_post_processor(HfVocabulary& v, const Json& processor) {
  const std::string type = processor.is_object() ? member_text(processor, "type") : "";
  if (type == "Sequence") {
    if (const auto list = processor.find("processors"); list != processor.end() && list->is_array()) {
      for (const Json& inner : *list) read_post_processor(v, inner);  // nesting is bounded by the JSON reader
    }
  }
  if (type != "TemplateProcessing") return;
  const auto single = processor.find("single");
  if (single == processor.end() || !single->is_array() || single->empty()) return;
  const auto is_special = [](const Json& item) { return item.is_object() && item.contains("SpecialToken"); };
  v.add_bos = is_special(single->front());
  v.add_eos = single->size() > 1 && is_special(single->back());
}

bool only_nfc(const Json& normalizer) {
  if (normalizer.is_null()) return true;
  if (!normalizer.is_object()) return false;
  const std::string type = member_text(normalizer, "type");
  if (type == "NFC") return true;
  const auto list = normalizer.find("normalizers");
  return type == "Sequence" && list != normalizer.end() && list->is_array() &&
         std::all_of(list->begin(), list->end(), only_nfc);
}

void finish_byte_level(HfVocabulary& v, const Json& tokenizer, const Json& model, const std::optional<std::string>& pre,
                       const std::string& where) {
  if (const auto n = tokenizer.find("normalizer"); n != tokenizer.end() && !only_nfc(*n)) {
    fail("{}: the normalizer {} is not supported; none and NFC are", where, shown(*n));
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!member_text(model, key).empty()) fail("{}: a BPE with {} is not supported", where, key);
  }
  v.model = "gpt2";
  v.pre = pre ? *pre : detect_pretokenizer(tokenizer, where);
}

// SentencePiece scores from the ranks of merges: both algorithms then join the same pair first.
void finish_sentencepiece_like(HfVocabulary& v, const Json& tokenizer, const Json& model,
                               const std::vector<std::pair<std::string, std::string>>& merges) {
  v.model = "llama";
  v.scores.assign(v.tokens.size(), 0.0f);
  const auto index = index_tokens(v);
  std::vector<bool> scored(v.tokens.size(), false);
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto id = static_cast<size_t>(index.at(merges[rank].first + merges[rank].second));
    if (!scored[id]) v.scores[id] = -static_cast<float>(rank + 1);
    scored[id] = true;
  }
  const std::string unk = member_text(model, "unk_token");
  for (size_t i = 0; i < v.tokens.size(); ++i) {
    const std::string& t = v.tokens[i];
    if (v.types[i] == TokenType::normal && t.size() == 6 && t.starts_with("<0x") && t.ends_with(">"))
      v.types[i] = TokenType::byte;
    if (!unk.empty() && t == unk && v.types[i] != TokenType::unused) v.types[i] = TokenType::unknown;
  }
  // A leading space comes from a Prepend normalizer, or from a Metaspace pre-tokenizer unless it says never.
  const auto contains = [&](const char* key, const char* text) {
    const auto it = tokenizer.find(key);
    return it != tokenizer.end() &&
           it->dump(-1, ' ', false, Json::error_handler_t::replace).find(text) != std::string::npos;
  };
  const bool metaspace = contains("pre_tokenizer", "\"Metaspace\"") &&
                         !contains("pre_tokenizer", "\"prepend_scheme\":\"never\"") &&
                         !contains("pre_tokenizer", "\"add_prefix_space\":false");
  v.add_space_prefix = metaspace || contains("normalizer", "\"Prepend\"");
}

// --- the directory's smaller files ---

struct SideFiles {
  Json tokenizer_config = Json::object(), special_tokens = Json::object(), tokenizer = Json::object();
};

Json read_if_there(const std::filesystem::path& path) {
  return std::filesystem::exists(path) ? read_json_object(path, kFileLimit) : Json::object();
}

// tokenizer_config.json's added_tokens_decoder and added_tokens.json: what tokenizer.model does not know of.
void place_side_tokens(HfVocabulary& v, const std::filesystem::path& directory, const SideFiles& side,
                       const Notice& notice) {
  std::vector<std::pair<int64_t, AddedToken>> added;
  const auto add = [&](const Json& id, const AddedToken& token, const std::string& where) {
    const int64_t n = token_id(id, INT32_MAX, token.text, where);
    if (n >= static_cast<int64_t>(v.tokens.size())) {
      notice(fmt::format("{}: token {} has the id {}, beyond vocab_size {}: left out", where, shown(Json(token.text)),
                         n, v.tokens.size()));
    } else {
      added.emplace_back(n, token);
    }
  };
  if (const auto path = directory / "added_tokens.json"; std::filesystem::exists(path)) {
    const Json json = read_json_object(path, kFileLimit);
    for (const auto& [text, id] : json.items()) add(id, {text, false}, fmt::format("'{}'", path.string()));
  }
  const std::string where = fmt::format("'{}'", (directory / "tokenizer_config.json").string());
  if (const auto it = side.tokenizer_config.find("added_tokens_decoder");
      it != side.tokenizer_config.end() && it->is_object()) {
    for (const auto& [id, entry] : it->items()) {
      if (id.empty() || id.size() > 9 || id.find_first_not_of("0123456789") != std::string::npos ||
          !entry.is_object()) {
        fail("{}: added_tokens_decoder holds {}: {}, expected an id and an object", where, shown(Json(id)),
             shown(entry));
      }
      const Fields f(entry, where + ": added_tokens_decoder");
      add(Json(std::stoll(id)), {f.text("content").value_or(""), f.flag("special", false)}, where);
    }
  }
  for (const auto& [id, token] : added) place_added(v, id, token);
}

// "bos_token": a string, or an object with content.
std::string named_token(const Json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end()) return {};
  if (it->is_string()) return it->get<std::string>();
  return it->is_object() ? member_text(*it, "content") : std::string();
}

// Special tokens: by name from tokenizer_config.json or special_tokens_map.json, else by id from config.json.
void resolve_special_tokens(HfVocabulary& v, const HfConfig& config, const SideFiles& side, const std::string& where) {
  const auto index = index_tokens(v);
  const auto resolve = [&](const char* key, std::optional<int64_t>& id, std::optional<int64_t> from_config) {
    const auto valid = [&](std::optional<int64_t> n) {
      return n && *n >= 0 && *n < static_cast<int64_t>(v.tokens.size());
    };
    const std::optional<int64_t> from_model = id;
    id.reset();
    for (const Json* object : {&side.tokenizer_config, &side.special_tokens}) {
      const std::string name = named_token(*object, key);
      if (const auto it = index.find(name); !id && !name.empty() && it != index.end()) id = it->second;
    }
    if (!id && from_config && !valid(from_config)) {
      fail("{}: config.json's {}_id {} is not below the {} tokens", where, key, *from_config, v.tokens.size());
    }
    if (!id) id = from_config;
    if (!id && valid(from_model)) id = from_model;
  };
  resolve("bos_token", v.bos, config.bos);
  resolve("eos_token", v.eos, config.eos);
  resolve("unk_token", v.unk, {});
  resolve("pad_token", v.pad, config.pad);
  for (const int64_t id : config.other_eos) {
    if (id < static_cast<int64_t>(v.tokens.size()) && id != v.eos) v.eot = v.eot.value_or(id);
  }
  // Hugging Face never splits a named special token, and never prints one.
  for (const auto& id : {v.bos, v.eos, v.pad}) {
    if (id && v.types[static_cast<size_t>(*id)] == TokenType::normal)
      v.types[static_cast<size_t>(*id)] = TokenType::control;
  }
}

void read_flags_and_template(HfVocabulary& v, const std::filesystem::path& directory, const SideFiles& side) {
  const Fields f(side.tokenizer_config, fmt::format("'{}'", (directory / "tokenizer_config.json").string()));
  if (const auto flag = f.boolean("add_bos_token")) v.add_bos = flag;
  if (const auto flag = f.boolean("add_eos_token")) v.add_eos = flag;
  if (const auto flag = f.boolean("add_prefix_space"); flag && v.model == "llama") v.add_space_prefix = flag;
  // Without a template or a flag, Hugging Face's byte-level tokenizers add nothing.
  if (v.model == "gpt2" && !v.add_bos) v.add_bos = false;
  const Json* chat = f.find("chat_template");
  if (chat != nullptr && chat->is_string()) v.chat_template = chat->get<std::string>();
  if (chat != nullptr && chat->is_array()) {
    for (const Json& item : *chat) {
      if (!item.is_object()) continue;
      const std::string name = member_text(item, "name");
      if (name == "default") v.chat_template = member_text(item, "template");
      if (name != "default" && !name.empty()) v.named_templates.emplace_back(name, member_text(item, "template"));
    }
  }
  if (const auto jinja = directory / "chat_template.jinja"; v.chat_template.empty() && std::filesystem::exists(jinja)) {
    v.chat_template = read_text_file(jinja, kFileLimit);
  }
}

// vocab.json and merges.txt: GPT-2's own files, which OPT's repositories have instead of tokenizer.json.
HfVocabulary read_vocab_and_merges(const std::filesystem::path& directory, const HfConfig& config,
                                   const SideFiles& side, const std::optional<std::string>& pre) {
  const std::string where = fmt::format("'{}'", (directory / "vocab.json").string());
  HfVocabulary v;
  v.model = "gpt2";
  const std::string type = member_text(side.tokenizer_config, "tokenizer_class");
  if (pre) {
    v.pre = *pre;
  } else if (type == "GPT2Tokenizer" || type == "GPT2TokenizerFast" || (type.empty() && config.family == Family::opt)) {
    v.pre = "gpt-2";
  } else if (type == "Qwen2Tokenizer" || type == "Qwen2TokenizerFast") {
    v.pre = "qwen2";
  } else {
    fail(
        "{}: vocab.json without tokenizer.json is supported for GPT2Tokenizer and Qwen2Tokenizer, found "
        "tokenizer_class '{}'",
        where, type);
  }
  set_size(v, config.n_vocab);
  place_base_vocabulary(v, read_json_object(directory / "vocab.json", kFileLimit), where);
  Json merges = Json::array();
  const std::string text = read_text_file(directory / "merges.txt", kFileLimit);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.pop_back();
    if (!line.empty() && !(begin == 0 && line.starts_with("#version"))) merges.push_back(std::move(line));
    begin = end + 1;
  }
  set_bpe_merges(v, read_merges(v, merges, fmt::format("'{}'", (directory / "merges.txt").string())));
  return v;
}

}  // namespace

HfVocabulary parse_tokenizer_json(const Json& tokenizer, int64_t n_vocab, const std::optional<std::string>& pre,
                                  const std::string& where) {
  const Json& model = require_member(tokenizer, "model", Json::value_t::object, where);
  const std::string type = member_text(model, "type");
  if (type != "BPE") fail("{}: a tokenizer of type '{}' is not supported; BPE is", where, type);
  HfVocabulary v;
  set_size(v, n_vocab);
  place_base_vocabulary(v, require_member(model, "vocab", Json::value_t::object, where), where);
  auto merges = read_merges(v, require_member(model, "merges", Json::value_t::array, where), where);
  const auto fallback = model.find("byte_fallback");
  if (fallback != model.end() && fallback->is_boolean() && fallback->get<bool>()) {
    finish_sentencepiece_like(v, tokenizer, model, merges);
  } else {
    finish_byte_level(v, tokenizer, model, pre, where);
    set_bpe_merges(v, std::move(merges));
  }
  place_added_tokens(v, tokenizer, where);
  if (const auto it = tokenizer.find("post_processor"); it != tokenizer.end()) read_post_processor(v, *it);
  return v;
}

HfVocabulary parse_tokenizer_model(std::span<const std::byte> bytes, int64_t n_vocab, const std::string& where,
                                   const Notice& notice) {
  const SentencePieceModel m = parse_sentencepiece(bytes, where);
  if (m.algorithm != SentencePieceModel::Algorithm::bpe) {
    fail("{}: a SentencePiece model of type {} is not supported; BPE (type 2) is", where,
         static_cast<int32_t>(m.algorithm));
  }
  if (!m.escape_whitespaces) fail("{}: a SentencePiece model without escaped whitespace is not supported", where);
  if (m.has_normalization_map && m.normalizer != "identity") {
    notice(fmt::format("{}: texts are tokenized without the normalization '{}'", where, m.normalizer));
  }
  HfVocabulary v;
  v.model = "llama";
  set_size(v, n_vocab);
  v.scores.assign(v.tokens.size(), -10000.0f);  // llama.cpp's value for padding
  if (m.pieces.size() > v.tokens.size()) {
    fail("{}: {} pieces do not fit config.json's vocab_size {}", where, m.pieces.size(), n_vocab);
  }
  for (size_t i = 0; i < m.pieces.size(); ++i) {
    place(v, static_cast<int64_t>(i), m.pieces[i].text, static_cast<TokenType>(m.pieces[i].type));
    v.scores[i] = m.pieces[i].score;
  }
  v.bos = m.bos_id;
  v.eos = m.eos_id;
  v.unk = m.unk_id;
  v.pad = m.pad_id;
  v.add_space_prefix = m.add_dummy_prefix;
  return v;
}

HfVocabulary read_hf_tokenizer(const std::filesystem::path& directory, const HfConfig& config,
                               const std::optional<std::string>& pre, const Notice& notice) {
  const auto model_path = directory / "tokenizer.model", json_path = directory / "tokenizer.json";
  SideFiles side{read_if_there(directory / "tokenizer_config.json"),
                 read_if_there(directory / "special_tokens_map.json"), read_if_there(json_path)};
  HfVocabulary v;
  if (std::filesystem::exists(model_path)) {
    const MappedFile file(model_path);
    v = parse_tokenizer_model(file.bytes(), config.n_vocab, fmt::format("'{}'", model_path.string()), notice);
    place_side_tokens(v, directory, side, notice);
    if (const auto it = side.tokenizer.find("post_processor"); it != side.tokenizer.end()) read_post_processor(v, *it);
  } else if (std::filesystem::exists(json_path)) {
    v = parse_tokenizer_json(side.tokenizer, config.n_vocab, pre, fmt::format("'{}'", json_path.string()));
  } else if (std::filesystem::exists(directory / "vocab.json") && std::filesystem::exists(directory / "merges.txt")) {
    v = read_vocab_and_merges(directory, config, side, pre);
    place_side_tokens(v, directory, side, notice);
  } else {
    fail("'{}' has no tokenizer: expected tokenizer.json, tokenizer.model, or vocab.json and merges.txt",
         directory.string());
  }
  resolve_special_tokens(v, config, side, fmt::format("'{}'", directory.string()));
  read_flags_and_template(v, directory, side);
  return v;
}

void write_vocabulary(const HfVocabulary& v, gguf::Writer& writer) {
  std::vector<int32_t> types;
  types.reserve(v.types.size());
  for (const TokenType t : v.types) types.push_back(static_cast<int32_t>(t));
  writer.set("tokenizer.ggml.model", v.model);
  writer.set("tokenizer.ggml.pre", v.pre);
  writer.set("tokenizer.ggml.tokens", gguf::Array(v.tokens));
  if (!v.scores.empty()) writer.set("tokenizer.ggml.scores", gguf::Array(v.scores));
  writer.set("tokenizer.ggml.token_type", gguf::Array(std::move(types)));
  if (v.model == "gpt2") writer.set("tokenizer.ggml.merges", gguf::Array(v.merges));
  const auto id = [&](const char* key, const std::optional<int64_t>& value) {
    if (value) writer.set(key, static_cast<uint32_t>(*value));
  };
  id("tokenizer.ggml.bos_token_id", v.bos);
  id("tokenizer.ggml.eos_token_id", v.eos);
  id("tokenizer.ggml.unknown_token_id", v.unk);
  id("tokenizer.ggml.padding_token_id", v.pad);
  id("tokenizer.ggml.eot_token_id", v.eot);
  const auto flag = [&](const char* key, const std::optional<bool>& value) {
    if (value) writer.set(key, *value);
  };
  flag("tokenizer.ggml.add_bos_token", v.add_bos);
  flag("tokenizer.ggml.add_eos_token", v.add_eos);
  flag("tokenizer.ggml.add_space_prefix", v.add_space_prefix);
  if (!v.chat_template.empty()) writer.set("tokenizer.chat_template", v.chat_template);
  for (const auto& [name, text] : v.named_templates) writer.set("tokenizer.chat_template." + name, text);
}

}  // namespace hearth::convert
