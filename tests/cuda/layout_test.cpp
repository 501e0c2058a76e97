// What needs no GPU: launch plans, memory layouts, and the behaviour without one.
#include "cuda/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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

TEST(PackedRow, HasAlignedFieldsAndEveryByte) {
  EXPECT_EQ(adopted_bytes(DType::f16, 3, 5), 256u);
  EXPECT_EQ(device_row_bytes(DType::q8_0, 4096), 4096 + 128 * 2);
  EXPECT_EQ(device_row_bytes(DType::q4_0, 96), 64) << "48 bytes of codes, 6 of scales, to whole sectors";
  EXPECT_EQ(device_row_bytes(DType::q4_k, 4096), 2048 + 128 * 2 + 16 * 4);
  EXPECT_EQ(device_row_bytes(DType::q6_k, 4096), 2048 + 1024 + 128 * 2 + 16 * 2);
  for (const DTypeTraits& t : all_traits()) {
    if (!is_packed(t.type)) continue;
    const PackedFormat f = packed_format(t.type);
    for (const int64_t blocks : {1, 3, 16, 43}) {
      const int64_t cols = blocks * t.block_size;
      const PackedRow at = packed_row(f, cols);
      EXPECT_EQ(at.high % 8, 0) << t.name;
      EXPECT_EQ(at.scales % 4, 0) << t.name;
      EXPECT_EQ(at.supers % 4, 0) << t.name;
      EXPECT_EQ(at.stride % 32, 0) << t.name;
      EXPECT_GE(at.stride, at.supers + cols / 256 * f.super_bytes()) << t.name;
      EXPECT_LE(at.stride, static_cast<int64_t>(row_bytes(t.type, cols)) * 21 / 20 + 48) << t.name;
    }
  }
}

// Weight i of a packed row as packing.h describes it, read bit by bit.
float weight_of(DType type, int64_t cols, const std::byte* row, int64_t i) {
  const PackedFormat f = packed_format(type);
  const PackedRow at = packed_row(f, cols);
  const auto bits = [&](int64_t byte, int64_t bit, int n) {  // n bits from bit `bit` behind a byte, little endian
    uint32_t v = 0;
    for (int k = 0; k < n; ++k) {
      const int64_t b = bit + k;
      v |= (static_cast<uint32_t>(row[byte + b / 8]) >> (b % 8) & 1u) << k;
    }
    return v;
  };
  const int64_t g = i / 32, c = i % 32;
  int64_t low_bit = 8 * c, high_bit = 0;
  if (f.levels != Levels::none) {
    low_bit = 4 * c;
  } else if (f.low_bits == 4) {
    low_bit = c % 16 * 8 + c / 16 * 4;
  } else if (f.low_bits == 2) {
    low_bit = c / 16 * 32 + c % 4 * 8 + c % 16 / 4 * 2;
  }
  if (f.high_bits == 1) high_bit = c % 4 * 8 + c / 4;
  if (f.high_bits == 2) high_bit = c / 16 * 32 + c % 4 * 8 + c % 16 / 4 * 2;
  uint32_t code = bits(g * f.low_bytes(), low_bit, f.low_bits);
  if (f.high_bits > 0) code |= bits(at.high + g * f.high_bytes(), high_bit, f.high_bits) << f.low_bits;
  const auto scale = bits(at.scales + g * f.scale_bytes(), 0, static_cast<int>(8 * f.scale_bytes()));
  const auto super = bits(at.supers + i / 256 * f.super_bytes(), 0, static_cast<int>(8 * f.super_bytes()));
  const uint32_t byte = scale >> (c / f.group * 8) & 255;
  const auto half = [](uint32_t v) { return f16_to_f32(static_cast<f16_t>(v)); };
  const auto sign = [](uint32_t v) { return static_cast<float>(static_cast<int8_t>(v)); };
  float s = 0, m = 0;
  switch (f.scaling) {
    case Scaling::half:
      s = half(scale);
      break;
    case Scaling::half_min:
      s = half(scale), m = -half(scale >> 16);
      break;
    case Scaling::exponent:
      s = std::ldexp(1.0f, static_cast<int>(scale) - 128);
      break;
    case Scaling::super_min:
      s = half(super) * static_cast<float>(scale & 255), m = half(super >> 16) * static_cast<float>(scale >> 8);
      break;
    case Scaling::super_pair:
      s = half(super) * static_cast<float>(byte & 15), m = half(super >> 16) * static_cast<float>(byte >> 4);
      break;
    case Scaling::super_sign:
      s = half(super) * sign(byte);
      break;
  }
  if (type == DType::q8_0) return s * sign(code);
  if (f.levels == Levels::iq4) return s * static_cast<float>(kLevelsIQ4[code]);
  if (f.levels == Levels::e2m1) return s * static_cast<float>(kLevelsE2M1[code]);
  return s * static_cast<float>(static_cast<int>(code) - f.offset) - m;
}

TEST(PackedRow, KeepsEveryWeight) {
  std::mt19937 rng(2);
  for (const DTypeTraits& t : all_traits()) {
    if (!is_packed(t.type)) continue;
    const int64_t cols = 3 * t.block_size, rows = 5, stride = device_row_bytes(t.type, cols);
    std::vector<float> values(static_cast<size_t>(rows * cols)), expected(static_cast<size_t>(cols));
    for (float& v : values) v = std::uniform_real_distribution<float>(-3, 3)(rng);
    std::vector<std::byte> file(row_bytes(t.type, cols) * static_cast<size_t>(rows)), packed(static_cast<size_t>(2 * stride));
    for (int64_t r = 0; r < rows; ++r) {
      t.from_float(&values[static_cast<size_t>(r * cols)], &file[static_cast<size_t>(r) * row_bytes(t.type, cols)], cols);
    }
    pack_rows(t.type, cols, file.data(), 2, 2, packed.data());  // rows 2 and 3
    for (int64_t r = 0; r < 2; ++r) {
      t.to_float(&file[static_cast<size_t>(r + 2) * row_bytes(t.type, cols)], expected.data(), cols);
      for (int64_t i = 0; i < cols; ++i) {
        EXPECT_EQ(weight_of(t.type, cols, &packed[static_cast<size_t>(r * stride)], i), expected[static_cast<size_t>(i)])
            << t.name << ", row " << r << ", weight " << i;
      }
    }
  }
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
