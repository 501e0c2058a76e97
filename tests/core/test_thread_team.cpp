#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/thread_team.h"

namespace hearth {
namespace {

// Every piece once, by a thread with a number of its own, over many jobs in quick succession: late members included.
TEST(ThreadTeam, EveryPieceRunsOnce) {
  for (const int n : {1, 2, 3, 7}) {
    ThreadTeam team(n);
    EXPECT_EQ(team.size(), n);
    for (int round = 0; round < 5000; ++round) {
      std::array<int, 9> hits{};
      std::array<std::atomic<int>, 7> inside{};
      team.for_chunks(9, 1, [&](int64_t i, int64_t, int thread) {
        EXPECT_EQ(inside[static_cast<size_t>(thread)]++, 0) << "two threads share a number";
        ++hits[static_cast<size_t>(i)];
        --inside[static_cast<size_t>(thread)];
      });
      for (const int h : hits) ASSERT_EQ(h, 1);
    }
  }
}

TEST(ThreadTeam, ChunksCoverTheRangeOnceWhateverTheTeam) {
  for (const int n : {1, 2, 5}) {
    ThreadTeam team(n);
    for (const int64_t size : {0, 1, 6, 7, 8, 1000}) {
      std::vector<int> hits(static_cast<size_t>(size), 0);
      team.for_chunks(size, 7, [&](int64_t begin, int64_t end, int) {
        EXPECT_EQ(begin % 7, 0);
        EXPECT_LE(end - begin, 7);
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (const int h : hits) ASSERT_EQ(h, 1);
    }
  }
}

// Nothing here is atomic: the team must order all of it, late members and members without a piece included.
TEST(ThreadTeam, ARoundSeesAllOfThoseBefore) {
  for (const int n : {1, 2, 3, 7}) {
    ThreadTeam team(n);
    for (int i = 0; i < 300; ++i) {
      for (const auto& [first, second] : {std::pair{0, 0}, {0, 9}, {1, 1}, {9, 0}, {3, 40}, {40, 3}, {8, 8}}) {
        std::vector<int> a(static_cast<size_t>(first)), b(static_cast<size_t>(second)), c(20);
        int sum = 0, calls = 0;
        const auto fill = [&](int64_t begin, int64_t end, int) {
          for (int64_t k = begin; k < end; ++k) a[static_cast<size_t>(k)] += static_cast<int>(k) + 1;
        };
        const auto copy = [&](int64_t begin, int64_t end, int thread) {
          EXPECT_LT(thread, n);
          for (int64_t k = begin; k < end; ++k) b[static_cast<size_t>(k)] += sum;
        };
        const auto check = [&](int64_t begin, int64_t end, int) {
          for (int64_t k = begin; k < end; ++k)
            c[static_cast<size_t>(k)] += std::accumulate(b.begin(), b.end(), 0) == sum * std::ssize(b) ? 1 : 100;
        };
        ThreadTeam::Round rounds[] = {{first, 2, fill}, {second, 3, copy}, {0, 1, check}};
        team.for_rounds(rounds, [&](size_t finished) {
          EXPECT_EQ(finished, static_cast<size_t>(calls++));
          if (finished == 0) {
            sum = std::accumulate(a.begin(), a.end(), 0);
            rounds[2].n = std::ssize(c);
          }
        });
        ASSERT_EQ(calls, 2);
        ASSERT_EQ(sum, first * (first + 1) / 2);
        for (const int v : c) ASSERT_EQ(v, 1);
      }
    }
  }
}

// Behind a direct round nobody waits but those who ask for its pieces, and they see what those wrote; what comes later
// is opened, or not, as ever.
TEST(ThreadTeam, ADirectRoundIsSeenByThoseWhoWaitForItsPieces) {
  for (const int n : {1, 2, 3, 7}) {
    ThreadTeam team(n);
    const auto sum_of = [&](size_t round, const std::vector<int>& pieces) {
      int sum = 0;
      for (int64_t k = 0; k < std::ssize(pieces);) {
        const int64_t end = team.wait_pieces(round, k, std::ssize(pieces), [] {});
        EXPECT_GT(end, k);
        EXPECT_LE(end, std::ssize(pieces));
        for (; k < end; ++k) sum += pieces[static_cast<size_t>(k)];
      }
      return sum;
    };
    for (int i = 0; i < 500; ++i) {
      for (int first = 0; first <= n; ++first) {
        for (const int second : {0, 1, 7, 30}) {
          std::vector<int> a(static_cast<size_t>(first)), b(static_cast<size_t>(second)), c(9);
          const bool second_direct = second <= n && i % 3 == 0;
          const auto fill = [&](int64_t k, int64_t, int) { a[static_cast<size_t>(k)] += 1; };
          const auto add = [&](int64_t k, int64_t, int) { b[static_cast<size_t>(k)] += 1 + sum_of(0, a); };
          const auto check = [&](int64_t k, int64_t, int) {
            c[static_cast<size_t>(k)] += second_direct ? sum_of(1, b) : std::accumulate(b.begin(), b.end(), 0);
          };
          std::vector<ThreadTeam::Round> rounds{{first, 1, fill}, {second, 1, add}, {std::ssize(c), 1, check}};
          rounds[0].direct = true;
          rounds[1].direct = second_direct;
          if (i % 2 == 0) rounds.pop_back();
          size_t calls = 0;
          team.for_rounds(rounds, [&](size_t finished) {
            EXPECT_EQ(finished, 1u);
            ++calls;
          });
          ASSERT_EQ(calls, rounds.size() == 3 && !rounds[1].direct ? 1u : 0u);
          for (const int v : a) ASSERT_EQ(v, 1);
          for (const int v : b) ASSERT_EQ(v, first + 1);
          for (const int v : c) ASSERT_EQ(v, rounds.size() == 3 ? second * (first + 1) : 0);
        }
      }
    }
  }
}

// Rounds without pieces at the end cost nothing, not even the call before them, whether that is known from the start or
// found out on the way.
TEST(ThreadTeam, ADispatchEndsWithTheLastRoundThatHasPieces) {
  for (const int n : {1, 2, 3, 7}) {
    ThreadTeam team(n);
    for (int i = 0; i < 1000; ++i) {
      const int64_t second = i % 3 == 0 ? 0 : 9, third = i % 2 == 0 ? 0 : 9;
      std::array<std::atomic<int>, 3> pieces{};
      size_t calls = 0;
      const auto first_work = [&](int64_t, int64_t, int) { ++pieces[0]; };
      const auto second_work = [&](int64_t, int64_t, int) { ++pieces[1]; };
      const auto third_work = [&](int64_t, int64_t, int) { ++pieces[2]; };
      ThreadTeam::Round rounds[] = {{9, 2, first_work}, {1, 1, second_work}, {1, 1, third_work}};
      team.for_rounds(rounds, [&](size_t finished) {
        EXPECT_EQ(finished, calls++);
        if (finished == 0) rounds[1].n = second, rounds[2].n = third;
      });
      ASSERT_EQ(calls, third > 0 ? 2u : 1u);
      ASSERT_EQ(pieces[0], 5);
      ASSERT_EQ(pieces[1], second);
      ASSERT_EQ(pieces[2], third);
    }
  }
}

// Threads that wait for a round's last piece are called meanwhile, one call after the other, as long as they like it.
TEST(ThreadTeam, WaitingThreadsDoSomethingMeanwhile) {
  constexpr int kThreads = 3;
  ThreadTeam team(kThreads);
  for (const int64_t n_steps : {0, 1, 5}) {
    std::array<int64_t, kThreads> steps{};  // not atomic: each is its thread's, and then the caller's
    std::atomic<int> n_waiting = 0, n_done = 0;
    const auto wait_for_the_others = [&](int64_t piece, int64_t, int) {
      if (piece > 0) return;
      // The other threads can only wait now; a member that has no core by then is left out, and never does.
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (n_waiting < kThreads - 1 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
    };
    const auto meanwhile = [&](int thread, int64_t step) {
      int64_t& mine = steps[static_cast<size_t>(thread)];
      EXPECT_EQ(step, mine) << "called out of turn, or after it had enough";
      mine = step < n_steps ? step + 1 : -1;
      n_waiting += step < n_steps ? 0 : 1;
      return step < n_steps;
    };
    const auto second = [&](int64_t, int64_t, int) { ++n_done; };
    const ThreadTeam::Round rounds[] = {{kThreads, 1, wait_for_the_others, meanwhile}, {kThreads, 1, second}};
    team.for_rounds(rounds, [](size_t) {});
    EXPECT_EQ(n_done, kThreads);
    EXPECT_EQ(n_waiting, kThreads - 1);
  }
}

TEST(ThreadTeam, WorksPinnedAndWithoutSpinning) {
  ThreadTeam team(2, {.pin = true, .spin = std::chrono::microseconds(0)});
  std::atomic<int> calls = 0;
  for (int i = 0; i < 200; ++i) team.for_chunks(3, 1, [&](int64_t, int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 600);
}

TEST(ThreadTeam, WakesAfterSleeping) {
  for (const int n : {3, 7}) {
    ThreadTeam team(n);
    for (int i = 0; i < 5; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));  // far longer than members spin
      std::vector<std::atomic<int>> calls(static_cast<size_t>(n));
      std::atomic<int> n_calls = 0;
      // Each waits for all, so the members must be awake; one that is left out has its piece done by the caller.
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      team.for_chunks(n, 1, [&](int64_t, int64_t, int thread) {
        ++calls[static_cast<size_t>(thread)], ++n_calls;
        while (n_calls < n && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
      });
      for (const auto& c : calls) EXPECT_EQ(c, 1);
    }
  }
}

TEST(ThreadTeam, WritesOfMembersAreVisibleToTheCaller) {
  ThreadTeam team(4);
  std::vector<int64_t> data(4096);
  for (int64_t round = 1; round <= 200; ++round) {
    team.for_chunks(static_cast<int64_t>(data.size()), 64, [&](int64_t b, int64_t e, int) {
      for (int64_t i = b; i < e; ++i) data[static_cast<size_t>(i)] += i;
    });
    const int64_t n = static_cast<int64_t>(data.size());
    ASSERT_EQ(std::accumulate(data.begin(), data.end(), int64_t{0}), round * n * (n - 1) / 2);
  }
}

TEST(ThreadTeam, RefusesSillySizes) {
  EXPECT_THROW(ThreadTeam(-1), Error);
  EXPECT_THROW(ThreadTeam(100000), Error);
}

TEST(CpuTopology, IsSensible) {
  const CpuTopology t = cpu_topology();
  EXPECT_GE(t.physical, 1);
  EXPECT_GE(t.logical, t.physical);
}

}  // namespace
}  // namespace hearth
