// Which of the CPU's experts visit the main device.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "engine/share_out.h"
#include "support/random.h"

namespace hearth::engine {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<size_t> ids(const std::vector<bool>& visits) {
  std::vector<size_t> all;
  for (size_t i = 0; i < visits.size(); ++i) {
    if (visits[i]) all.push_back(i);
  }
  return all;
}

double cpu_seconds(const ExpertWork& e, const ShareRates& r) {
  return e.tokens > 0 ? std::max(r.cpu_byte * e.bytes, r.cpu_product * e.weights * e.tokens) : 0;
}

// Of random experts, of one size or of several; some are not chosen.
std::vector<ExpertWork> random_work(std::mt19937& rng, bool one_size) {
  std::vector<ExpertWork> work(static_cast<size_t>(test::random_int(rng, 0, 11)));
  for (ExpertWork& e : work) {
    const auto size = static_cast<double>(one_size ? 4 : test::random_int(rng, 1, 9));
    e = {static_cast<double>(std::max<int64_t>(0, test::random_int(rng, -2, 12))), size, 2 * size};
  }
  return work;
}

TEST(ShareOut, NothingChosenVisitsNobody) {
  EXPECT_TRUE(share_out({}, {}).visits.empty());
  const ExpertWork unused[] = {{0, 5, 5}, {0, 7, 7}};
  const Shares s = share_out(unused, {0, 0, 1, 1});
  EXPECT_EQ(s.visits, std::vector<bool>(2));
  EXPECT_EQ(s.seconds(), 0);
}

TEST(ShareOut, EitherSideCanHaveAll) {
  const ExpertWork work[] = {{3, 10, 20}, {0, 10, 20}, {1, 10, 20}};
  const Shares all = share_out(work, {0, 0, 1, 1});
  EXPECT_EQ(all.visits, (std::vector<bool>{true, false, true}));
  EXPECT_EQ(all.cpu_seconds, 0);
  const Shares none = share_out(work, {kInfinity, 0, 1, 1});
  EXPECT_EQ(none.visits, std::vector<bool>(3));
  EXPECT_EQ(none.link_seconds, 0);
  EXPECT_EQ(none.cpu_seconds, 3 * 20 + 20);
}

TEST(ShareOut, OfEqualsTheSmallerIdVisits) {
  const std::vector<ExpertWork> work(5, {2, 8, 8});
  EXPECT_EQ(ids(share_out(work, {0, 1, 1, 0}).visits), (std::vector<size_t>{0, 1}));
  EXPECT_EQ(ids(share_out(work, {7, 1, 1, 0}).visits), (std::vector<size_t>{0, 1}));
  EXPECT_EQ(ids(share_out(work, {24, 1, 1, 0}).visits), (std::vector<size_t>{0}));
  EXPECT_TRUE(ids(share_out(work, {32, 1, 1, 0}).visits).empty()) << "as long as without";
}

TEST(ShareOut, TheMostTokensVisit) {
  const ExpertWork work[] = {{1, 8, 8}, {9, 8, 8}, {5, 8, 8}, {0, 8, 8}, {7, 8, 8}};
  EXPECT_EQ(ids(share_out(work, {0, 5, 0, 1}).visits), (std::vector<size_t>{1, 4}));
}

// Of experts of one size no other set is done sooner; of others each visitor has shortened the longer side.
TEST(ShareOut, NoOtherSetIsDoneSooner) {
  std::mt19937 rng(11);
  int shared = 0;
  for (int round = 0; round < 500; ++round) {
    const bool one_size = round % 2 == 0;
    const std::vector<ExpertWork> work = random_work(rng, one_size);
    const auto rate = [&](int most) { return static_cast<double>(test::random_int(rng, 0, most)) / 4; };
    const ShareRates rates{rate(40), rate(20), rate(8), rate(4)};
    const Shares s = share_out(work, rates);
    double link = 0, cpu = 0, alone = 0;
    for (size_t i = 0; i < work.size(); ++i) {
      const double seconds = cpu_seconds(work[i], rates);
      alone += seconds;
      if (s.visits[i]) link += rates.link_byte * work[i].bytes + (link == 0 ? rates.first_visit : 0);
      if (!s.visits[i]) cpu += seconds;
      EXPECT_FALSE(s.visits[i] && work[i].tokens == 0);
    }
    EXPECT_NEAR(s.link_seconds, link, 1e-9 + rates.first_visit * (link == 0 ? 1 : 1e-9));
    EXPECT_NEAR(s.cpu_seconds, cpu, 1e-9);
    EXPECT_LE(s.seconds(), alone);
    shared += !ids(s.visits).empty() && s.cpu_seconds > 0 ? 1 : 0;
    if (!one_size) continue;
    for (size_t set = 0; set < size_t{1} << work.size(); ++set) {
      double all_link = set != 0 ? rates.first_visit : 0, all_cpu = 0;
      for (size_t i = 0; i < work.size(); ++i) {
        if ((set >> i & 1) != 0) {
          all_link += rates.link_byte * work[i].bytes;
        } else {
          all_cpu += cpu_seconds(work[i], rates);
        }
      }
      EXPECT_GE(std::max(all_link, all_cpu), s.seconds() - 1e-9);
    }
  }
  EXPECT_GT(shared, 100);
}

// A faster link brings no fewer, a faster CPU leaves no fewer; with more tokens everywhere no fewer visit.
TEST(ShareOut, FollowsTheRates) {
  std::mt19937 rng(5);
  for (int round = 0; round < 300; ++round) {
    const std::vector<ExpertWork> work = random_work(rng, false);
    const ShareRates rates{1, 2, 1, 0.5};
    const size_t n = ids(share_out(work, rates).visits).size();
    EXPECT_GE(ids(share_out(work, {1, 1, 1, 0.5}).visits).size(), n);
    EXPECT_LE(ids(share_out(work, {1, 2, 0.5, 0.25}).visits).size(), n);
    std::vector<ExpertWork> more = work;
    for (ExpertWork& e : more) e.tokens *= 3;
    EXPECT_GE(ids(share_out(more, rates).visits).size(), n);
  }
}

// Counted from a batch's choice, of the experts that the CPU has.
TEST(ShareOut, VisitorsAreOfTheChoice) {
  const float weights[1] = {};
  const auto expert = [&](int64_t n_ff) {
    Expert e;
    e.ffn.gate = e.ffn.up = {DType::f32, n_ff, 16, weights}, e.ffn.down = {DType::f32, 16, n_ff, weights};
    return e;
  };
  // Expert 1 is the main device's; the shared one, 5, is larger.
  const std::vector<Expert> host = {expert(8), {}, expert(8), expert(8), expert(8), expert(24)};
  const std::vector<int32_t> choice = {0, 1, 5, 1, 2, 5, 2, 3, 5, 1, 2, 5};
  const double bytes = 3 * 8 * 16 * 4, number = bytes / 4;
  for (const ShareRates& rates : {ShareRates{0, 1, 0, 3}, ShareRates{0, 0, 1, 1}, ShareRates{kInfinity, 1, 1, 1}}) {
    const std::vector<ExpertWork> work = {{1, bytes, number}, {0, 0, 0}, {3, bytes, number},
                                          {1, bytes, number}, {0, 0, 0}, {4, 3 * bytes, 3 * number}};
    EXPECT_EQ(visitors(host, choice, rates), share_out(work, rates).visits);
  }
  // 3 for each weight that comes and 1 for each product: 4 * 3 / 4 of the shared one's bytes against 12 + 5 of all.
  EXPECT_EQ(ids(visitors(host, choice, {0, 0.75, 0, 1})), (std::vector<size_t>{5}));
  EXPECT_EQ(ids(visitors(host, choice, {0, 0, 1, 1})), (std::vector<size_t>{0, 2, 3, 5}));
  EXPECT_TRUE(ids(visitors(host, choice, {kInfinity, 0, 1, 1})).empty());
  EXPECT_TRUE(ids(visitors(host, {}, {0, 0, 1, 1})).empty());
}

}  // namespace
}  // namespace hearth::engine
