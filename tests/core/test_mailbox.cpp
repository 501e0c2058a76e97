// Hand-offs between two threads, one in the place of a device.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/error.h"
#include "core/mailbox.h"
#include "core/thread_team.h"

namespace hearth {
namespace {

// The memory is not atomic: the two flags must order it.
TEST(Mailbox, EveryHandOffBringsItsOwnVectorListAndAnswer) {
  constexpr int kHandOffs = 5000, kN = 33, kMaxIds = 7;
  HostMailbox box(kN, kMaxIds);
  std::thread cpu([&box] {
    for (int i = 0; i < kHandOffs; ++i) {
      const MailboxRequest r = box.wait_request();
      const int n = *r.n_ids;
      EXPECT_EQ(n, i % (kMaxIds + 1));
      for (int k = 0; k < n; ++k) {
        EXPECT_EQ(r.ids[k], i + k);
        EXPECT_EQ(r.values[k], static_cast<float>(i - k));
      }
      for (int c = 0; c < kN; ++c) box.answer_buffer()[c] = 2 * r.x[c] + static_cast<float>(c);
      box.answer();
    }
  });
  std::vector<float> x(kN), values(kMaxIds);
  std::vector<int32_t> ids(kMaxIds);
  for (int i = 0; i < kHandOffs; ++i) {
    std::fill(x.begin(), x.end(), static_cast<float>(i));
    for (int k = 0; k < kMaxIds; ++k) {
      ids[static_cast<size_t>(k)] = i + k;
      values[static_cast<size_t>(k)] = static_cast<float>(i - k);
    }
    box.post(x.data(), kN, {ids.data(), static_cast<size_t>(i % (kMaxIds + 1))}, values.data());
    box.collect(x.data(), kN);
    for (int c = 0; c < kN; ++c) ASSERT_EQ(x[static_cast<size_t>(c)], static_cast<float>(3 * i + c));
  }
  cpu.join();
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
