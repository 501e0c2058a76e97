// Encoders: their error beside llama.cpp's, what importance does, and what becomes of unusual blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "support/random.h"
#include "support/types.h"

namespace hearth {
namespace {

// Types whose encoders search.
const std::vector<DType> kTypes =
    test::types_where([](const DTypeTraits& t) { return t.from_float_weighted != nullptr; });

std::vector<std::byte> encoded(DType type, const std::vector<float>& x, const float* importance = nullptr) {
  std::vector<std::byte> out(row_bytes(type, static_cast<int64_t>(x.size())), std::byte{0xAA});
  quantize_row(type, x.data(), importance, out.data(), static_cast<int64_t>(x.size()));
  return out;
}
std::vector<float> decoded(DType type, const std::vector<std::byte>& blocks, size_t n) {
  std::vector<float> y(n, NAN);
  traits(type).to_float(blocks.data(), y.data(), static_cast<int64_t>(n));
  return y;
}
std::vector<float> round_trip(DType type, const std::vector<float>& x, const float* importance = nullptr) {
  return decoded(type, encoded(type, x, importance), x.size());
}

// sqrt(sum(w (x - y)^2) / sum(w x^2)), w = 1 without importance.
double relative_error(const std::vector<float>& x, const std::vector<float>& y, const float* importance = nullptr) {
  double error = 0, total = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = importance ? importance[i] : 1.0, e = static_cast<double>(x[i]) - y[i];
    error += w * e * e, total += w * x[i] * x[i];
  }
  return std::sqrt(error / total);
}

// tests/data/codecs/samples.bin: rows of 256 f16 values, half of them standard normal, half of the demo model.
std::vector<float> samples(int half) {
  std::ifstream in(HEARTH_SOURCE_DIR "/tests/data/codecs/samples.bin", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  std::vector<float> x(bytes.size() / sizeof(f16_t) / 2);
  traits(DType::f16)
      .to_float(bytes.data() + static_cast<size_t>(half) * bytes.size() / 2, x.data(), static_cast<int64_t>(x.size()));
  return x;
}
// 1/4, 1, 4, 16, and again.
std::vector<float> four_importances(size_t n) {
  std::vector<float> w(n);
  for (size_t i = 0; i < n; ++i) w[i] = std::ldexp(1.0f, 2 * static_cast<int>(i % 4) - 2);
  return w;
}

// llama.cpp's errors on these samples, as tests/data/codecs/measure_peer.py prints them: of normal values and of the
// model's, then of both with the importance above. (Its MXFP4 ignores importance.)
struct PeerError {
  DType type;
  double normal, model, normal_weighted, model_weighted;
};
constexpr PeerError kPeer[] = {
    {DType::q4_0, 0.08551, 0.04248, 0.07504, 0.03650},   {DType::q4_1, 0.07748, 0.06925, 0.06041, 0.04109},
    {DType::q5_0, 0.04240, 0.02167, 0.03692, 0.01836},   {DType::q5_1, 0.03765, 0.04010, 0.02955, 0.02449},
    {DType::q2_k, 0.29604, 0.29750, 0.22047, 0.21920},   {DType::q3_k, 0.14922, 0.16040, 0.12692, 0.13073},
    {DType::q4_k, 0.07075, 0.04930, 0.06153, 0.04258},   {DType::q5_k, 0.03582, 0.03151, 0.03187, 0.02721},
    {DType::q6_k, 0.01765, 0.01278, 0.01541, 0.01125},   {DType::iq4_nl, 0.07579, 0.07582, 0.06799, 0.06557},
    {DType::iq4_xs, 0.07640, 0.07650, 0.06881, 0.06650}, {DType::mxfp4, 0.11476, 0.11409, 0.11557, 0.11336},
};

TEST(CodecError, IsAtMostTwoPercentAboveLlamaCpps) {
  constexpr double most = 1.02;
  EXPECT_EQ(std::size(kPeer), kTypes.size())
      << "a type has no errors above; tests/data/codecs/measure_peer.py prints them";
  for (const PeerError& peer : kPeer) {
    SCOPED_TRACE(traits(peer.type).name);
    for (const int half : {0, 1}) {
      const auto x = samples(half);
      ASSERT_EQ(x.size(), 96u * 256);
      const auto w = four_importances(x.size());
      const double plain = relative_error(x, round_trip(peer.type, x));
      const double weighted = relative_error(x, round_trip(peer.type, x, w.data()), w.data());
      EXPECT_LE(plain, most * (half == 0 ? peer.normal : peer.model)) << half;
      EXPECT_LE(weighted, most * (half == 0 ? peer.normal_weighted : peer.model_weighted)) << half;
      EXPECT_GE(plain, 0.5 * (half == 0 ? peer.normal : peer.model)) << "too good to be true";
    }
  }
}

TEST(CodecError, ImportanceLowersTheErrorThatItWeighs) {
  std::mt19937 rng(5);
  const auto x = test::random_normal(rng, 256 * 64);
  std::vector<float> w(x.size());
  for (float& v : w) v = std::exp(2.0f * std::normal_distribution<float>()(rng));
  for (const DType type : kTypes) {
    const double without = relative_error(x, round_trip(type, x), w.data());
    EXPECT_LT(relative_error(x, round_trip(type, x, w.data()), w.data()), 0.98 * without) << traits(type).name;
  }
}

// Only its ratios count; zeros, alone or all over, do no harm.
TEST(CodecError, ImportanceMayHaveAnyScaleAndZeros) {
  std::mt19937 rng(6);
  const auto x = test::random_normal(rng, 256 * 8);
  auto w = four_importances(x.size());
  for (const DType type : kTypes) {
    SCOPED_TRACE(traits(type).name);
    auto scaled = w;
    for (float& v : scaled) v *= 0x1p-100f;
    EXPECT_EQ(encoded(type, x, w.data()), encoded(type, x, scaled.data()));
    for (float& v : scaled) v = std::ldexp(v, 220);
    EXPECT_EQ(encoded(type, x, w.data()), encoded(type, x, scaled.data()));
    const std::vector<float> ones(x.size(), 1.0f), zeros(x.size(), 0.0f);
    EXPECT_EQ(encoded(type, x, ones.data()), encoded(type, x, zeros.data()));
    auto some = w;
    for (size_t i = 0; i < some.size(); i += 3) some[i] = 0.0f;
    for (const float y : round_trip(type, x, some.data())) EXPECT_LT(std::fabs(y), 16.0f);
  }
}

TEST(CodecError, FromFloatIsQuantizeRowWithoutImportance) {
  std::mt19937 rng(7);
  const auto x = test::random_normal(rng, 256 * 8);
  for (const DTypeTraits& t : all_traits()) {
    if (!t.computable()) continue;
    std::vector<std::byte> blocks(row_bytes(t.type, static_cast<int64_t>(x.size())));
    t.from_float(x.data(), blocks.data(), static_cast<int64_t>(x.size()));
    EXPECT_EQ(blocks, encoded(t.type, x)) << t.name;
    if (t.from_float_weighted == nullptr) {
      EXPECT_EQ(blocks, encoded(t.type, x, four_importances(x.size()).data())) << t.name;
    }
  }
}

// A row's blocks do not depend on each other.
TEST(CodecError, BlocksAreEncodedOneByOne) {
  std::mt19937 rng(8);
  const auto x = test::random_normal(rng, 256 * 4);
  for (const DType type : kTypes) {
    const auto all = encoded(type, x), last = encoded(type, std::vector<float>(x.end() - 256, x.end()));
    EXPECT_TRUE(std::equal(last.begin(), last.end(), all.end() - static_cast<ptrdiff_t>(last.size())))
        << traits(type).name;
  }
}

// What a type can hold is found again, but for what quantised scales and minima take: encoding decoded values costs
// little beside the first encoding.
TEST(CodecError, EncodingDecodedValuesIsStable) {
  std::mt19937 rng(9);
  const auto x = test::random_normal(rng, 256 * 64);
  for (const DType type : kTypes) {
    const auto y = round_trip(type, x);
    EXPECT_LE(relative_error(y, round_trip(type, y)), 0.35 * relative_error(x, y)) << traits(type).name;
  }
}

void expect_finite(DType type, const std::vector<float>& x, const std::string& what) {
  std::vector<float> w = four_importances(x.size());
  for (const float* importance : {static_cast<const float*>(nullptr), static_cast<const float*>(w.data())}) {
    const auto y = round_trip(type, x, importance);
    float largest = 0.0f;
    for (const float v : x) largest = std::max(largest, std::fabs(v));
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_TRUE(std::isfinite(y[i])) << traits(type).name << ", " << what << ", value " << i;
      ASSERT_LE(std::fabs(y[i] - x[i]), 2.1f * largest + 1e-6f) << traits(type).name << ", " << what;
    }
  }
}

TEST(CodecError, UnusualBlocksGiveFiniteValues) {
  std::mt19937 rng(10);
  for (const DType type : kTypes) {
    for (const float magnitude : {0.0f, -0.0f, 0x1p-149f, 1e-40f, 0x1p-126f, 1e-20f, 0x1p-24f, 1e-6f, 1.0f, 65504.0f}) {
      for (const float sign : {1.0f, -1.0f}) {
        std::vector<float> x(512, sign * magnitude);
        expect_finite(type, x, "constant");
        for (size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
        expect_finite(type, x, "two values");
        for (float& v : x) v = magnitude * std::uniform_real_distribution<float>(-1.0f, 1.0f)(rng);
        expect_finite(type, x, "uniform");
        x[77] = sign * magnitude, x[300] = -sign * magnitude;
        expect_finite(type, x, "uniform with ends");
        std::fill(x.begin(), x.end(), 0.0f);
        x[40] = x[431] = sign * magnitude;
        expect_finite(type, x, "one value");
        x[41] = 1e-30f;
        expect_finite(type, x, "one value and a tiny one");
      }
    }
    for (int i = 0; i < 200; ++i) {  // wide blocks: magnitudes over many powers of two
      std::vector<float> x(256);
      for (float& v : x) {
        v = std::ldexp(std::uniform_real_distribution<float>(-1.0f, 1.0f)(rng),
                       static_cast<int>(test::random_int(rng, -60, 15)));
      }
      expect_finite(type, x, "wide");
    }
  }
}

// Constant blocks lose no more than a scale's rounding, to 11 bits or, in MXFP4, to what its levels hold.
TEST(CodecError, ConstantBlocksAreKept) {
  for (const DType type : kTypes) {
    for (const float value : {0.03f, -0.03f, 3.0f, -3.0f, 65504.0f, -65504.0f}) {
      const std::vector<float> x(256, value);
      const double most = type == DType::mxfp4 ? 0.34 : type == DType::q4_0 || type == DType::q5_0 ? 0x1p-10 : 0x1p-9;
      EXPECT_LE(relative_error(x, round_trip(type, x)), most) << traits(type).name << ", " << value;
    }
  }
}

// Nothing finite comes of a block that holds an infinity or NaN; its neighbours are not touched.
TEST(CodecError, ABlockThatIsNotFiniteSaysSo) {
  std::mt19937 rng(11);
  const auto good = test::random_normal(rng, 768);
  for (const DType type : kTypes) {
    if (type == DType::q4_0) continue;  // finite input is what its rounding expects
    const auto size = static_cast<size_t>(traits(type).block_size);
    const auto y = round_trip(type, good);
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      auto x = good;
      x[256] = bad;
      const auto z = round_trip(type, x);
      for (size_t i = 0; i < x.size(); ++i) {
        if (i >= 256 && i < 256 + size) {
          EXPECT_FALSE(std::isfinite(z[i])) << traits(type).name;
        } else {
          EXPECT_EQ(z[i], y[i]) << traits(type).name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace hearth
