#pragma once
// Generation of one text: prompt in, tokens out through the sampler, until something ends it.
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/sampler.h"
#include "tools/common.h"
#include "tools/figures.h"

namespace hearth::tools {

enum class Ending { end_of_generation, stop_string, length, context_full, interrupted };
const char* to_string(Ending ending);

struct GenerateOptions {
  int64_t n_predict = -1;  // tokens at most; -1: until something else ends it
  text::SamplerParams sampler;
  std::vector<std::string> stops;
  bool ignore_eos = false;
  std::function<void(const Timings&)> watch = {};  // called after each piece of the prompt and each token; or empty
};

struct Generated {
  std::vector<int32_t> ids;  // what was drawn, without the end-of-generation token
  std::string text;          // up to the stop string
  Ending ending = Ending::length;
  uint64_t seed = 0;
  Timings timings;
};

// Throws Error, with the -c that is needed, when a prompt of this many tokens does not fit behind the text.
void require_room(const engine::Engine& engine, const engine::Sequence& text, size_t n_prompt);

// Evaluates `prompt` (not empty) and generates. `emit` receives the text as it comes, whole UTF-8 characters only;
// `interrupted` is asked between tokens. Throws Error when the prompt does not fit the context.
Generated generate(Session& session, std::span<const int32_t> prompt, const GenerateOptions& options,
                   const std::function<void(std::string_view)>& emit, const std::function<bool()>& interrupted);

}  // namespace hearth::tools
