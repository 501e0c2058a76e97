// A divided model behind the scheduler: several clients, cancelled texts, the same tokens as alone. A stand-in is the main device,
// in a thread of its own.
#include "serving.h"

namespace hearth::test {
namespace {

using engine::Where;
using serve::Finish;
using serve::Task;

// The stand-in is slow: it has a part of everything, and the CPU most.
const Division& division() {
  static const Division d{"served",
                          {0.0, 0.1, 0.0, 0.0},
                          {Where::gpu, Where::cpu, Where::cpu, Where::cpu, Where::cpu, Where::cpu, Where::cpu, Where::cpu},
                          Where::cpu,
                          Where::cpu};
  return d;
}

// Greedy and drawn ones, with prompts below and above a page.
std::vector<Task> five(const Serving& s) {
  std::vector<Task> tasks(5);
  for (size_t i = 0; i < tasks.size(); ++i) {
    const size_t lengths[] = {3, 20, 140, 9, 135};
    Task& t = tasks[i];
    t.prompt = s.prompt(lengths[i], static_cast<uint32_t>(i / 3)), t.n_predict = 8, t.ignore_eos = true;
    t.sampler.temp = i % 2 == 0 ? 0.0f : 0.9f, t.sampler.seed = i;
  }
  return tasks;
}

TEST(DividedServing, ATextIsTheSameAloneAndAmongOthersOfWhichSomeGoAway) {
  std::vector<std::vector<int32_t>> alone;
  {
    Serving s({.n_parallel = 1}, &division());
    for (const Task& t : five(s)) alone.push_back(collect(*s.scheduler().submit(t)).ids);
  }
  Serving s({.n_parallel = 8}, &division());
  for (int round = 0; round < 2; ++round) {  // with kept beginnings the second time
    std::vector<std::shared_ptr<serve::Job>> jobs, leaving;
    for (const Task& t : five(s)) {
      jobs.push_back(s.scheduler().submit(t));
      Task other = t;
      other.n_predict = 300, other.sampler.seed = 100 + t.prompt.size();
      if (leaving.size() < 3) leaving.push_back(s.scheduler().submit(other));
    }
    leaving[0]->cancel();                 // perhaps before it runs
    EXPECT_TRUE(leaving[1]->next(60s));   // in the midst of its text
    leaving[1]->cancel(), leaving[2]->cancel();
    for (size_t i = 0; i < jobs.size(); ++i) {
      const Collected c = collect(*jobs[i]);
      EXPECT_EQ(c.ids, alone[i]) << "text " << i << " in round " << round;
      EXPECT_EQ(c.end.finish, Finish::length) << c.end.error;
      EXPECT_EQ(c.end.n_cached > 0, round == 1 && c.end.n_prompt > 128);
    }
    for (const auto& job : leaving) EXPECT_EQ(collect(*job).end.finish, Finish::cancelled);
  }
  ASSERT_TRUE(s.settles());
  const serve::SchedulerStats stats = s.scheduler().stats();
  EXPECT_EQ(stats.pages - stats.pages_free, stats.pages_kept) << "pages of kept beginnings alone";
  EXPECT_EQ(stats.kept_prompts, 2);
}

}  // namespace
}  // namespace hearth::test
