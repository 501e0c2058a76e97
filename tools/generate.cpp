#include "tools/generate.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "core/error.h"
#include "text/stream_decoder.h"
#include "tools/system.h"

namespace hearth::tools {
namespace {

using Clock = std::chrono::steady_clock;

// Adds the time of a scope to a figure.
class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& seconds_;
  Clock::time_point begin_;
};

class Generation {
 public:
  Generation(Session& session, const GenerateOptions& options)
      : engine_(session.engine()),
        text_(session.text()),
        tokenizer_(session.require_tokenizer("run")),
        options_(options),
        sampler_(params(options, tokenizer_)),
        decoder_(tokenizer_),
        stops_(options.stops) {
    // Rows beyond the vocabulary are padding: they have no text and must not be drawn.
    n_drawable_ = static_cast<size_t>(std::min<int64_t>(tokenizer_.n_vocab(), engine_.config().n_vocab));
    result_.seed = sampler_.seed();
    const text::SamplerParams& p = sampler_.params();
    greedy_on_device_ = p.temp == 0 && p.repeat_penalty == 1.0f;
  }

  Generated run(std::span<const int32_t> prompt, const std::function<void(std::string_view)>& emit,
                const std::function<bool()>& interrupted) {
    std::optional<int32_t> next = evaluate_prompt(prompt, interrupted);
    while (next) {
      if (result_.ending = Ending::interrupted; interrupted()) break;
      if (result_.ending = Ending::end_of_generation; ends(*next)) break;
      result_.ids.push_back(*next);
      put(stops_.push(decoder_.push(*next)), emit);
      if (result_.ending = Ending::stop_string; stops_.stopped()) break;
      if (result_.ending = Ending::length; static_cast<int64_t>(result_.ids.size()) == options_.n_predict) break;
      if (result_.ending = Ending::context_full; text_.n_past() == engine_.n_ctx()) break;
      next = evaluate(*next);
      if (options_.watch) options_.watch(result_.timings);
    }
    put(stops_.push(decoder_.flush()), emit);
    put(stops_.flush(), emit);
    return std::move(result_);
  }

 private:
  static text::SamplerParams params(const GenerateOptions& options, const text::Tokenizer& tokenizer) {
    text::SamplerParams p = options.sampler;
    if (options.ignore_eos) p.suppress = tokenizer.end_of_generation();
    return p;
  }

  bool ends(int32_t id) const { return !options_.ignore_eos && tokenizer_.is_end_of_generation(id); }

  void put(const std::string& text, const std::function<void(std::string_view)>& emit) {
    if (text.empty()) return;
    result_.text += text;
    emit(text);
  }

  bool may_draw(int32_t id) const {
    const std::vector<int32_t>& not_those = sampler_.params().suppress;
    return static_cast<size_t>(id) < n_drawable_ &&
           std::find(not_those.begin(), not_those.end(), id) == not_those.end();
  }

  int32_t draw(std::span<const float> logits) {
    Stopwatch watch(result_.timings.sample);
    ++result_.timings.n_sample;
    return sampler_.sample(logits.first(n_drawable_));
  }

  // Batch by batch, so that Ctrl-C does not wait for a long prompt. The first token, unless none is wanted.
  std::optional<int32_t> evaluate_prompt(std::span<const int32_t> prompt, const std::function<bool()>& interrupted) {
    require_room(engine_, text_, prompt.size());
    std::span<const float> logits;
    const auto n_batch = static_cast<size_t>(kPromptStep);
    for (size_t first = 0; first < prompt.size(); first += n_batch) {
      if (result_.ending = Ending::interrupted; interrupted()) return std::nullopt;
      const auto batch = prompt.subspan(first, std::min(n_batch, prompt.size() - first));
      {
        Stopwatch watch(result_.timings.prompt);
        logits = engine_.eval(text_, batch);
      }
      result_.timings.n_prompt += static_cast<int64_t>(batch.size());
      if (options_.watch) options_.watch(result_.timings);
    }
    for (const int32_t id : prompt) sampler_.accept(id);
    result_.ending = Ending::length;
    if (options_.n_predict == 0) return std::nullopt;
    const int32_t first = draw(logits);
    result_.timings.first_token = process_seconds();
    return first;
  }

  int32_t evaluate(int32_t id) {
    ++result_.timings.n_eval;
    std::span<const float> logits;
    {
      Stopwatch watch(result_.timings.eval);
      if (greedy_on_device_) {
        const int32_t best = engine_.eval_greedy(text_, id);
        if (may_draw(best)) return best;
        logits = engine_.logits(0);  // now and then the second best is wanted
      } else {
        logits = engine_.eval(text_, {&id, 1});
      }
    }
    return draw(logits);
  }

  static constexpr int64_t kPromptStep = 2048;

  engine::Engine& engine_;
  engine::Sequence& text_;
  const text::Tokenizer& tokenizer_;
  const GenerateOptions& options_;
  text::Sampler sampler_;
  text::StreamDecoder decoder_;
  text::StopMatcher stops_;
  size_t n_drawable_ = 0;
  bool greedy_on_device_ = false;
  Generated result_;
};

}  // namespace

const char* to_string(Ending ending) {
  switch (ending) {
    case Ending::end_of_generation:
      return "eos";
    case Ending::stop_string:
      return "stop";
    case Ending::length:
      return "length";
    case Ending::context_full:
      return "context";
    case Ending::interrupted:
      return "interrupted";
  }
  return "?";
}

void require_room(const engine::Engine& engine, const engine::Sequence& text, size_t n_prompt) {
  const int64_t room = engine.n_ctx() - text.n_past();
  if (static_cast<int64_t>(n_prompt) <= room) return;
  fail("the prompt has {} tokens and the context holds {}; use -c {} or more, or a shorter prompt", n_prompt, room,
       n_prompt + 1);
}

Generated generate(Session& session, std::span<const int32_t> prompt, const GenerateOptions& options,
                   const std::function<void(std::string_view)>& emit, const std::function<bool()>& interrupted) {
  HEARTH_CHECK(!prompt.empty());
  const auto begin = Clock::now();
  Generated result = Generation(session, options).run(prompt, emit, interrupted);
  result.timings.load = session.load_seconds();
  result.timings.total = std::chrono::duration<double>(Clock::now() - begin).count();
  return result;
}

}  // namespace hearth::tools
