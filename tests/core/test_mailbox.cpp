// Hand-offs between two threads, one in the place of a device.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/error.h"
#include "core/mailbox.h"

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

TEST(Mailbox, NeitherSideWaitsForOneThatIsGone) {
  HostMailbox box(1, 1);
  float x = 1;
  box.post(&x, 1);
  EXPECT_FALSE(box.failed());
  box.wait_request();
  box.abandon();
  EXPECT_TRUE(box.failed());
  EXPECT_THROW(box.collect(&x, 1), Error);
  EXPECT_THROW(box.wait_request(), Error);
}

}  // namespace
}  // namespace hearth
