#pragma once
// Conversations as a model wants to see them: its own chat template (`tokenizer.chat_template`, a Jinja2 program) run with the
// variables and settings of Hugging Face's transformers.
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace hearth::text {

class ChatTemplate {
 public:
  struct Options {
    bool add_generation_prompt = true;                                // ends where the assistant's answer begins
    nlohmann::ordered_json extra = nlohmann::ordered_json::object();  // more variables: tools, enable_thinking, …
    std::optional<int64_t> now;  // strftime_now()'s, in seconds since 1970; absent: the clock's
  };

  // `source`: Jinja2, or a format's name (names()). Throws Error, with line and column, when it is no sound template.
  ChatTemplate(std::string_view source, std::string bos, std::string eos);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // `wanted`, or the model's own template when that is empty. Throws Error when there is neither.
  static ChatTemplate of(const Tokenizer& tokenizer, std::string_view wanted);
  static std::string names();  // "chatml, llama2, llama3, mistral"

  const std::string& source() const { return source_; }
  // `messages`: objects with "role" and "content", as OpenAI's API has them. Throws Error when the template refuses them.
  std::string apply(const nlohmann::ordered_json& messages, const Options& options) const;
  std::string apply(const nlohmann::ordered_json& messages) const { return apply(messages, Options()); }
  // The same as token ids. The template's control tokens are those tokens; what messages and variables contain never becomes one
  // (text/guard.h). The first BOS, which templates write or leave out, is there once where the vocabulary asks for it.
  std::vector<int32_t> encode(const Tokenizer& tokenizer, const nlohmann::ordered_json& messages,
                              const Options& options) const;
  std::vector<int32_t> encode(const Tokenizer& tokenizer, const nlohmann::ordered_json& messages) const {
    return encode(tokenizer, messages, Options());
  }

 private:
  struct Tree;
  std::string render(const nlohmann::ordered_json& messages, const Options& options,
                     const std::function<std::string(const std::string&)>& map) const;

  std::string source_, bos_, eos_;
  std::unique_ptr<Tree> tree_;
};

}  // namespace hearth::text
