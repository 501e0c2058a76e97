#pragma once
// Many texts on one engine: they join and leave between steps. A step is one token of every text that runs, at most 8 of them a
// pass; a pass for short ends of prompts, as far as those passes have no room for them; and then one page of prompts. So a text
// that runs waits for at most one page of somebody's prompt. A text's tokens are the same alone and among others: passes of up to 8
// tokens change no other's bits (docs/explanation/architecture.md), and longer pieces of prompts, which end at page
// boundaries, are evaluated alone, or where the device computes each token for itself.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"
#include "engine/engine.h"
#include "serve/job.h"
#include "serve/prefix_cache.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"

namespace hearth::serve {

// The queue is full, or the server is ending: try again later.
class Busy : public Error {
 public:
  using Error::Error;
};

struct SchedulerOptions {
  int64_t n_parallel = 4;  // texts that run at once; the engine has pages for as many sequences
  int64_t n_queue = 64;    // that wait besides
  // Prompts may share a pass of more than kFewTokens tokens, because the device computes each token of it without regard to the
  // others: an undivided model without experts on the CPU.
  bool join_prompts = false;
};

// The view from outside, as of the last step.
struct SlotStats {
  int64_t task = 0, n_prompt = 0, n_past = 0, n_generated = 0;
  bool prompt = false;  // it is still being read
};
struct SchedulerStats {
  std::vector<SlotStats> running;
  int64_t n_waiting = 0, n_parallel = 0;
  int64_t pages = 0, pages_free = 0, pages_kept = 0, kept_prompts = 0;
  int64_t n_prompt = 0, n_cached = 0, n_generated = 0, n_done = 0, n_passes = 0;  // since the start
  double prompt_seconds = 0, decode_seconds = 0;
  double tokens_per_second = 0;                             // of the last second or so in which there were texts
  double density = 0, hit_share = 0;                        // NaN: not known
  double device_bytes = 0, host_bytes = 0, link_bytes = 0;  // that a token reads
};

class Scheduler {
 public:
  // Both must outlive the scheduler.
  Scheduler(engine::Engine& engine, const text::Tokenizer& tokenizer, const SchedulerOptions& options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // --- from any thread ---
  // Throws Busy when the queue is full, Error when the prompt does not fit the context or a parameter is out of range.
  std::shared_ptr<Job> submit(Task task);
  // Takes no more texts; run() returns when what there is has ended, or is cut off (cancelled) after `patience`.
  void stop(std::chrono::milliseconds patience);
  SchedulerStats stats() const;
  const SchedulerOptions& options() const { return options_; }
  int64_t n_ctx() const { return engine_.n_ctx(); }

  // --- by the one thread that uses the engine ---
  void run();

 private:
  struct Running;
  using Clock = std::chrono::steady_clock;

  void run_until_stopped();
  void admit();
  void drop_cancelled();
  using Pass = std::vector<Running*>;
  std::span<const int32_t> next_of(const Running& r) const;
  std::vector<Pass> passes() const;
  void run_pass(const Pass& pass);
  void has_read(Running& r, int64_t n, int64_t row);
  void draw_and_take(Running& r, int64_t row);
  int32_t draw(Running& r, int64_t row);
  void take(Running& r, int32_t id);
  void send(Running& r, std::string text, int32_t id);
  void end(Running& r, Finish finish, std::string error = {});
  void remove_ended();
  void publish();

  engine::Engine& engine_;
  const text::Tokenizer& tokenizer_;
  const SchedulerOptions options_;
  size_t n_drawable_ = 0;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<std::pair<std::shared_ptr<Job>, Clock::time_point>> waiting_;
  bool stopping_ = false;
  Clock::time_point deadline_;
  SchedulerStats stats_;

  // run()'s own:
  std::vector<std::unique_ptr<Running>> running_;
  PrefixCache prefixes_;
  int64_t next_task_ = 0;
  SchedulerStats totals_;
  Clock::time_point window_begin_;
  int64_t window_tokens_ = 0;
};

}  // namespace hearth::serve
