// What needs no GPU: launch plans, memory layouts, and the behaviour without one.
#include "cuda/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "core/error.h"
#include "cuda/cuda.h"
#include "support/random.h"

namespace hearth::cuda {
namespace {

TEST(AttentionPlan, PiecesCoverTheContextOnceWithinTheGrid) {
  std::mt19937 rng(1);
  for (int i = 0; i < 2000; ++i) {
    const int64_t heads = test::random_int(rng, 1, 128), blocks = test::random_int(rng, 1, 400);
    const int64_t n = test::random_int(rng, 1, 200000), bound = n + test::random_int(rng, 0, 100000);
    const int64_t window = i % 3 == 0 ? test::random_int(rng, 1, 5000) : 0;
    const int64_t first = window > 0 ? std::max<int64_t>(0, n - window) : 0;
    const int64_t n_pages = (n - 1) / kPagePositions + 1 - first / kPagePositions;
    const int64_t splits = attention_max_splits(heads, blocks);
    ASSERT_TRUE(splits >= 1 && splits <= 128);
    const int64_t pages = attention_split_pages(n_pages, splits), used = ceil_div(n_pages, pages);
    EXPECT_GE(pages * used, n_pages);
    EXPECT_LT(pages * (used - 1), n_pages);
    EXPECT_LE(used, attention_grid_splits(bound, window, splits))
        << "n " << n << " bound " << bound << " window " << window << " splits " << splits;
  }
}

TEST(DownPlan, TilesCoverTheColumnsAndSplitsHaveEnoughRows) {
  for (const int64_t columns : {128, 256}) {
    for (const int64_t n_embd : {32, 512, 4096, 5120, 8192}) {
      for (const int64_t n_ff : {1, 63, 2048, 11008}) {
        const DownPlan p = down_plan(n_embd, columns, n_ff, 32, 264);
        EXPECT_GE(p.tiles * columns, n_embd);
        EXPECT_LT((p.tiles - 1) * columns, n_embd);
        EXPECT_TRUE(p.splits >= 1 && p.splits <= kMaxDownSplits);
        EXPECT_TRUE(p.splits == 1 || p.tiles * p.splits <= 264) << "all blocks run at once";
        EXPECT_TRUE(p.splits == 1 || n_ff > 32 * (p.splits - 1)) << "every split has work";
      }
    }
  }
}

TEST(MatvecShape, FillsTheGpu) {
  EXPECT_EQ(matvec_shape(512, 512, 132), MatvecShape::few_rows);
  EXPECT_EQ(matvec_shape(4096, 4096, 132), MatvecShape::two_rows_a_warp);
  EXPECT_EQ(matvec_shape(5120, 5120, 132), MatvecShape::two_blocks) << "160 blocks, at the same time";
  EXPECT_EQ(matvec_shape(12288, 4096, 132), MatvecShape::four_rows_a_warp);
  EXPECT_EQ(matvec_shape(32000, 3, 132), MatvecShape::two_blocks) << "a matrix of three rows has no four for a warp";
  EXPECT_EQ(matvec_shape(32000, 1, 132), MatvecShape::few_rows) << "nor has one of one row two";
}

TEST(SlabRows, FitTheScratchInWholeTiles) {
  EXPECT_EQ(slab_rows(4096, 32 << 20), 4096);
  EXPECT_EQ(slab_rows(11008, 32 << 20) % 128, 0);
  EXPECT_LE(slab_rows(11008, 32 << 20) * 11008 * 2, 32 << 20);
  EXPECT_EQ(slab_rows(1 << 20, 32 << 20), 16);
  EXPECT_EQ(slab_rows(64 << 20, 32 << 20), 1);  // one row is the least there can be
}

TEST(AdoptedLayout, AlignsScalesAndCountsEveryByte) {
  const AdoptedLayout f16 = adopted_layout(DType::f16, 3, 5);
  EXPECT_EQ(f16.data_bytes, 30u);
  EXPECT_EQ(f16.total_bytes, 256u);
  const AdoptedLayout q4 = adopted_layout(DType::q4_0, 7, 96);  // 21 blocks
  EXPECT_EQ(q4.data_bytes, 21u * 16);
  EXPECT_EQ(q4.scales_offset, 512u);
  EXPECT_EQ(q4.total_bytes, 768u);
  const AdoptedLayout q8 = adopted_layout(DType::q8_0, 4096, 4096);
  EXPECT_EQ(q8.total_bytes, size_t{4096} * 4096 + size_t{4096} * 128 * 2);
}

template <typename Block>
void expect_split(DType type) {
  std::mt19937 rng(2);
  std::vector<Block> blocks(37);
  for (Block& b : blocks) {
    b.d = static_cast<f16_t>(rng());
    for (auto& q : b.qs) q = static_cast<std::remove_reference_t<decltype(q)>>(rng());
  }
  std::vector<std::byte> quants(blocks.size() * sizeof(Block::qs));
  std::vector<f16_t> scales(blocks.size());
  split_blocks(type, blocks.data(), static_cast<int64_t>(blocks.size()), quants.data(), scales.data());
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_EQ(scales[i], blocks[i].d);
    EXPECT_EQ(std::memcmp(&quants[i * sizeof(Block::qs)], blocks[i].qs, sizeof(Block::qs)), 0);
  }
}
TEST(SplitBlocks, KeepsQuantsAndScalesInOrder) {
  expect_split<BlockQ8_0>(DType::q8_0);
  expect_split<BlockQ4_0>(DType::q4_0);
}

TEST(Q8Rows, AreWholeSixteenByteUnits) {
  for (const int64_t n : {1, 31, 32, 33, 96, 4096, 11008}) {
    EXPECT_EQ(q8_row_bytes(n) % 16, 0);
    EXPECT_GE(q8_row_bytes(n), round_up(n, 32) + ceil_div(n, 32) * 8);
  }
}

TEST(NoGpu, IsSaidOnceWithTheReason) {
  std::string why;
  if (!list_gpus(&why).empty()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_FALSE(why.empty());
  EXPECT_THROW(make_device(0), Error);
  EXPECT_THROW(measure_bandwidth(0), Error);
}

}  // namespace
}  // namespace hearth::cuda
