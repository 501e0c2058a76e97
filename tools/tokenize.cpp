// `hearth tokenize` and `hearth detokenize`.
#include <charconv>
#include <sstream>

#include "core/error.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"
#include "tools/commands.h"
#include "tools/hub_models.h"
#include "tools/output.h"
#include "tools/prompt.h"

namespace hearth::tools {
namespace {

struct TokenizeOptions {
  std::string model;
  PromptOptions prompt;
  bool no_special = false, no_parse_special = false, ids_only = false, json = false;
};

void add_model(CLI::App& sub, std::string& model) {
  CLI::Option* file = sub.add_option("-m,--model", model, "Model file, GGUF; its vocabulary alone is read")
                          ->required()
                          ->type_name("FILE");
  add_hf_repo_option(sub, *file)->excludes(file);
}

std::string whole_characters(const std::string& bytes) {
  text::Utf8Stream utf8;
  std::string text = utf8.push(bytes);
  return text += utf8.flush();
}

void tokenize(const TokenizeOptions& o) {
  const auto tokenizer = text::Tokenizer::load(gguf::File::open(o.model));
  const std::vector<int32_t> ids =
      tokenizer->encode(read_prompt(o.prompt), {.add_special = !o.no_special, .parse_special = !o.no_parse_special});
  if (o.json) {
    nlohmann::json all = nlohmann::json::array();
    for (const int32_t id : ids) all.push_back({{"id", id}, {"piece", whole_characters(tokenizer->piece(id, true))}});
    write_json(all);
    return flush_out();
  }
  std::string out;
  for (const int32_t id : ids) {
    if (o.ids_only) {
      out += fmt::format("{}{}", out.empty() ? "" : " ", id);
    } else {
      out += fmt::format("{:>7}  {}\n", id, nlohmann::json(whole_characters(tokenizer->piece(id, true))).dump());
    }
  }
  write_out(o.ids_only ? out + "\n" : out);
  flush_out();
}

struct DetokenizeOptions {
  std::string model;
  std::vector<std::string> words;
  bool no_special = false;
};

void detokenize(const DetokenizeOptions& o) {
  const auto tokenizer = text::Tokenizer::load(gguf::File::open(o.model));
  std::vector<std::string> words = o.words;
  if (words.empty()) {
    std::istringstream in(read_prompt({}));
    for (std::string word; in >> word;) words.push_back(word);
  }
  std::vector<int32_t> ids;
  for (const std::string& word : words) {
    int32_t id = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || end != word.data() + word.size())
      fail("'{}' is no token id; whole numbers were expected", word);
    ids.push_back(id);
  }
  write_out(tokenizer->decode(ids, !o.no_special) + "\n");
  flush_out();
}

}  // namespace

void register_tokenize(CLI::App& app) {
  auto o = std::make_shared<TokenizeOptions>();
  CLI::App* sub = app.add_subcommand("tokenize", "Show the tokens of a text");
  add_model(*sub, o->model);
  add_prompt_options(*sub, o->prompt);
  sub->add_flag("--no-special", o->no_special, "Leave out the tokens that the model puts around a text");
  sub->add_flag("--no-parse-special", o->no_parse_special, "Read special tokens that are written out as plain text");
  auto* ids = sub->add_flag("--ids", o->ids_only, "Print the ids alone, on one line");
  sub->add_flag("--json", o->json, "Print JSON: a list of ids and pieces")->excludes(ids);
  sub->footer("Example: hearth tokenize -m models/hearth-demo.gguf -p \"Once upon a time\"");
  sub->callback([o] { tokenize(*o); });
}

void register_detokenize(CLI::App& app) {
  auto o = std::make_shared<DetokenizeOptions>();
  CLI::App* sub = app.add_subcommand("detokenize", "Show the text of token ids");
  add_model(*sub, o->model);
  sub->add_option("IDS", o->words, "Token ids (default: standard input)");
  sub->add_flag("--no-special", o->no_special, "Leave out special tokens");
  sub->footer("Example: hearth detokenize -m models/hearth-demo.gguf 402 1263 262");
  sub->callback([o] { detokenize(*o); });
}

}  // namespace hearth::tools
