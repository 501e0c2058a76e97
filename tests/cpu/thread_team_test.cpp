#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/thread_team.h"

namespace hearth {
namespace {

TEST(ThreadTeam, WhatThePiecesWroteIsVisible) {
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

TEST(ThreadTeam, PiecesCoverTheRangeOnceAndDoNotDependOnTheTeam) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadTeam team(threads);
    for (const int64_t n : {0, 1, 7, 64, 1000}) {
      for (const int64_t grain : {1, 3, 64, 5000}) {
        std::vector<int> visits(static_cast<size_t>(n));
        std::atomic<int> wrong{0};
        team.for_chunks(n, grain, [&](int64_t begin, int64_t end, int thread) {
          if (begin % grain != 0 || end != std::min(n, begin + grain) || thread < 0 || thread >= threads) ++wrong;
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        EXPECT_EQ(wrong, 0);
        for (const int v : visits) ASSERT_EQ(v, 1) << "n " << n << " grain " << grain << " threads " << threads;
      }
    }
  }
}

// Work after pauses longer and shorter than the members spin: they must wake, and no wake-up may be lost.
TEST(ThreadTeam, WakesAfterEveryPause) {
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

TEST(ThreadTeam, ManyTeamsComeAndGo) {
  for (int i = 0; i < 100; ++i) {
    ThreadTeam team(1 + i % 6);
    std::atomic<int> runs{0};
    if (i % 3 != 0) team.for_chunks(50, 1, [&](int64_t, int64_t, int) { ++runs; });
    EXPECT_EQ(runs, i % 3 != 0 ? 50 : 0);
  }
}

TEST(ThreadTeam, RefusesSillySizes) {
  EXPECT_THROW(ThreadTeam(-1), Error);
  EXPECT_THROW(ThreadTeam(100000), Error);
  EXPECT_GE(ThreadTeam().size(), 1);
}

}  // namespace
}  // namespace hearth
