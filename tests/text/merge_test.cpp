// The merging queue: its effort is counted, and its result compared with the plainest possible loop.
#include "text/merge.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "builders.h"
#include "support/random.h"

namespace hearth::text {
namespace {

// Merges runs of one letter into powers of two up to 2^20: the most merges that a word of n letters allows.
bool double_up(const Symbol& left, const Symbol& right, MergeTo& merge) {
  if (left.id != right.id || left.id >= 20) return false;
  merge = {static_cast<uint32_t>(left.id), left.id + 1};
  return true;
}

TEST(Merger, EffortIsProportionalToTheLength) {
  for (const uint32_t n : {1000u, 100'000u, 1'000'000u}) {
    Merger merger;
    for (uint32_t i = 0; i < n; ++i) merger.add(i, 1, 0);
    merger.run(double_up);
    // Each of at most n - 1 merges proposes at most two new ones, after n - 1 at the start.
    EXPECT_LE(merger.work(), 3u * n);
    EXPECT_GE(merger.work(), n - 1);
    uint32_t length = 0;
    merger.for_each([&](const Symbol& symbol) { length += symbol.length; });
    EXPECT_EQ(length, n);
  }
}

// Looks through the whole word for the best pair, again and again.
std::vector<int32_t> merge_plainly(std::vector<int32_t> ids, const std::vector<std::array<int32_t, 3>>& merges) {
  while (true) {
    size_t best_rank = merges.size(), best_at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank][0] == ids[i] && merges[rank][1] == ids[i + 1]) {
          best_rank = rank;
          best_at = i;
        }
      }
    }
    if (best_rank == merges.size()) return ids;
    ids[best_at] = merges[best_rank][2];
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(best_at) + 1);
  }
}

TEST(Merger, EqualToThePlainLoopOnRandomMerges) {
  std::mt19937 rng(21);
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(round);
    std::vector<std::array<int32_t, 3>> merges;
    for (int32_t id = 3; id < 15; ++id) {
      merges.push_back({static_cast<int32_t>(test::random_int(rng, 0, id - 1)),
                        static_cast<int32_t>(test::random_int(rng, 0, id - 1)), id});
    }
    PairTable table(merges.size());
    for (uint32_t rank = 0; rank < merges.size(); ++rank) table.insert(merges[rank][0], merges[rank][1], rank);
    std::vector<int32_t> word;
    Merger merger;
    for (uint32_t i = 0; i < 60; ++i) {
      word.push_back(static_cast<int32_t>(test::random_int(rng, 0, 2)));
      merger.add(i, 1, word.back());
    }
    merger.run([&](const Symbol& left, const Symbol& right, MergeTo& merge) {
      if (!table.find(left.id, right.id, merge.priority)) return false;
      merge.id = merges[merge.priority][2];
      return true;
    });
    std::vector<int32_t> merged;
    merger.for_each([&](const Symbol& symbol) { merged.push_back(symbol.id); });
    EXPECT_EQ(merged, merge_plainly(word, merges));
  }
}

TEST(PairTable, FindsWhatWasInsertedAndNothingElse) {
  PairTable table(1000);
  for (int32_t i = 0; i < 1000; ++i) table.insert(i, i * 7 % 1000, static_cast<uint32_t>(i));
  table.insert(5, 35, 999);  // known already: the first rank stays
  for (int32_t i = 0; i < 1000; ++i) {
    uint32_t rank = 0;
    ASSERT_TRUE(table.find(i, i * 7 % 1000, rank));
    EXPECT_EQ(rank, static_cast<uint32_t>(i));
    EXPECT_FALSE(table.find(i, 1000 + i, rank));
  }
}

TEST(ByteAlphabet, MapsEveryByteToAPrintableCharacterAndBack) {
  std::string all;
  for (int b = 0; b < 256; ++b) all.push_back(static_cast<char>(b));
  const std::string encoded = byte_level_encode(all);
  EXPECT_EQ(byte_level_decode(encoded), all);
  EXPECT_EQ(byte_level_encode(" "), "Ġ");
  EXPECT_EQ(byte_level_encode("\n"), "Ċ");
  EXPECT_EQ(encoded.find(' '), std::string::npos);
  EXPECT_EQ(byte_level_decode("漢a"), "漢a") << "characters outside the alphabet stand for themselves";
}

}  // namespace
}  // namespace hearth::text
