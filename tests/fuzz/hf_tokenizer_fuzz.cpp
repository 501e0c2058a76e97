// Any bytes as a tokenizer: what starts with a brace as tokenizer.json, the rest as tokenizer.model.
#include <string_view>
#include <vector>

#include "fuzz/target.h"
#include "offline/convert/hf_tokenizer.h"
#include "offline/convert/json.h"

HEARTH_FUZZ_TARGET(hf_tokenizer) {
  using namespace hearth::convert;
  constexpr int64_t n_vocab = 512;                              // of the model the tokenizer would belong to
  const std::vector<std::byte> copy(data.begin(), data.end());  // its end is guarded by ASan
  if (!copy.empty() && copy[0] == std::byte{'{'}) {
    const Json json = parse_json_object({reinterpret_cast<const char*>(copy.data()), copy.size()}, "fuzz");
    parse_tokenizer_json(json, n_vocab, {}, "fuzz");
  } else {
    parse_tokenizer_model(copy, n_vocab, "fuzz", [](std::string_view) {});
  }
}
