// Hand-offs between two threads, one in the place of a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/mailbox.h"
#include "core/thread_team.h"

namespace hearth {
namespace {

// Hand-off i of a sequence: x[c] = i for each of 1 to kFewTokens tokens, and the neurons of each.
struct Sent {
  static constexpr int kN = 33, kMaxIds = 150;
  explicit Sent(int i) : T(i % kFewTokens + 1), x(static_cast<size_t>(T * kN), static_cast<float>(i)) {
    std::mt19937 rng(static_cast<uint32_t>(i));
    const auto n_own = static_cast<int32_t>(rng() % 100), skipped = n_own + static_cast<int32_t>(rng() % 40);
    marks = MailboxMarks::of(n_own + kMaxIds, n_own, skipped);
    ids.resize(static_cast<size_t>(T));
    for (auto& list : ids) {
      const auto density = rng() % 4;  // none, some, all
      for (int32_t id = skipped - n_own; id < kMaxIds; ++id) {
        if (density == 3 || (density > 0 && rng() % 8 == 0)) list.push_back(id);
      }
    }
  }
  void post_neurons(HostMailbox& box) const {
    for (int64_t t = 0; t < T; ++t) box.post_neurons(t, marks, ids[static_cast<size_t>(t)]);
  }
  void expect_neurons(const NeuronLists& lists) const {
    for (int64_t t = 0; t < T; ++t) {
      const int32_t* begin = lists.ids + t * lists.stride;
      EXPECT_EQ(std::vector<int32_t>(begin, begin + lists.count[t]), ids[static_cast<size_t>(t)]) << "token " << t;
    }
  }
  int64_t T;
  std::vector<float> x;  // [T][kN]
  MailboxMarks marks;
  std::vector<std::vector<int32_t>> ids;
};

// The memory is not atomic: the two flags must order it.
TEST(Mailbox, EveryHandOffBringsItsOwnVectorListsAndAnswer) {
  constexpr int kHandOffs = 5000;
  HostMailbox box(kFewTokens * Sent::kN, Sent::kMaxIds);
  std::thread cpu([&box] {
    for (int i = 0; i < kHandOffs; ++i) {
      const Sent s(i);
      const float* x = box.wait_input();
      s.expect_neurons(box.wait_neurons(s.T));
      for (size_t c = 0; c < s.x.size(); ++c) box.answer_buffer()[c] = 2 * x[c] + static_cast<float>(c);
      box.answer();
    }
  });
  for (int i = 0; i < kHandOffs; ++i) {
    Sent s(i);
    box.post_input(s.x.data(), std::ssize(s.x), s.marks);
    s.post_neurons(box);
    box.collect(s.x.data(), std::ssize(s.x));
    for (size_t c = 0; c < s.x.size(); ++c) ASSERT_EQ(s.x[c], static_cast<float>(3 * i) + static_cast<float>(c));
  }
  cpu.join();
}

// The same where several threads publish parts of the answer, in any order, and nobody waits for all of them but the
// device.
TEST(Mailbox, PublishedAnswers) {
  constexpr int kHandOffs = 3000, kParts = 3;
  constexpr int64_t kN = 100;
  const auto size = [](int i) { return kN * (i % kFewTokens + 1); };  // of 1 to kFewTokens tokens
  HostMailbox box(kN * kFewTokens, 0);
  std::atomic<int> begun = -1;
  std::array<std::atomic<int>, kParts> published{};
  std::vector<std::jthread> threads;
  for (int t = 0; t < kParts; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kHandOffs; ++i) {
        while (begun < i) std::this_thread::yield();
        const int64_t begin = t * size(i) / kParts, end = (t + 1) * size(i) / kParts;
        for (int64_t c = begin; c < end; ++c) box.answer_buffer()[c] = static_cast<float>(i + c);
        box.publish(begin, end);
        ++published[static_cast<size_t>(t)];
      }
    });
  }
  std::jthread cpu([&] {
    for (int i = 0; i < kHandOffs; ++i) {
      box.wait_input();
      begun = i;
      for (const auto& p : published) {
        while (p <= i) std::this_thread::yield();
      }
      box.answer();
    }
  });
  for (int i = 0; i < kHandOffs; ++i) {
    const int64_t n = size(i);
    std::vector<float> x(static_cast<size_t>(n), static_cast<float>(i));
    box.post(x.data(), n);
    // Where all of it is taken at once, a device may be a hand-off ahead of the one that is still being ended.
    i % 2 == 0 ? box.collect_published(x.data(), n) : box.collect(x.data(), n);
    for (int64_t c = 0; c < n; ++c) ASSERT_EQ(x[static_cast<size_t>(c)], static_cast<float>(2 * i + c)) << i;
  }
}

TEST(Mailbox, WaitingForWhatIsNotPublishedEnds) {
  HostMailbox box(2, 0);
  box.set_patience(std::chrono::milliseconds(20));
  float x[2] = {};
  box.post(x, 2);
  box.wait_input();
  box.publish(0, 1);
  EXPECT_THROW(box.collect_published(x, 2), Error);
  EXPECT_EQ(box.failure(), MailboxFailure::cpu_silent);
  EXPECT_FALSE(HostMailbox(MailboxLayout::kMostWords, 0).can_publish(MailboxLayout::kMostWords + 1));
}

// The CPU is told of neurons before a hand-off comes: of all, where the device told anything; never of another one's.
TEST(Mailbox, HintsOfTheNextHandOff) {
  constexpr int32_t kHandOffs = 4000, kFirst = 40, kSkipped = 50, kN = 200;
  const MailboxMarks marks = MailboxMarks::of(kN, kFirst, kSkipped);
  const auto ids_of = [](int32_t i) {
    std::mt19937 rng(static_cast<uint32_t>(i));
    std::vector<int32_t> ids;
    for (int32_t id = kSkipped - kFirst; id < kN - kFirst; ++id) {
      if (rng() % 4 == 0) ids.push_back(id);
    }
    return ids;
  };
  const auto told = [](int32_t i) { return i % 3 != 0; };
  HostMailbox box(1, kN);
  std::thread cpu([&] {
    for (int32_t i = 0; i < kHandOffs; ++i) {
      const auto hints = box.wait_hints(marks);
      if (told(i)) {
        ASSERT_EQ(std::vector<int32_t>(hints.begin(), hints.end()), ids_of(i)) << i;
      } else {
        ASSERT_TRUE(hints.empty() && box.has_next()) << i;
      }
      box.wait_input();
      box.answer();
    }
  });
  float x = 0;
  for (int32_t i = 0; i < kHandOffs; ++i) {
    if (told(i)) box.post_hints(marks, ids_of(i));
    box.post(&x, 1);
    box.collect(&x, 1);
  }
  cpu.join();
}

// The neurons of a hand-off in two steps are not there until they have been posted.
TEST(Mailbox, TellsWhetherTheNeuronsAreThere) {
  constexpr MailboxMarks kMarks = MailboxMarks::of(8, 0, 0);
  HostMailbox box(1, 8);
  float x = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(box.has_next());
    box.post_input(&x, 1, kMarks);
    EXPECT_TRUE(box.has_next());
    box.wait_input();
    EXPECT_FALSE(box.has_neurons());
    std::vector<int32_t> ids(static_cast<size_t>(i));
    std::iota(ids.begin(), ids.end(), 5);
    box.post_neurons(0, kMarks, ids);
    EXPECT_TRUE(box.has_neurons());
    EXPECT_EQ(box.wait_neurons(1).count[0], i);
    box.answer();
    box.collect(&x, 1);
  }
}

TEST(Mailbox, ADeviceThatStopsEndsTheWaitForItsHints) {
  HostMailbox box(1, 64);
  box.set_patience(std::chrono::milliseconds(50));
  EXPECT_THROW(box.wait_hints(MailboxMarks::of(64, 0, 0)), Error);
  EXPECT_EQ(box.failure(), MailboxFailure::device_silent);
}

// The vector is all there before anything is said of the neurons, and the answer's memory is the CPU's to write.
// Nothing else orders the two sides here: a thread sanitizer sees whether the flag does.
TEST(Mailbox, TheInputComesBeforeTheNeurons) {
  constexpr int kHandOffs = 3000;
  HostMailbox box(kFewTokens * Sent::kN, Sent::kMaxIds);
  std::atomic<int> n_prepared = 0;
  std::thread cpu([&] {
    for (int i = 0; i < kHandOffs; ++i) {
      const Sent s(i);
      const float* x = box.wait_input();
      std::fill_n(box.answer_buffer(), s.x.size(), 1.0f);
      std::vector<float> doubled(x, x + s.x.size());
      for (float& v : doubled) v *= 2;
      n_prepared = i + 1;
      if (i % 3 > 0) s.expect_neurons(box.wait_neurons(s.T));  // the others have none, and are not asked for them
      for (size_t c = 0; c < doubled.size(); ++c) box.answer_buffer()[c] += doubled[c];
      box.answer();
    }
  });
  for (int i = 0; i < kHandOffs; ++i) {
    Sent s(i);
    const int64_t n = std::ssize(s.x);
    switch (i % 3) {
      case 0:
        box.post(s.x.data(), n);
        break;
      case 1:
        box.post_input(s.x.data(), n, s.marks);
        s.post_neurons(box);
        break;
      default:
        box.post_input(s.x.data(), n, s.marks);
        while (n_prepared != i + 1) std::this_thread::yield();
        s.post_neurons(box);
        break;
    }
    box.collect(s.x.data(), n);
    for (size_t c = 0; c < s.x.size(); ++c) ASSERT_EQ(s.x[c], static_cast<float>(3 * i + 1)) << c;
  }
  cpu.join();
}

// In the place of a device whose blocks write words of marks as they find neurons.
class MarkingMailbox : public HostMailbox {
 public:
  using HostMailbox::HostMailbox;
  // Posts x [n] and each token's ids, of which none is below `first` nor above first + 32 n_words: half of the words
  // before the flag, half after it, in random order. `after_flag` is called between the two.
  void post_marked(
      const std::vector<float>& x, const std::vector<std::vector<int32_t>>& ids, MailboxMarks marks, std::mt19937& rng,
      FunctionRef<void()> after_flag = [] {}) {
    ++number_;
    std::copy(x.begin(), x.end(), request_);
    const auto n_words = static_cast<size_t>(marks.n_words);
    std::vector<uint64_t> words(ids.size() * n_words, number_);
    for (size_t t = 0; t < ids.size(); ++t) {
      for (const int32_t id : ids[t]) {
        const int32_t at = id - marks.first;
        words[t * n_words + static_cast<size_t>(at / 32)] |= uint64_t{1} << (32 + at % 32);
      }
    }
    std::vector<size_t> order(words.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    const auto stride = static_cast<size_t>(MailboxLayout::mark_words(max_ids()));  // of a token
    const auto put = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        marks_[order[i] / n_words * stride + order[i] % n_words].store(words[order[i]], std::memory_order_relaxed);
      }
    };
    put(0, order.size() / 2);
    raise(marks);
    after_flag();
    put(order.size() / 2, order.size());
  }
  // The flag alone.
  void announce(MailboxMarks marks) {
    ++number_;
    raise(marks);
  }
  void wait_answer() const {
    while (flags_->answered.value.load(std::memory_order_acquire) != number_) std::this_thread::yield();
  }

 private:
  void raise(MailboxMarks marks) {
    flags_->posted.value.store(uint64_t{marks.packed()} << 32 | number_, std::memory_order_release);
  }
  uint32_t number_ = 0;
};

TEST(Mailbox, MarksComeInAnyOrder) {
  constexpr int kHandOffs = 3000, kMaxIds = 500;
  MarkingMailbox box(3, kMaxIds);
  std::mt19937 rng(4);
  struct HandOff {
    MailboxMarks marks;
    std::vector<std::vector<int32_t>> ids;  // by token
  };
  std::vector<HandOff> all(kHandOffs);
  for (HandOff& h : all) {
    h.marks.first = static_cast<int32_t>(rng() % 100) - 31;
    h.marks.n_words = static_cast<int32_t>(rng() % (kMaxIds / 32 + 3));
    h.ids.resize(rng() % kFewTokens + 1);
    for (auto& ids : h.ids) {
      const auto density = rng() % 3;  // none, some, all
      for (int32_t id = std::max(h.marks.first, 0); id < h.marks.first + 32 * h.marks.n_words; ++id) {
        if (ids.size() < kMaxIds && (density == 2 || (density == 1 && rng() % 8 == 0))) ids.push_back(id);
      }
    }
  }
  std::atomic<int> n_inputs = 0;
  std::thread cpu([&] {
    for (int i = 0; i < kHandOffs; ++i) {
      const float* x = box.wait_input();
      EXPECT_EQ(x[2], static_cast<float>(i));
      n_inputs = i + 1;
      const auto& ids = all[static_cast<size_t>(i)].ids;
      const NeuronLists lists = box.wait_neurons(std::ssize(ids));
      for (size_t t = 0; t < ids.size(); ++t) {
        const int32_t* begin = lists.ids + static_cast<int64_t>(t) * lists.stride;
        EXPECT_EQ(std::vector<int32_t>(begin, begin + lists.count[t]), ids[t]) << i << ", token " << t;
      }
      EXPECT_EQ(x[2], static_cast<float>(i));
      box.answer();
    }
  });
  for (int i = 0; i < kHandOffs; ++i) {
    const HandOff& h = all[static_cast<size_t>(i)];
    // The flag alone says that the vector is there; in every other hand-off, words come only then.
    const auto when_seen = [&] {
      while (i % 2 == 0 && n_inputs != i + 1) std::this_thread::yield();
    };
    box.post_marked(std::vector<float>(3, static_cast<float>(i)), h.ids, h.marks, rng, when_seen);
    box.wait_answer();
  }
  cpu.join();
}

TEST(Mailbox, MarksThatNeverComeAreAnError) {
  std::mt19937 rng(5);
  for (const bool one_token_has_them : {false, true}) {
    MarkingMailbox box(1, 64);
    box.set_patience(std::chrono::milliseconds{50});
    box.post_marked({1.0f}, {{3}, {3}}, {0, 2}, rng);
    box.wait_input();
    box.wait_neurons(2);
    box.answer();
    if (one_token_has_them) {
      box.post_marked({1.0f}, {{7}}, {0, 2}, rng);
    } else {
      box.announce({0, 2});  // the words that are there are the last hand-off's
    }
    EXPECT_NO_THROW(box.wait_input());
    if (one_token_has_them) {
      EXPECT_EQ(box.wait_neurons(1).ids[0], 7);
    }
    EXPECT_THROW(box.wait_neurons(2), Error);
    EXPECT_EQ(box.failure(), MailboxFailure::device_silent);
  }
}

std::string error_of(FunctionRef<void()> work) {
  try {
    work();
  } catch (const Error& e) {
    return e.what();
  }
  return "none";
}

TEST(Mailbox, NeitherSideWaitsForOneThatIsGone) {
  HostMailbox box(1, 1);
  float x = 1;
  box.post(&x, 1);
  EXPECT_FALSE(box.failed());
  EXPECT_NO_THROW(box.check());
  box.wait_input();
  box.abandon();
  EXPECT_TRUE(box.failed());
  EXPECT_THROW(box.collect(&x, 1), MailboxAbandoned);
  EXPECT_THROW(box.wait_input(), MailboxAbandoned);
}

TEST(Mailbox, AListThatNeverComesIsAnError) {
  const float x = 1;
  for (const bool abandoned : {false, true}) {
    HostMailbox box(1, 1);
    box.set_patience(std::chrono::milliseconds{50});
    box.post_input(&x, 1, MailboxMarks::of(1, 0, 0));
    EXPECT_EQ(*box.wait_input(), 1);
    if (abandoned) {
      box.abandon();
      EXPECT_THROW(box.wait_neurons(1), MailboxAbandoned);
    } else {
      EXPECT_EQ(error_of([&] { box.wait_neurons(1); }),
                "the device has not asked for its next layer in 0.05 s; it may have stopped");
      EXPECT_EQ(box.failure(), MailboxFailure::device_silent);
    }
    EXPECT_THROW(box.wait_input(), Error);
  }
}

TEST(Mailbox, SilenceIsAnErrorAfterTheStatedTime) {
  constexpr std::chrono::milliseconds kPatience{50};
  for (const bool cpu_is_silent : {true, false}) {
    HostMailbox box(1, 1);
    EXPECT_EQ(box.patience(), Mailbox::kPatience);
    box.set_patience(kPatience);
    float x = 1;
    const auto begin = std::chrono::steady_clock::now();
    std::string error;
    if (cpu_is_silent) {
      box.post(&x, 1);
      error = error_of([&] { box.collect(&x, 1); });
      EXPECT_EQ(error, "the CPU has not answered a layer in 0.05 s; it may have stopped");
      EXPECT_EQ(box.failure(), MailboxFailure::cpu_silent);
      EXPECT_EQ(x, 1) << "an answer that never came was added";
    } else {
      error = error_of([&] { box.wait_input(); });
      EXPECT_EQ(error, "the device has not asked for its next layer in 0.05 s; it may have stopped");
      EXPECT_EQ(box.failure(), MailboxFailure::device_silent);
    }
    const auto waited = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(waited, kPatience);
    EXPECT_LT(waited, std::chrono::seconds{10});
    // The other side, coming late, is told the same, whatever it does.
    EXPECT_EQ(error_of([&] { cpu_is_silent ? (void)(box.wait_input(), box.wait_input()) : box.collect(&x, 1); }),
              cpu_is_silent ? error : "none");
    EXPECT_EQ(error_of([&] { box.check(); }), error);
    box.abandon();
    EXPECT_EQ(error_of([&] { box.check(); }), error) << "the first reason stays";
  }
}

}  // namespace
}  // namespace hearth
