#include "text/chat.h"

#include <array>
#include <chrono>
#include <utility>

#include "core/error.h"
#include "text/guard.h"
#include "text/template/interpreter.h"

namespace hearth::text {
namespace {

struct Named {
  std::string_view name, source;
};

// From the models' tokenizer_config.json: Qwen1.5, Llama 2 Chat, Llama 3 Instruct, Mistral 7B Instruct v0.2; the last with a
// system message in front of the first user message.
constexpr std::array<Named, 4> kNamed = {{
    {"chatml",
     "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' "
     "}}"
     "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"},
    {"llama2",
     "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = '<<SYS>>\\n' + "
     "messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}{% set turns = messages %}{% set system = '' %}{% endif "
     "%}"
     "{% for message in turns %}{% set content = system + message['content'] if loop.first else message['content'] %}"
     "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
     "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
     "{% else %}{{ raise_exception('a system message is possible at the beginning only') }}{% endif %}{% endfor %}"},
    {"llama3",
     "{% for message in messages %}{{ bos_token if loop.first }}{{ '<|start_header_id|>' + message['role'] + "
     "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
     "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"},
    {"mistral",
     "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] + "
     "'\\n\\n' %}"
     "{% else %}{% set turns = messages %}{% set system = '' %}{% endif %}{{ bos_token }}"
     "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
     "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
     "{% if message['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' "
     "[/INST]' }}"
     "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"},
}};

std::string_view resolve(std::string_view source) {
  for (const Named& n : kNamed) {
    if (n.name == source) return n.source;
  }
  if (source.find('{') == std::string_view::npos) {
    fail("'{}' is no chat template: it is neither Jinja2 nor one of {}", source, ChatTemplate::names());
  }
  return source;
}

int64_t seconds_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string token_text(const Tokenizer& tokenizer, std::optional<int32_t> id) {
  return id ? tokenizer.piece(*id, true) : std::string();
}

}  // namespace

struct ChatTemplate::Tree {
  jinja::Body body;
};

ChatTemplate::ChatTemplate(std::string_view source, std::string bos, std::string eos)
    : source_(resolve(source)), bos_(std::move(bos)), eos_(std::move(eos)) {
  if (source_.find(kGuardMark) != std::string::npos) fail("the chat template has the character U+10FFFD, a mark of hearth's own");
  tree_ = std::make_unique<Tree>(Tree{jinja::parse(source_)});
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

ChatTemplate ChatTemplate::of(const Tokenizer& tokenizer, std::string_view wanted) {
  const std::string_view source = wanted.empty() ? std::string_view(tokenizer.chat_template()) : wanted;
  if (source.empty()) {
    fail("the model has no chat template; name one with --chat-template: {}, or the text of one", names());
  }
  return {source, token_text(tokenizer, tokenizer.bos()), token_text(tokenizer, tokenizer.eos())};
}

std::string ChatTemplate::names() {
  std::string all;
  for (const Named& n : kNamed) all += (all.empty() ? "" : ", ") + std::string(n.name);
  return all;
}

std::string ChatTemplate::render(const nlohmann::ordered_json& messages, const Options& options,
                                 const jinja::TextMap& map) const {
  if (!messages.is_array() || messages.empty()) fail("a chat needs at least one message");
  jinja::Dict variables;
  variables.items = {{"messages", jinja::from_json(messages, map)},
                     {"add_generation_prompt", options.add_generation_prompt},
                     {"bos_token", bos_},
                     {"eos_token", eos_},
                     {"tools", nullptr},
                     {"documents", nullptr}};
  for (const auto& [name, value] : options.extra.items()) variables.set(name, jinja::from_json(value, map));
  return jinja::Interpreter(tree_->body, {}, options.now.value_or(seconds_now())).render(variables);
}

std::string ChatTemplate::apply(const nlohmann::ordered_json& messages, const Options& options) const {
  return render(messages, options, [](const std::string& text) { return text; });
}

std::vector<int32_t> ChatTemplate::encode(const Tokenizer& tokenizer, const nlohmann::ordered_json& messages,
                                          const Options& options) const {
  Unguarded rendered =
      unguarded(render(messages, options, [&](const std::string& text) { return guarded(text, tokenizer); }));
  std::string_view text = rendered.text;
  std::vector<size_t>& plain = rendered.plain;
  const std::string bos = token_text(tokenizer, tokenizer.bos());
  const bool bos_is_written = !bos.empty() && text.starts_with(bos) && (plain.empty() || plain[0] >= bos.size());
  if (tokenizer.add_bos() && bos_is_written) {
    text.remove_prefix(bos.size());
    for (size_t& at : plain) at -= bos.size();
  }
  std::vector<int32_t> ids = tokenizer.encode(text, {.add_special = false, .parse_special = true, .plain = plain});
  if (tokenizer.add_bos()) ids.insert(ids.begin(), *tokenizer.bos());
  return ids;
}

}  // namespace hearth::text
