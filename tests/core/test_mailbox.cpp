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

// The memory is not atomic: the two flags must order it.
// Hand-off i of a sequence: x[c] = i, and i % 8 neurons i + k with values i - k.
struct Sent {
  static constexpr int kN = 33, kMaxIds = 7;
  explicit Sent(int i) : x(kN, static_cast<float>(i)) {
    for (int k = 0; k < i % (kMaxIds + 1); ++k) ids.push_back(i + k), values.push_back(static_cast<float>(i - k));
  }
  void expect_neurons(const MailboxRequest& r) const {
    ASSERT_EQ(*r.n_ids, std::ssize(ids));
    for (size_t k = 0; k < ids.size(); ++k) {
      EXPECT_EQ(r.ids[k], ids[k]);
      EXPECT_EQ(r.values[k], values[k]);
    }
  }
  std::vector<float> x, values;
  std::vector<int32_t> ids;
};

TEST(Mailbox, EveryHandOffBringsItsOwnVectorListAndAnswer) {
  constexpr int kHandOffs = 5000;
  HostMailbox box(Sent::kN, Sent::kMaxIds);
  std::thread cpu([&box] {
    for (int i = 0; i < kHandOffs; ++i) {
      const MailboxRequest r = box.wait_request();
      Sent(i).expect_neurons(r);
      for (int c = 0; c < Sent::kN; ++c) box.answer_buffer()[c] = 2 * r.x[c] + static_cast<float>(c);
      box.answer();
    }
  });
  for (int i = 0; i < kHandOffs; ++i) {
    Sent s(i);
    box.post(s.x.data(), Sent::kN, s.ids, s.values.data());
    box.collect(s.x.data(), Sent::kN);
    for (int c = 0; c < Sent::kN; ++c) ASSERT_EQ(s.x[static_cast<size_t>(c)], static_cast<float>(3 * i + c));
  }
  cpu.join();
}

// The same where several threads publish parts of the answer, in any order, and nobody waits for all of them but the
// device.
TEST(Mailbox, PublishedAnswers) {
  constexpr int kHandOffs = 3000, kParts = 3;
  constexpr int64_t kN = 100;
  HostMailbox box(kN, 0);
  std::atomic<int> begun = -1;
  std::array<std::atomic<int>, kParts> published{};
  std::vector<std::jthread> threads;
  for (int t = 0; t < kParts; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kHandOffs; ++i) {
        while (begun < i) std::this_thread::yield();
        const int64_t begin = t * kN / kParts, end = (t + 1) * kN / kParts;
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
    std::vector<float> x(kN, static_cast<float>(i));
    box.post(x.data(), kN);
    // Where all of it is taken at once, a device may be a hand-off ahead of the one that is still being ended.
    i % 2 == 0 ? box.collect_published(x.data(), kN) : box.collect(x.data(), kN);
    for (int64_t c = 0; c < kN; ++c) ASSERT_EQ(x[static_cast<size_t>(c)], static_cast<float>(2 * i + c)) << i;
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

// What the CPU is told before a hand-off comes: all of it, where the device told anything; never another one's.
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

// Of a hand-off in two steps, the neurons are not there until they have been posted.
TEST(Mailbox, TellsWhetherTheNeuronsAreThere) {
  HostMailbox box(1, 8);
  float x = 0;
  for (int i = 0; i < 3; ++i) {
    box.post_input(&x, 1);
    box.wait_input();
    EXPECT_FALSE(box.has_neurons());
    const std::vector<int32_t> ids(static_cast<size_t>(i), 5);
    box.post_neurons(ids);
    EXPECT_TRUE(box.has_neurons());
    EXPECT_EQ(*box.wait_neurons().n_ids, i);
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
  constexpr int kHandOffs = 3000, kN = Sent::kN;
  HostMailbox box(kN, Sent::kMaxIds);
  std::atomic<int> n_prepared = 0;
  std::thread cpu([&] {
    std::vector<float> doubled(kN);
    for (int i = 0; i < kHandOffs; ++i) {
      const float* x = box.wait_input();
      std::fill_n(box.answer_buffer(), kN, 1.0f);
      for (size_t c = 0; c < kN; ++c) doubled[c] = 2 * x[c];
      n_prepared = i + 1;
      if (i % 3 > 0) {  // the others have no neurons, and are not asked for them
        const MailboxRequest r = box.wait_neurons();
        EXPECT_EQ(r.x, x);
        Sent(i).expect_neurons(r);
      }
      for (size_t c = 0; c < kN; ++c) box.answer_buffer()[c] += doubled[c];
      box.answer();
    }
  });
  for (int i = 0; i < kHandOffs; ++i) {
    Sent s(i);
    switch (i % 3) {
      case 0:
        box.post(s.x.data(), kN);
        break;
      case 1:
        box.post(s.x.data(), kN, s.ids, s.values.data());
        break;
      default:
        box.post_input(s.x.data(), kN);
        while (n_prepared != i + 1) std::this_thread::yield();
        box.post_neurons(s.ids, s.values.data());
        break;
    }
    box.collect(s.x.data(), kN);
    for (int c = 0; c < kN; ++c) ASSERT_EQ(s.x[static_cast<size_t>(c)], static_cast<float>(3 * i + 1)) << c;
  }
  cpu.join();
}

// In the place of a device that tells of neurons by marks.
class MarkingMailbox : public HostMailbox {
 public:
  using HostMailbox::HostMailbox;
  // Posts x [n] and the ids, of which none is below `first` nor above first + 32 n_words: half of the words before the
  // flag, half after it, in random order. `after_flag` is called between the two.
  void post_marked(
      const std::vector<float>& x, const std::vector<int32_t>& ids, MailboxMarks marks, std::mt19937& rng,
      FunctionRef<void()> after_flag = [] {}) {
    ++number_;
    std::copy(x.begin(), x.end(), request_);
    std::vector<uint64_t> words(static_cast<size_t>(marks.n_words), number_);
    for (const int32_t id : ids) {
      const int32_t at = id - marks.first;
      words[static_cast<size_t>(at / 32)] |= uint64_t{1} << (32 + at % 32);
    }
    std::vector<size_t> order(words.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    const auto put = [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) marks_[order[i]].store(words[order[i]], std::memory_order_relaxed);
    };
    put(0, order.size() / 2);
    raise(marks);
    after_flag();
    put(order.size() / 2, order.size());
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

TEST(Mailbox, NeuronsAsMarksComeInAnyOrder) {
  constexpr int kHandOffs = 3000, kMaxIds = 500;
  MarkingMailbox box(3, kMaxIds);
  std::mt19937 rng(4);
  struct HandOff {
    MailboxMarks marks;
    std::vector<int32_t> ids;
  };
  std::vector<HandOff> all(kHandOffs);
  for (HandOff& h : all) {
    h.marks.first = static_cast<int32_t>(rng() % 100) - 31;
    h.marks.n_words = static_cast<int32_t>(rng() % (kMaxIds / 32 + 3));
    const auto density = rng() % 3;  // none, some, all
    for (int32_t id = std::max(h.marks.first, 0); id < h.marks.first + 32 * h.marks.n_words; ++id) {
      if (h.ids.size() < kMaxIds && (density == 2 || (density == 1 && rng() % 8 == 0))) h.ids.push_back(id);
    }
  }
  std::atomic<int> n_inputs = 0;
  std::thread cpu([&] {
    for (int i = 0; i < kHandOffs; ++i) {
      EXPECT_EQ(box.wait_input()[2], static_cast<float>(i));
      n_inputs = i + 1;
      const MailboxRequest r = box.wait_neurons();
      EXPECT_EQ(std::vector<int32_t>(r.ids, r.ids + *r.n_ids), all[static_cast<size_t>(i)].ids) << i;
      EXPECT_EQ(r.x[2], static_cast<float>(i));
      box.answer();
    }
  });
  for (int i = 0; i < kHandOffs; ++i) {
    const HandOff& h = all[static_cast<size_t>(i)];
    // The flag alone says that the vector is there; of half of the hand-offs, words come only then.
    const auto when_seen = [&] {
      while (i % 2 == 0 && n_inputs != i + 1) std::this_thread::yield();
    };
    box.post_marked(std::vector<float>(3, static_cast<float>(i)), h.ids, h.marks, rng, when_seen);
    box.wait_answer();
  }
  cpu.join();
}

TEST(Mailbox, MarksThatNeverComeAreAnError) {
  MarkingMailbox box(1, 64);
  box.set_patience(std::chrono::milliseconds{50});
  std::mt19937 rng(5);
  box.post_marked({1.0f}, {}, {0, 0}, rng);
  box.wait_request();
  box.answer();
  // A flag that announces two words, of which only stale ones are there.
  class Announcing : public MarkingMailbox {
   public:
    using MarkingMailbox::MarkingMailbox;
    void announce() { flags_->posted.value.store(uint64_t{MailboxMarks{0, 2}.packed()} << 32 | 1); }
  } silent(1, 64);
  silent.set_patience(std::chrono::milliseconds{50});
  silent.announce();
  EXPECT_NO_THROW(silent.wait_input());
  EXPECT_THROW(silent.wait_neurons(), Error);
  EXPECT_EQ(silent.failure(), MailboxFailure::device_silent);
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
  box.wait_request();
  box.abandon();
  EXPECT_TRUE(box.failed());
  EXPECT_THROW(box.collect(&x, 1), MailboxAbandoned);
  EXPECT_THROW(box.wait_request(), MailboxAbandoned);
}

TEST(Mailbox, AListThatNeverComesIsAnError) {
  const float x = 1;
  for (const bool abandoned : {false, true}) {
    HostMailbox box(1, 1);
    box.set_patience(std::chrono::milliseconds{50});
    box.post_input(&x, 1);
    EXPECT_EQ(*box.wait_input(), 1);
    if (abandoned) {
      box.abandon();
      EXPECT_THROW(box.wait_neurons(), MailboxAbandoned);
    } else {
      EXPECT_EQ(error_of([&] { box.wait_neurons(); }),
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
      error = error_of([&] { box.wait_request(); });
      EXPECT_EQ(error, "the device has not asked for its next layer in 0.05 s; it may have stopped");
      EXPECT_EQ(box.failure(), MailboxFailure::device_silent);
    }
    const auto waited = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(waited, kPatience);
    EXPECT_LT(waited, std::chrono::seconds{10});
    // The other side, coming late, is told the same, whatever it does.
    EXPECT_EQ(error_of([&] { cpu_is_silent ? (void)(box.wait_request(), box.wait_request()) : box.collect(&x, 1); }),
              cpu_is_silent ? error : "none");
    EXPECT_EQ(error_of([&] { box.check(); }), error);
    box.abandon();
    EXPECT_EQ(error_of([&] { box.check(); }), error) << "the first reason stays";
  }
}

}  // namespace
}  // namespace hearth
