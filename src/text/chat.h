#pragma once
// Chat formats of a few known families. `tokenizer.chat_template` is a Jinja program; like llama.cpp, hearth recognises
// the family by its markers instead of running it.
#include <span>
#include <string>
#include <string_view>

namespace hearth::text {

struct ChatMessage {
  std::string role;  // "system", "user" or "assistant"
  std::string content;
};

enum class ChatFamily { chatml, llama2, llama3, mistral };
const char* to_string(ChatFamily family);

// `chat_template`: a model's template, or a family's name. Throws Error, with the families it knows, on any other.
ChatFamily detect_chat_family(std::string_view chat_template);

// The prompt text, without BOS (encode() adds it). Ends where the assistant's answer begins if add_generation_prompt.
// Encode it with parse_special. Throws Error on an unknown role.
std::string apply_chat_template(ChatFamily family, std::span<const ChatMessage> messages,
                                bool add_generation_prompt = true);

}  // namespace hearth::text
