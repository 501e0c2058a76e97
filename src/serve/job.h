#pragma once
// One text to generate for somebody who waits in another thread: what is asked, and what comes back piece by piece.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "text/sampler.h"

namespace hearth::serve {

struct Task {
  std::vector<int32_t> prompt;  // not empty
  int64_t n_predict = -1;       // tokens at most; -1: until something else ends the text
  text::SamplerParams sampler;
  std::vector<std::string> stops;
  bool ignore_eos = false;
  std::optional<int> n_top;  // log probabilities: of the token drawn and of so many of the likeliest
};

struct TokenProbability {
  int32_t id = 0;
  float log_probability = 0;  // of the model, before temperature and penalties
};

struct Piece {
  std::string text;  // whole UTF-8 characters; may be empty
  int32_t id = -1;   // -1: text that was held back and comes at the end
  std::optional<TokenProbability> drawn;
  std::vector<TokenProbability> top;  // the likeliest first
};

enum class Finish { end_of_text, stop_string, length, context_full, cancelled, failed };

struct End {
  Finish finish = Finish::length;
  std::string stop, error;  // the stop string that was met; what failed
  int64_t n_prompt = 0, n_cached = 0, n_generated = 0;
  double queue_seconds = 0, prompt_seconds = 0, generate_seconds = 0;
  uint64_t seed = 0;
};

class Job {
 public:
  using Event = std::variant<Piece, End>;

  explicit Job(Task task) : task_(std::move(task)) {}
  const Task& task() const { return task_; }

  // The next event, in order; none when nothing came for so long. End is the last one.
  std::optional<Event> next(std::chrono::milliseconds patience);
  // Nobody wants the rest: its pages are free within one step.
  void cancel();
  bool cancelled() const;

  void push(Event event);  // by the scheduler

 private:
  const Task task_;
  mutable std::mutex mutex_;
  std::condition_variable came_;
  std::deque<Event> events_;
  bool cancelled_ = false;
};

}  // namespace hearth::serve
