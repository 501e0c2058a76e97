#include "serve/scheduler.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace hearth::serve {
namespace {

double seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

// Log of the softmax over logits, for the drawn token and the likeliest others.
void add_probabilities(std::span<const float> logits, int32_t id, int n_top, Piece& piece) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double total = 0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit) - most);
  const double log_total = std::log(total) + most;
  const auto of = [&](int32_t i) {
    return TokenProbability{i, static_cast<float>(logits[static_cast<size_t>(i)] - log_total)};
  };
  piece.drawn = of(id);
  std::vector<int32_t> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  const auto n = std::min<std::ptrdiff_t>(n_top, std::ssize(ids));
  std::partial_sort(ids.begin(), ids.begin() + n, ids.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  for (std::ptrdiff_t i = 0; i < n; ++i) piece.top.push_back(of(ids[static_cast<size_t>(i)]));
}

text::SamplerParams sampler_params(const Task& task, const text::Tokenizer& tokenizer) {
  text::SamplerParams p = task.sampler;
  if (task.ignore_eos) {
    for (const int32_t id : tokenizer.end_of_generation()) p.suppress.push_back(id);
  }
  return p;
}

}  // namespace

struct Scheduler::Running {
  Running(std::shared_ptr<Job> j, engine::Sequence s, const text::Tokenizer& tokenizer)
      : job(std::move(j)),
        sequence(std::move(s)),
        sampler(sampler_params(job->task(), tokenizer)),
        decoder(tokenizer),
        stops(job->task().stops) {}

  bool reads_prompt() const { return sequence.n_past() < std::ssize(job->task().prompt); }

  std::shared_ptr<Job> job;
  engine::Sequence sequence;
  text::Sampler sampler;
  text::StreamDecoder decoder;
  text::StopMatcher stops;
  End facts;
  int64_t number = 0;
  int32_t next = -1;  // drawn, and not evaluated yet
  Piece piece;        // being made of it
  bool ended = false;
  Clock::time_point first_token;
};

Scheduler::Scheduler(engine::Engine& engine, const text::Tokenizer& tokenizer, const SchedulerOptions& options)
    : engine_(engine), tokenizer_(tokenizer), options_(options) {
  // Rows beyond the vocabulary are padding: they have no text and must not be drawn.
  n_drawable_ = static_cast<size_t>(std::min<int64_t>(tokenizer.n_vocab(), engine.config().n_vocab));
  publish();
}

Scheduler::~Scheduler() = default;

std::shared_ptr<Job> Scheduler::submit(Task task) {
  const auto n = std::ssize(task.prompt);
  if (n == 0) fail("the prompt is empty");
  if (n >= engine_.n_ctx()) {
    fail("the prompt has {} tokens and the context holds {}; shorten it, or start the server with -c {} or more", n,
         engine_.n_ctx(), n + 1);
  }
  for (const int32_t id : task.prompt) {
    if (id < 0 || id >= engine_.config().n_vocab) {
      fail("token id {} is out of range, expected 0 to {}", id, engine_.config().n_vocab - 1);
    }
  }
  text::Sampler{task.sampler};  // refuses parameters out of range
  text::StopMatcher{task.stops};
  auto job = std::make_shared<Job>(std::move(task));
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Busy("the server is ending");
    const int64_t n_places = options_.n_parallel - std::ssize(stats_.running);  // that the first of them will take
    if (std::ssize(waiting_) >= options_.n_queue + n_places) {
      throw Busy(fmt::format("{} requests are waiting, and no more may; try again later", waiting_.size()));
    }
    waiting_.emplace_back(job, Clock::now());
    stats_.n_waiting = std::ssize(waiting_);
  }
  wake_.notify_one();
  return job;
}

void Scheduler::stop(std::chrono::milliseconds patience) {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    deadline_ = Clock::now() + patience;
  }
  wake_.notify_one();
}

SchedulerStats Scheduler::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void Scheduler::run() {
  try {
    engine_.device().use_from_this_thread();
    run_until_stopped();
  } catch (const std::exception& e) {  // nobody may wait for ever
    stop({});
    for (const auto& r : running_) end(*r, Finish::failed, e.what());
    remove_ended();
    const std::lock_guard lock(mutex_);
    for (const auto& [job, since] : waiting_) job->push(End{.finish = Finish::failed, .error = e.what()});
    waiting_.clear();
    throw;
  }
}

void Scheduler::run_until_stopped() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const bool idle = running_.empty();
      wake_.wait(lock, [&] { return stopping_ || !waiting_.empty() || !running_.empty(); });
      if (idle) window_begin_ = Clock::now();  // no token could come before
      if (stopping_ && waiting_.empty() && running_.empty()) return;
      if (stopping_ && Clock::now() > deadline_) {
        for (const auto& [job, since] : waiting_) job->cancel();
        for (const auto& r : running_) r->job->cancel();
      }
    }
    drop_cancelled();
    admit();
    for (const Pass& pass : passes()) run_pass(pass);
    remove_ended();
    publish();
  }
}

void Scheduler::drop_cancelled() {
  for (const auto& r : running_) {
    if (r->job->cancelled()) end(*r, Finish::cancelled);
  }
  remove_ended();
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [](const auto& w) {
    if (!w.first->cancelled()) return false;
    w.first->push(End{.finish = Finish::cancelled});
    return true;
  });
}

// Takes waiting texts while there are places.
void Scheduler::admit() {
  while (std::ssize(running_) < options_.n_parallel) {
    std::shared_ptr<Job> job;
    Clock::time_point since;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) return;
      std::tie(job, since) = std::move(waiting_.front());
      waiting_.pop_front();
    }
    const std::string name = fmt::format("request {}", next_task_);
    std::optional<engine::Sequence> sequence = prefixes_.find(job->task().prompt, name);
    if (!sequence) sequence = engine_.sequence(name);
    auto r = std::make_unique<Running>(job, *std::move(sequence), tokenizer_);
    r->number = next_task_++;
    r->facts.n_prompt = std::ssize(job->task().prompt);
    r->facts.n_cached = r->sequence.n_past();
    r->facts.queue_seconds = seconds(Clock::now() - since);
    r->facts.seed = r->sampler.seed();
    for (const int32_t id : job->task().prompt) r->sampler.accept(id);
    totals_.n_cached += r->facts.n_cached;
    running_.push_back(std::move(r));
    publish();
  }
}

// The next tokens of a text: its last token, or its prompt up to the next page's beginning.
std::span<const int32_t> Scheduler::next_of(const Running& r) const {
  if (!r.reads_prompt()) return {&r.next, 1};
  const std::span<const int32_t> prompt = r.job->task().prompt;
  const int64_t n_past = r.sequence.n_past(), page_end = (n_past / kPagePositions + 1) * kPagePositions;
  const int64_t end = std::min({page_end, std::ssize(prompt), n_past + engine_.n_batch()});
  return prompt.subspan(static_cast<size_t>(n_past), static_cast<size_t>(end - n_past));
}

// The passes of a step: all texts' tokens, at most kFewTokens a pass; beginnings and ends of prompts that are as short in the last
// of them and in one more; and one page of one prompt, or of several that may share a pass.
std::vector<Scheduler::Pass> Scheduler::passes() const {
  std::vector<Pass> all;
  int64_t n_rows = 0;  // of the last one
  const auto add = [&](Running* r, int64_t n) {
    if (all.empty() || n_rows + n > kFewTokens) all.emplace_back(), n_rows = 0;
    all.back().push_back(r);
    n_rows += n;
  };
  for (const auto& r : running_) {
    if (!r->reads_prompt()) add(r.get(), 1);
  }
  const size_t n_decoding = all.size();
  Pass pages;
  int64_t n_page_rows = 0;
  for (const auto& r : running_) {
    if (!r->reads_prompt()) continue;
    const int64_t n = std::ssize(next_of(*r));
    if (n <= kFewTokens) {
      if (all.size() <= n_decoding || n_rows + n <= kFewTokens) add(r.get(), n);
    } else if (pages.empty() ||
               (options_.join_prompts && n_page_rows + n <= std::min(kPagePositions, engine_.n_batch()))) {
      pages.push_back(r.get());
      n_page_rows += n;
    }
  }
  if (!pages.empty()) all.push_back(std::move(pages));
  return all;
}

// Evaluates a pass, with room made for it by giving up kept prompts. Running texts always fit: each holds at most n_ctx positions.
void Scheduler::run_pass(const Pass& pass) {
  const auto begin = Clock::now();
  std::vector<bool> reading;
  try {
    engine::Batch batch;
    int64_t new_pages = 0;
    for (Running* r : pass) {
      const std::span<const int32_t> ids = next_of(*r);
      const bool ends = !r->reads_prompt() || r->sequence.n_past() + std::ssize(ids) == r->facts.n_prompt;
      reading.push_back(r->reads_prompt());
      new_pages += r->sequence.n_past() % kPagePositions == 0 ? 1 : 0;
      batch.add(r->sequence, ids, ends ? engine::Logits::last : engine::Logits::none);
    }
    while (engine_.pages().n_free() < new_pages && prefixes_.drop_oldest()) {
    }
    engine_.eval(batch);
    ++totals_.n_passes;
    for (size_t i = 0; i < pass.size(); ++i) {
      const engine::Batch::Part& part = batch.parts()[i];
      if (reading[i]) {
        has_read(*pass[i], part.n_rows, part.first_row + part.n_rows - 1);
      } else {
        draw_and_take(*pass[i], part.first_row);
      }
    }
  } catch (const Error& e) {
    for (Running* r : pass) end(*r, Finish::failed, e.what());
  }
  const double took = seconds(Clock::now() - begin);
  const bool reads = std::find(reading.begin(), reading.end(), true) != reading.end();
  for (size_t i = 0; i < reading.size(); ++i) {
    if (reading[i]) pass[i]->facts.prompt_seconds += took;
  }
  (reads ? totals_.prompt_seconds : totals_.decode_seconds) += took;
}

// `n` tokens of a prompt were evaluated, the last one as `row`.
void Scheduler::has_read(Running& r, int64_t n, int64_t row) {
  const Task& task = r.job->task();
  totals_.n_prompt += n;
  if (r.sequence.n_past() % kPagePositions == 0) prefixes_.keep(task.prompt, r.sequence);
  if (r.reads_prompt()) return;
  if (task.n_predict == 0) return end(r, Finish::length);
  r.first_token = Clock::now();
  draw_and_take(r, row);
}

void Scheduler::draw_and_take(Running& r, int64_t row) {
  try {
    take(r, draw(r, row));
  } catch (const Error& e) {  // no usable logits
    end(r, Finish::failed, e.what());
  }
}

int32_t Scheduler::draw(Running& r, int64_t row) {
  r.piece = {};
  const Task& task = r.job->task();
  if (r.sampler.is_plain_argmax() && !task.n_top) {
    const int32_t best = engine_.best(row);
    const auto& not_those = r.sampler.params().suppress;
    const bool suppressed = std::find(not_those.begin(), not_those.end(), best) != not_those.end();
    if (static_cast<size_t>(best) < n_drawable_ && !suppressed) return best;
  }
  const std::span<const float> logits = engine_.logits(row).first(n_drawable_);
  const int32_t id = r.sampler.sample(logits);
  if (task.n_top) add_probabilities(logits, id, *task.n_top, r.piece);
  return id;
}

// A drawn token: it ends the text, or is sent and evaluated with the next step.
void Scheduler::take(Running& r, int32_t id) {
  const Task& task = r.job->task();
  if (!task.ignore_eos && tokenizer_.is_end_of_generation(id)) return end(r, Finish::end_of_text);
  ++r.facts.n_generated, ++totals_.n_generated, ++window_tokens_;
  r.next = id;
  send(r, r.stops.push(r.decoder.push(id)), id);
  if (r.stops.stopped()) return end(r, Finish::stop_string);
  if (r.facts.n_generated == task.n_predict) return end(r, Finish::length);
  if (r.sequence.n_past() == engine_.n_ctx()) end(r, Finish::context_full);
}

void Scheduler::send(Running& r, std::string text, int32_t id) {
  Piece piece = std::move(r.piece);
  r.piece = {};
  piece.text = std::move(text), piece.id = id;
  r.job->push(std::move(piece));
}

void Scheduler::end(Running& r, Finish finish, std::string error) {
  if (r.ended) return;
  r.ended = true;
  std::string rest = r.stops.push(r.decoder.flush());
  rest += r.stops.flush();
  if (!rest.empty()) send(r, std::move(rest), -1);
  r.facts.finish = r.stops.stopped() ? Finish::stop_string : finish;
  r.facts.error = std::move(error);
  r.facts.stop = r.stops.met();
  if (r.facts.n_generated > 0) r.facts.generate_seconds = seconds(Clock::now() - r.first_token);
  ++totals_.n_done;
}

// Pages are given back before the end is told, so that whoever waits for it finds them free.
void Scheduler::remove_ended() {
  std::vector<std::pair<std::shared_ptr<Job>, End>> ended;
  for (const auto& r : running_) {
    if (r->ended) ended.emplace_back(r->job, r->facts);
  }
  if (ended.empty()) return;
  std::erase_if(running_, [](const auto& r) { return r->ended; });
  publish();
  for (auto& [job, facts] : ended) job->push(std::move(facts));
}

void Scheduler::publish() {
  const auto now = Clock::now();
  const double passed = seconds(now - window_begin_);
  if (window_tokens_ > 0 && (passed >= 1.0 || running_.empty())) {
    totals_.tokens_per_second = static_cast<double>(window_tokens_) / passed;
    window_begin_ = now, window_tokens_ = 0;
    const engine::DensityStats& density = engine_.density();
    totals_.density = density.density();
    totals_.hit_share = 1 - density.host_share();
    int64_t n_kv = 1;
    for (const auto& r : running_) n_kv = std::max(n_kv, r->sequence.n_past());
    const engine::SideBytes bytes = engine_.traffic(density, n_kv).total();
    totals_.device_bytes = bytes.main, totals_.host_bytes = bytes.host, totals_.link_bytes = bytes.link;
  }
  totals_.running.clear();
  for (const auto& r : running_) {
    totals_.running.push_back(
        {r->number, r->facts.n_prompt, r->sequence.n_past(), r->facts.n_generated, r->reads_prompt()});
  }
  totals_.n_parallel = options_.n_parallel;
  totals_.pages = engine_.pages().n_pages(), totals_.pages_free = engine_.pages().n_free();
  totals_.kept_prompts = prefixes_.size(), totals_.pages_kept = prefixes_.n_pages();
  const std::lock_guard lock(mutex_);
  totals_.n_waiting = std::ssize(waiting_);
  stats_ = totals_;
}

}  // namespace hearth::serve
