// Chat formats by name against the models' own templates as jinja2 renders them (tests/data/vocab/make_vectors.py), and how the
// first BOS comes into the tokens.
#include "text/chat.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "builders.h"
#include "core/error.h"
#include "core/file.h"
#include "support/paths.h"

namespace hearth::text {
namespace {

using nlohmann::ordered_json;

std::string prompt(const std::string& format, const ordered_json& messages, bool add_generation_prompt = true) {
  return ChatTemplate(format, "<s>", "</s>").apply(messages, {.add_generation_prompt = add_generation_prompt});
}

ordered_json one(const char* role, const char* content) {
  return ordered_json::array({ordered_json::object({{"role", role}, {"content", content}})});
}

TEST(Chat, FormatsByNameAreTheTemplates) {
  const auto vectors = ordered_json::parse(read_text_file(test::data_dir() / "vocab" / "chat_vectors.json"));
  ASSERT_GE(vectors["cases"].size(), 20u);
  for (const auto& c : vectors["cases"]) {
    const auto name = c["family"].get<std::string>();
    for (const std::string& source : {name, vectors["templates"][name].get<std::string>()}) {
      std::string text = prompt(source, c["messages"], c["add_generation_prompt"]);
      if (text.starts_with("<s>")) text.erase(0, 3);  // the vectors have it taken off
      EXPECT_EQ(text, c["text"].get<std::string>()) << source;
    }
  }
}

TEST(Chat, MistralPutsTheSystemMessageBeforeTheFirstUserMessage) {
  ordered_json messages = one("system", "Be brief.");
  messages.push_back(one("user", "Hi")[0]);
  EXPECT_EQ(prompt("mistral", messages), "<s>[INST] Be brief.\n\nHi [/INST]");
}

TEST(Chat, WhatIsNoTemplateIsRefused) {
  EXPECT_THROW(prompt("vicuna", one("user", "Hi")), Error);
  EXPECT_THROW(prompt("{% if %}", one("user", "Hi")), Error);
  EXPECT_THROW(prompt("chatml", ordered_json::array()), Error);
  EXPECT_THROW(prompt("chatml", ordered_json("Hi")), Error);
  EXPECT_THROW(prompt("mistral", one("assistant", "Hi")), Error);
}

TEST(Chat, TheModelsOwnTemplateUnlessAnotherIsWanted) {
  Vocab vocab = byte_vocab();
  EXPECT_THROW(ChatTemplate::of(*Tokenizer::create(vocab), ""), Error);
  vocab.chat_template = "{{ messages[0].content }}!";
  const auto tokenizer = Tokenizer::create(vocab);
  const ordered_json messages = one("user", "Hi");
  EXPECT_EQ(ChatTemplate::of(*tokenizer, "").apply(messages), "Hi!");
  EXPECT_EQ(ChatTemplate::of(*tokenizer, "chatml").apply(messages),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(Chat, TheFirstBosIsThereOnce) {
  Vocab vocab = byte_vocab();
  vocab.bos = add_token(vocab, "<s>", TokenType::control);
  const auto plain = Tokenizer::create(vocab);
  vocab.add_bos = true;
  const auto adding = Tokenizer::create(vocab);
  const int32_t bos = *vocab.bos;
  const auto encode = [](const Tokenizer& tokenizer, const char* source) {
    return ChatTemplate(source, "<s>", "").encode(tokenizer, one("user", "Hi"));
  };
  EXPECT_EQ(encode(*adding, "{# #}<s>a"), encode(*adding, "{# #}a"));
  EXPECT_EQ(encode(*adding, "{# #}a"), (std::vector<int32_t>{bos, plain->encode("a")[0]}));
  EXPECT_EQ(encode(*plain, "{# #}<s>a"), encode(*adding, "{# #}a"));
  EXPECT_EQ(encode(*plain, "{# #}a"), plain->encode("a"));
}

}  // namespace
}  // namespace hearth::text
