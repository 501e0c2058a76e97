#include "text/chat.h"

#include <array>

#include "core/error.h"

namespace hearth::text {
namespace {

constexpr std::array kFamilies = {ChatFamily::chatml, ChatFamily::llama2, ChatFamily::llama3, ChatFamily::mistral};

std::string_view trim(std::string_view text) {
  constexpr std::string_view spaces = " \t\r\n\f\v";
  const size_t first = text.find_first_not_of(spaces);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(spaces) + 1 - first);
}

void check_role(const ChatMessage& message) {
  if (message.role != "system" && message.role != "user" && message.role != "assistant") {
    fail("unknown role '{}' in a chat; 'system', 'user' or 'assistant' was expected", message.role);
  }
}

std::string apply_chatml(std::span<const ChatMessage> messages, bool add_generation_prompt) {
  std::string text;
  for (const ChatMessage& m : messages) text += fmt::format("<|im_start|>{}\n{}<|im_end|>\n", m.role, m.content);
  if (add_generation_prompt) text += "<|im_start|>assistant\n";
  return text;
}

std::string apply_llama3(std::span<const ChatMessage> messages, bool add_generation_prompt) {
  std::string text;
  for (const ChatMessage& m : messages) {
    text += fmt::format("<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>", m.role, trim(m.content));
  }
  if (add_generation_prompt) text += "<|start_header_id|>assistant<|end_header_id|>\n\n";
  return text;
}

// The system message goes inside the first instruction. The first turn's <s> is left to encode().
std::string apply_llama2(std::span<const ChatMessage> messages) {
  std::string text, system;
  bool first = true;
  for (const ChatMessage& m : messages) {
    if (m.role == "system") {
      system = fmt::format("<<SYS>>\n{}\n<</SYS>>\n\n", trim(m.content));
    } else if (m.role == "user") {
      text += fmt::format("{}[INST] {}{} [/INST]", first ? "" : "<s>", system, trim(m.content));
      system.clear();
      first = false;
    } else {
      text += fmt::format(" {} </s>", trim(m.content));
    }
  }
  return text;
}

// Mistral 7B Instruct v0.1 and v0.2: llama2's brackets without its system block and without repeated <s>.
std::string apply_mistral(std::span<const ChatMessage> messages) {
  std::string text, system;
  for (const ChatMessage& m : messages) {
    if (m.role == "system") {
      system = fmt::format("{}\n\n", trim(m.content));
    } else if (m.role == "user") {
      text += fmt::format("[INST] {}{} [/INST]", system, trim(m.content));
      system.clear();
    } else {
      text += fmt::format(" {}</s>", trim(m.content));
    }
  }
  return text;
}

}  // namespace

const char* to_string(ChatFamily family) {
  switch (family) {
    case ChatFamily::chatml:
      return "chatml";
    case ChatFamily::llama2:
      return "llama2";
    case ChatFamily::llama3:
      return "llama3";
    case ChatFamily::mistral:
      return "mistral";
  }
  HEARTH_CHECK(false);
}

ChatFamily detect_chat_family(std::string_view chat_template) {
  for (const ChatFamily family : kFamilies) {
    if (chat_template == to_string(family)) return family;
  }
  const auto has = [&](std::string_view marker) { return chat_template.find(marker) != std::string_view::npos; };
  if (has("<|im_start|>")) return ChatFamily::chatml;
  if (has("<|start_header_id|>") && has("<|end_header_id|>")) return ChatFamily::llama3;
  // v3 and v7 of Mistral space their brackets differently; their templates name tools or system blocks.
  const bool later_mistral = has("[SYSTEM_PROMPT]") || has("[TOOL_CALLS]") || has("[AVAILABLE_TOOLS]");
  if (has("[INST]") && !later_mistral) return has("<<SYS>>") ? ChatFamily::llama2 : ChatFamily::mistral;
  if (chat_template.empty()) fail("the model has no chat template; name one of chatml, llama2, llama3, mistral");
  fail(
      "the model's chat template is of a family hearth does not know; name one of chatml, llama2, llama3, mistral if "
      "it is "
      "close enough, or give the prompt in the model's own format");
}

std::string apply_chat_template(ChatFamily family, std::span<const ChatMessage> messages, bool add_generation_prompt) {
  if (messages.empty()) fail("a chat needs at least one message");
  for (const ChatMessage& message : messages) check_role(message);
  switch (family) {
    case ChatFamily::chatml:
      return apply_chatml(messages, add_generation_prompt);
    case ChatFamily::llama3:
      return apply_llama3(messages, add_generation_prompt);
    case ChatFamily::llama2:
      return apply_llama2(messages);  // [/INST] is the beginning of the answer
    case ChatFamily::mistral:
      return apply_mistral(messages);
  }
  HEARTH_CHECK(false);
}

}  // namespace hearth::text
