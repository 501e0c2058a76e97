// Chat formats compared with the models' own templates rendered by jinja2 (tests/data/vocab/make_vectors.py).
#include "text/chat.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "support/paths.h"

namespace hearth::text {
namespace {

TEST(Chat, EqualToTheTemplates) {
  const auto vectors = nlohmann::json::parse(read_text_file(test::data_dir() / "vocab" / "chat_vectors.json"));
  ASSERT_GE(vectors["cases"].size(), 20u);
  for (const auto& c : vectors["cases"]) {
    const auto name = c["family"].get<std::string>();
    const ChatFamily family = detect_chat_family(vectors["templates"][name].get<std::string>());
    EXPECT_EQ(to_string(family), name);
    std::vector<ChatMessage> messages;
    for (const auto& m : c["messages"]) messages.push_back({m["role"], m["content"]});
    EXPECT_EQ(apply_chat_template(family, messages, c["add_generation_prompt"]), c["text"].get<std::string>()) << name;
  }
}

TEST(Chat, FamiliesByName) {
  EXPECT_EQ(detect_chat_family("chatml"), ChatFamily::chatml);
  EXPECT_EQ(detect_chat_family("mistral"), ChatFamily::mistral);
}

TEST(Chat, UnknownTemplatesAndRolesAreRefused) {
  EXPECT_THROW(detect_chat_family(""), Error);
  EXPECT_THROW(detect_chat_family("{{ '### Instruction:' }}"), Error);
  EXPECT_THROW(detect_chat_family("[AVAILABLE_TOOLS] [INST]"), Error) << "a later Mistral, which spaces differently";
  const std::vector<ChatMessage> bad = {{"robot", "hi"}};
  EXPECT_THROW(apply_chat_template(ChatFamily::chatml, bad), Error);
  EXPECT_THROW(apply_chat_template(ChatFamily::chatml, {}), Error);
}

TEST(Chat, MistralPutsTheSystemMessageBeforeTheFirstUserMessage) {
  const std::vector<ChatMessage> messages = {{"system", "Be brief."}, {"user", "Hi"}};
  EXPECT_EQ(apply_chat_template(ChatFamily::mistral, messages), "[INST] Be brief.\n\nHi [/INST]");
}

}  // namespace
}  // namespace hearth::text
