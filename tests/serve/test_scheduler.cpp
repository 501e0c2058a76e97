// Many texts on one engine: one text whatever the neighbours, pages that are shared, kept and given back, and what ends a text.
#include <algorithm>

#include "serving.h"
#include "support/errors.h"

namespace hearth::test {
namespace {

using serve::Finish;
using serve::Task;

Task task(std::vector<int32_t> prompt, int64_t n_predict, std::optional<uint64_t> seed) {
  Task t;
  t.prompt = std::move(prompt), t.n_predict = n_predict, t.ignore_eos = true;
  t.sampler.temp = seed ? 0.9f : 0.0f;
  t.sampler.seed = seed;
  return t;
}

// Greedy ones and drawn ones, prompts below and above a page, some that begin alike.
std::vector<Task> sixteen(const Serving& s) {
  std::vector<Task> tasks;
  for (uint32_t i = 0; i < 16; ++i) {
    const size_t lengths[] = {3, 9, 127, 128, 129, 200, 260, 300};
    const auto seed = i % 2 == 0 ? std::nullopt : std::optional<uint64_t>(i);
    tasks.push_back(task(s.prompt(lengths[i % 8], i / 4), 24, seed));
    if (i % 4 == 3) tasks.back().sampler.frequency_penalty = 0.5f;
  }
  return tasks;
}

TEST(Scheduler, ATextIsTheSameAloneAndAmongFifteenOthers) {
  std::vector<std::vector<int32_t>> alone;
  {
    Serving s({.n_parallel = 1});
    for (const Task& t : sixteen(s)) alone.push_back(collect(*s.scheduler().submit(t)).ids);
  }
  Serving s({.n_parallel = 16});
  for (int round = 0; round < 2; ++round) {  // with kept beginnings the second time
    std::vector<std::shared_ptr<serve::Job>> jobs;
    std::vector<Task> tasks = sixteen(s);
    for (size_t i = 0; i < tasks.size(); ++i) {
      jobs.push_back(s.scheduler().submit(tasks[(i * 5) % 16]));  // in another order
      if (i % 3 == 0) std::this_thread::sleep_for(3ms);
    }
    for (size_t i = 0; i < jobs.size(); ++i) {
      const Collected c = collect(*jobs[i]);
      EXPECT_EQ(c.ids.size(), 24u);
      EXPECT_EQ(c.ids, alone[(i * 5) % 16]) << "text " << (i * 5) % 16 << " in round " << round;
    }
  }
}

TEST(Scheduler, KeptBeginningsAreUsedAndChangeNothing) {
  Serving s({.n_parallel = 2});
  const Collected fresh = collect(*s.scheduler().submit(task(s.prompt(300, 1), 16, 7)));
  EXPECT_EQ(fresh.end.n_cached, 0);
  const Collected again = collect(*s.scheduler().submit(task(s.prompt(300, 1), 16, 7)));
  EXPECT_EQ(again.end.n_cached, 256);
  EXPECT_EQ(again.ids, fresh.ids);
  const Collected page = collect(*s.scheduler().submit(task(s.prompt(256, 1), 16, 7)));
  EXPECT_EQ(page.end.n_cached, 128) << "the last token is evaluated for its logits";
  // Others push it out: the least recently used first.
  for (uint32_t other = 2; other < 6; ++other) collect(*s.scheduler().submit(task(s.prompt(500, other), 4, 7)));
  const Collected last = collect(*s.scheduler().submit(task(s.prompt(300, 1), 16, 7)));
  EXPECT_LT(last.end.n_cached, 256);
  EXPECT_EQ(last.ids, fresh.ids);
}

TEST(Scheduler, PromptsThatComeTogetherAreReadTogether) {
  Serving s({.n_parallel = 8});
  std::vector<std::shared_ptr<serve::Job>> jobs;
  for (uint32_t i = 0; i < 8; ++i) jobs.push_back(s.scheduler().submit(task(s.prompt(10 + i % 4, i), 60, i)));
  for (const auto& job : jobs) EXPECT_EQ(collect(*job).ids.size(), 60u);
  EXPECT_LE(s.scheduler().stats().n_passes, 59 + 2 + 4) << "the first alone, the others in one pass, or nearly so";
}

TEST(Scheduler, CancelledTextsGiveTheirPagesBack) {
  Serving s({.n_parallel = 4});
  std::vector<std::shared_ptr<serve::Job>> jobs;
  for (uint32_t i = 0; i < 8; ++i) jobs.push_back(s.scheduler().submit(task(s.prompt(100, i), 400, i)));
  ASSERT_TRUE(jobs[0]->next(60s));
  for (const auto& job : jobs) job->cancel();
  for (const auto& job : jobs) EXPECT_EQ(collect(*job).end.finish, Finish::cancelled);
  ASSERT_TRUE(s.settles());
  EXPECT_EQ(s.scheduler().stats().pages_free, s.n_pages()) << "prompts below a page are not kept";
}

TEST(Scheduler, WhatEndsAText) {
  Serving s({.n_parallel = 2});
  const auto run = [&](Task t) { return collect(*s.scheduler().submit(std::move(t))); };
  const Collected length = run(task(s.prompt(9, 1), 12, std::nullopt));
  EXPECT_EQ(length.end.finish, Finish::length);
  EXPECT_EQ(length.end.n_generated, 12);
  EXPECT_EQ(run(task(s.prompt(9, 1), 0, std::nullopt)).ids.size(), 0u);

  Task stop = task(s.prompt(9, 1), 12, std::nullopt);
  stop.stops = {"never there", length.text.substr(length.text.size() / 2, 3)};
  const Collected stopped = run(stop);
  EXPECT_EQ(stopped.end.finish, Finish::stop_string);
  EXPECT_EQ(stopped.end.stop, stop.stops[1]);
  EXPECT_EQ(stopped.text, length.text.substr(0, length.text.find(stop.stops[1])));

  const Collected full = run(task(s.prompt(500, 1), -1, std::nullopt));
  EXPECT_EQ(full.end.finish, Finish::context_full);
  EXPECT_EQ(full.end.n_generated, 13) << "the last one is not evaluated any more";

  Task story = task(s.tokenizer().encode("Once upon a time"), -1, std::nullopt);
  story.ignore_eos = false;
  const Collected told = run(story);
  EXPECT_TRUE(told.end.finish == Finish::end_of_text || told.end.finish == Finish::context_full);
}

TEST(Scheduler, RefusesBeforeItStarts) {
  Serving s({.n_parallel = 1, .n_queue = 2});
  const auto refused = [&](Task t) { return message_of([&] { s.scheduler().submit(std::move(t)); }); };
  EXPECT_NE(refused(task({}, 1, 1)).find("empty"), std::string::npos);
  EXPECT_NE(refused(task(s.prompt(512, 1), 1, 1)).find("the prompt has 512 tokens and the context holds 512"),
            std::string::npos);
  EXPECT_NE(refused(task({-1}, 1, 1)).find("out of range"), std::string::npos);
  Task hot = task({1}, 1, 1);
  hot.sampler.temp = -1;
  EXPECT_NE(refused(hot).find("temperature"), std::string::npos);

  std::vector<std::shared_ptr<serve::Job>> jobs = {s.scheduler().submit(task({1}, 400, 1))};
  ASSERT_TRUE(jobs[0]->next(60s));  // it runs
  for (int i = 0; i < 2; ++i) jobs.push_back(s.scheduler().submit(task({1}, 1, 1)));
  EXPECT_THROW(s.scheduler().submit(task({1}, 1, 1)), serve::Busy);
  jobs[0]->cancel();
  for (size_t i = 1; i < jobs.size(); ++i) EXPECT_EQ(collect(*jobs[i]).end.finish, Finish::length);
}

TEST(Scheduler, FinishesWhatRunsWhenItIsStopped) {
  Serving s({.n_parallel = 1});
  const auto runs = s.scheduler().submit(task({1}, 50, 1));
  const auto waits = s.scheduler().submit(task({1}, 50, 1));
  s.scheduler().stop(60s);
  EXPECT_THROW(s.scheduler().submit(task({1}, 1, 1)), serve::Busy);
  EXPECT_EQ(collect(*runs).end.finish, Finish::length);
  EXPECT_EQ(collect(*waits).end.finish, Finish::length);
}

TEST(Scheduler, ProbabilitiesAreTheModels) {
  Serving s({.n_parallel = 1});
  Task t = task(s.prompt(9, 1), 4, std::nullopt);
  t.n_top = 3;
  const auto job = s.scheduler().submit(t);
  int pieces = 0;
  while (const auto event = job->next(60s)) {
    const auto* piece = std::get_if<serve::Piece>(&*event);
    if (piece == nullptr) break;
    ASSERT_TRUE(piece->drawn && piece->top.size() == 3);
    EXPECT_EQ(piece->drawn->id, piece->top[0].id) << "greedy";
    EXPECT_EQ(piece->drawn->log_probability, piece->top[0].log_probability);
    EXPECT_LE(piece->top[1].log_probability, piece->top[0].log_probability);
    EXPECT_LE(piece->top[0].log_probability, 0);
    ++pieces;
  }
  EXPECT_EQ(pieces, 4);
}

}  // namespace
}  // namespace hearth::test
