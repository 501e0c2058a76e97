// The template interpreter against Python's jinja2, over published chat templates and single features
// (tests/data/templates/make_vectors.py); its bounds, and where its errors point.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "core/error.h"
#include "core/file.h"
#include "support/errors.h"
#include "support/paths.h"
#include "text/chat.h"
#include "text/template/interpreter.h"

namespace hearth::text {
namespace {

using nlohmann::ordered_json;

std::string render(const std::string& source, const ordered_json& variables, int64_t now = 0) {
  const jinja::Body body = jinja::parse(source);
  return jinja::Interpreter(body, {}, now).render(jinja::from_json(variables).dict());
}

class Templates : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("TZ", "UTC", 1);
    vectors_ = ordered_json::parse(read_text_file(test::data_dir() / "templates" / "vectors.json"));
  }
  // What hearth makes of it is `expected`; null: it refuses.
  void check(const std::string& name, const std::string& source, const ordered_json& variables,
             const ordered_json& expected) {
    std::string text;
    try {
      text = render(source, variables, vectors_["now"]);
    } catch (const Error& e) {
      EXPECT_TRUE(expected.is_null()) << name << ": " << e.what();
      EXPECT_EQ(std::string(e.what()).rfind("chat template, line ", 0), 0u) << e.what();
      return;
    }
    // jinja2's map() makes a generator, which Python cannot write as JSON; here it is a list, as llama.cpp's template wants.
    if (expected.is_null() && name.starts_with("llama-cpp-deepseek-r1")) return;
    if (expected.is_null()) {
      ADD_FAILURE() << name << ": jinja2 refuses, and this made\n" << text;
    } else {
      EXPECT_EQ(text, expected.get<std::string>()) << name;
    }
  }
  ordered_json vectors_;
};

TEST_F(Templates, EqualToJinja2OverPublishedTemplates) {
  std::set<std::string> templates;
  for (const auto& c : vectors_["cases"]) {
    const auto file = c[0].get<std::string>(), conversation = c[1].get<std::string>();
    templates.insert(file);
    ordered_json variables = vectors_["conversations"][conversation];
    variables["bos_token"] = "<s>", variables["eos_token"] = "</s>";
    for (const char* absent : {"tools", "documents"}) {
      if (!variables.contains(absent)) variables[absent] = nullptr;
    }
    check(file + " " + conversation, read_text_file(test::data_dir() / "templates" / file), variables, c[2]);
  }
  EXPECT_GE(templates.size(), 60u);
  EXPECT_GE(vectors_["cases"].size(), 800u);
}

TEST_F(Templates, EqualToJinja2InEveryFeature) {
  ASSERT_GE(vectors_["features"].size(), 70u);
  const ordered_json& conversation = vectors_["conversations"]["called_twice"];
  ordered_json messages = vectors_["conversations"]["called"]["messages"];
  messages.erase(messages.begin() + 1, messages.end());  // the system message
  for (const auto& m : conversation["messages"]) messages.push_back(m);
  const ordered_json variables = {{"messages", messages},
                                  {"tools", conversation["tools"]},
                                  {"name", "Grüße, Welt"},
                                  {"number", 7},
                                  {"nothing", nullptr}};
  for (const auto& f : vectors_["features"]) check(f[0], f[0], variables, f[1]);
}

TEST(Template, ErrorsPointAtLineAndColumn) {
  const auto error = [](const std::string& source) {
    return test::message_of([&] { render(source, ordered_json::object()); });
  };
  EXPECT_EQ(error("a\n  {{ 1 + }}"), "chat template, line 2, column 10: expected an expression, found '}}'");
  EXPECT_EQ(error("a\nb {% if true %}"), "chat template, line 2, column 16: '{% endif %}' is missing");
  EXPECT_EQ(error("{{ 'a' }}\n{{ x.y }}"), "chat template, line 2, column 5: 'x' is undefined");
  EXPECT_EQ(error("{{ raise_exception('take turns') }}"),
            "chat template, line 1, column 19: the model's chat template refuses: take turns");
  EXPECT_EQ(error("{% unknown %}"),
            "chat template, line 1, column 1: the tag 'unknown' is not one that chat templates have");
}

TEST(Template, IsBounded) {
  const auto refused = [](const std::string& source) {
    return test::message_of([&] { render(source, ordered_json::object()); }) != "no error";
  };
  EXPECT_TRUE(refused("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"));
  EXPECT_TRUE(refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"));
  EXPECT_TRUE(refused("{{ 'x' * 1000000000 * 1000000000 }}"));
  EXPECT_TRUE(
      refused("{% set ns = namespace(s='x') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"));
  EXPECT_TRUE(refused("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"));
  EXPECT_TRUE(refused("{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}"));
  EXPECT_TRUE(refused("{{ " + std::string(100000, '(') + " }}"));
  EXPECT_TRUE(refused("{{ " + std::string(100000, '-') + "1 }}"));
  EXPECT_TRUE(refused(std::string(1, '{') + "{ not " + std::string(5, ' ') + "}}"));
  std::string nested;
  for (int i = 0; i < 10000; ++i) nested += "{% if true %}";
  EXPECT_TRUE(refused(nested));
  // A namespace that holds itself is neither printed for ever nor leaked.
  EXPECT_EQ(render("{% set a = namespace() %}{% set a.a = a %}{{ a.a.a is defined }}", ordered_json::object()), "True");
}

}  // namespace
}  // namespace hearth::text
