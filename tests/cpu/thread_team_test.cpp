// The team under load; its rules are tested in tests/core.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/thread_team.h"

namespace hearth {
namespace {

TEST(ThreadTeamStress, WhatThePiecesWroteIsVisible) {
  for (const int threads : {1, 2, 3, 5, 16}) {
    ThreadTeam team(threads);
    ASSERT_EQ(team.size(), threads);
    std::vector<int> runs(40);  // not atomic: for_chunks() must order the writes
    for (int i = 0; i < 2000; ++i) {
      team.for_chunks(40, 1, [&](int64_t begin, int64_t, int) { ++runs[static_cast<size_t>(begin)]; });
    }
    for (const int n : runs) EXPECT_EQ(n, 2000);
  }
}

// Work after pauses longer and shorter than the members spin: they must wake, and no wake-up may be lost.
TEST(ThreadTeamStress, WakesAfterEveryPause) {
  ThreadTeam team(4);
  std::atomic<int64_t> sum{0};
  int64_t expected = 0;
  for (int round = 0; round < 300; ++round) {
    std::this_thread::sleep_for(std::chrono::microseconds((round * 37) % 600));
    team.for_chunks(100, 7, [&](int64_t begin, int64_t end, int) { sum += end - begin; });
    expected += 100;
    ASSERT_EQ(sum, expected);
  }
}

TEST(ThreadTeamStress, ManyTeamsComeAndGo) {
  for (int i = 0; i < 100; ++i) {
    ThreadTeam team(1 + i % 6);
    std::atomic<int> runs{0};
    if (i % 3 != 0) team.for_chunks(50, 1, [&](int64_t, int64_t, int) { ++runs; });
    EXPECT_EQ(runs, i % 3 != 0 ? 50 : 0);
  }
}

}  // namespace
}  // namespace hearth
