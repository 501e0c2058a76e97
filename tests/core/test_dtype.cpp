#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "support/random.h"

namespace hearth {
namespace {

TEST(Half, EveryF16ValueSurvivesARoundTrip) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float f = f16_to_f32(static_cast<f16_t>(h));
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f))));
    } else {
      ASSERT_EQ(f32_to_f16(f), h) << f;
    }
  }
}

TEST(Half, RoundsToNearestEven) {
  EXPECT_EQ(f32_to_f16(1.0f + 0x1p-11f), f32_to_f16(1.0f));            // a tie goes to the even neighbour
  EXPECT_EQ(f16_to_f32(f32_to_f16(1.0f + 0x3p-11f)), 1.0f + 0x1p-9f);  // the other way
  EXPECT_EQ(f16_to_f32(f32_to_f16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(f16_to_f32(f32_to_f16(65520.0f))));
  EXPECT_EQ(f16_to_f32(f32_to_f16(0x1p-24f)), 0x1p-24f);  // smallest subnormal
  EXPECT_EQ(f16_to_f32(f32_to_f16(0x1p-25f)), 0.0f);      // tie with zero
  EXPECT_EQ(f16_to_f32(f32_to_f16(-0x1.8p-25f)), -0x1p-24f);
}

TEST(Half, NearestAmongNeighbours) {
  std::mt19937 rng(1);
  for (int i = 0; i < 200000; ++i) {
    const float x =
        std::ldexp(std::uniform_real_distribution<float>(-2, 2)(rng), static_cast<int>(test::random_int(rng, -20, 14)));
    const f16_t h = f32_to_f16(x);
    const double error = std::fabs(static_cast<double>(f16_to_f32(h)) - x);
    for (const int step : {-1, 1}) {
      const auto neighbour = static_cast<f16_t>(h + step);
      if ((neighbour & 0x7C00) == 0x7C00 || ((neighbour ^ h) & 0x8000)) continue;
      ASSERT_LE(error, std::fabs(static_cast<double>(f16_to_f32(neighbour)) - x)) << x;
    }
  }
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(1.0f + 0x1p-8f)), 1.0f);
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(1.0f + 0x3p-8f)), 1.0f + 0x1p-6f);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(NAN))));
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(-INFINITY)), -INFINITY);
}

TEST(DType, TableIsConsistent) {
  for (const DTypeTraits& t : all_traits()) {
    EXPECT_EQ(find_traits(static_cast<uint32_t>(t.type)), &t) << t.name;
    EXPECT_GT(t.block_bytes, 0);
    EXPECT_EQ(t.to_float == nullptr, t.from_float == nullptr);
    EXPECT_EQ(parse_dtype(t.name).has_value(), t.computable()) << t.name;
  }
  EXPECT_EQ(find_traits(4), nullptr);  // removed from the format
  EXPECT_EQ(parse_dtype("Q8_0"), DType::q8_0);
  EXPECT_EQ(parse_dtype("q9_9"), std::nullopt);
}

// The error of a block format is at most half a step, a step being the block's largest value over the number of levels.
TEST(DType, QuantisationErrorIsBoundedByHalfAStep) {
  std::mt19937 rng(2);
  for (const auto& [type, levels, slack] : {std::tuple{DType::q8_0, 127.0f, 0.5f}, {DType::q4_0, 8.0f, 1.0f}}) {
    const int64_t n = 32 * 50;
    const auto x = test::random_normal(rng, static_cast<size_t>(n));
    std::vector<std::byte> packed(row_bytes(type, n));
    std::vector<float> y(x.size());
    traits(type).from_float(x.data(), packed.data(), n);
    traits(type).to_float(packed.data(), y.data(), n);
    for (int64_t b = 0; b < n / 32; ++b) {
      float amax = 0;
      for (int i = 0; i < 32; ++i) amax = std::max(amax, std::fabs(x[static_cast<size_t>(b * 32 + i)]));
      // q4_0 has levels -8..7: the end opposite to the extreme is cut off by up to one step. The scale itself is an
      // f16.
      const float bound = amax / levels * slack + amax * 0x1p-10f;
      for (int i = 0; i < 32; ++i) {
        const auto k = static_cast<size_t>(b * 32 + i);
        ASSERT_LE(std::fabs(x[k] - y[k]), bound) << traits(type).name;
      }
    }
  }
}

TEST(DType, ZeroBlocksStayZero) {
  const std::vector<float> zeros(512, 0.0f);
  for (const DTypeTraits& t : all_traits()) {
    if (!t.computable()) continue;
    std::vector<std::byte> packed(row_bytes(t.type, 512), std::byte{0xAA});
    std::vector<float> y(512, NAN);
    t.from_float(zeros.data(), packed.data(), 512);
    t.to_float(packed.data(), y.data(), 512);
    for (const float v : y) EXPECT_EQ(v, 0.0f) << t.name;
  }
}

}  // namespace
}  // namespace hearth
