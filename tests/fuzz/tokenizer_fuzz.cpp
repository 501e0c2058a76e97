// Any bytes as a GGUF file with a vocabulary: what is accepted encodes, decodes and streams a text taken from the
// input.
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "fuzz/target.h"
#include "gguf/gguf.h"
#include "text/chat.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

using namespace hearth;

void use(const text::Tokenizer& tokenizer, std::string_view input) {
  for (const bool parse_special : {false, true}) {
    const std::vector<int32_t> ids = tokenizer.encode(input, {.add_special = true, .parse_special = parse_special});
    text::StreamDecoder decoder(tokenizer, parse_special);
    std::string streamed;
    for (const int32_t id : ids) streamed += decoder.push(id);
    streamed += decoder.flush();
    HEARTH_CHECK(text::utf8::valid_prefix(streamed) == streamed.size());
    (void)tokenizer.decode(ids, parse_special);
  }
  for (int32_t id = 0; id < tokenizer.n_vocab(); ++id) (void)tokenizer.piece(id, true);
}

}  // namespace

HEARTH_FUZZ_TARGET(tokenizer) {
  const std::string_view input(reinterpret_cast<const char*>(data.data()), data.size());
  std::vector<std::byte> aligned(data.begin(), data.end());
  const auto file = gguf::File::from_bytes(aligned, "fuzz.gguf");
  const auto tokenizer = text::Tokenizer::load(file);
  use(*tokenizer, input.substr(input.size() / 2));
  auto messages = nlohmann::ordered_json::array();
  messages.push_back(
      {{"role", "user"}, {"content", std::string(input.substr(0, text::utf8::valid_prefix(input.substr(0, 100))))}});
  (void)text::ChatTemplate::of(*tokenizer, "").apply(messages);
  // Alone, it never becomes a control token.
  const std::vector<int32_t> ids =
      text::ChatTemplate("{{ messages[0].content }}", "", "").encode(*tokenizer, messages);
  for (size_t i = tokenizer->add_bos() ? 1 : 0; i < ids.size(); ++i) {
    HEARTH_CHECK(tokenizer->vocab().tokens[static_cast<size_t>(ids[i])].type != text::TokenType::control);
  }
}
