// Any bytes as a chat template: what is accepted renders a short conversation within its bounds.
#include "core/error.h"
#include "fuzz/target.h"
#include "text/template/interpreter.h"

using namespace hearth;

HEARTH_FUZZ_TARGET(chat_template) {
  const std::string_view source(reinterpret_cast<const char*>(data.data()), data.size());
  const text::jinja::Body body = text::jinja::parse(source);
  const auto variables = text::jinja::from_json(nlohmann::ordered_json::parse(
      R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}], "number": 7, "name": "Grüße",
          "tools": [{"type": "function", "function": {"name": "f"}}], "add_generation_prompt": true, "bos_token": "<s>"})"));
  const text::jinja::Limits limits{.steps = 200'000, .output = 1 << 20};
  const std::string text = text::jinja::Interpreter(body, limits, 0).render(variables.dict());
  HEARTH_CHECK(text.size() <= 1 << 20);
}
