// Decoders, and the encoders that have a reference bit for bit, against gguf-py (tests/data/codecs/make_vectors.py).
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace hearth {
namespace {

std::string read(const char* name) {
  std::ifstream in(std::string(HEARTH_SOURCE_DIR "/tests/data/codecs/") + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Takes arrays off the front of a file's bytes.
class Cursor {
 public:
  explicit Cursor(const std::string& bytes) : bytes_(bytes) {}
  bool done() const { return at_ == bytes_.size(); }
  template <class T>
  std::vector<T> take(size_t n) {
    if (at_ + n * sizeof(T) > bytes_.size()) throw std::runtime_error("vectors are cut off");
    std::vector<T> v(n);
    std::memcpy(v.data(), bytes_.data() + at_, n * sizeof(T));
    at_ += n * sizeof(T);
    return v;
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

TEST(CodecDecode, EqualsTheReferenceBitForBit) {
  const std::string bytes = read("decode.bin");
  Cursor cursor(bytes);
  std::set<std::string> seen;
  while (!cursor.done()) {
    const auto head = cursor.take<uint32_t>(4);  // type, blocks, values in a block, bytes of a block
    const DTypeTraits& t = traits(static_cast<DType>(head[0]));
    SCOPED_TRACE(t.name);
    seen.insert(t.name);
    ASSERT_EQ(t.block_size, static_cast<int>(head[2]));
    ASSERT_EQ(t.block_bytes, static_cast<int>(head[3]));
    const auto blocks = cursor.take<uint8_t>(head[1] * head[3]);
    const auto expected = cursor.take<float>(head[1] * head[2]);
    std::vector<float> got(expected.size());
    ASSERT_TRUE(t.computable());
    t.to_float(blocks.data(), got.data(), static_cast<int64_t>(got.size()));
    int wild = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      if (!std::isfinite(expected[i])) ++wild;
      if (std::isnan(expected[i])) {  // which NaN is up to the processor
        ASSERT_TRUE(std::isnan(got[i])) << "value " << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(expected[i]))
            << "value " << i << ": " << got[i] << ", expected " << expected[i];
      }
    }
    EXPECT_GT(wild, 0) << "the vectors have no extreme scale";
  }
  for (const DTypeTraits& t : all_traits()) {
    if (!t.quantized() || t.type == DType::q8_0 || t.type == DType::q4_0) continue;  // test_dtype.cpp
    EXPECT_TRUE(seen.contains(t.name)) << t.name << " has no vectors; add it to tests/data/codecs/make_vectors.py";
  }
}

TEST(CodecDecode, RowsAreDecodedBlockByBlock) {
  const std::string bytes = read("decode.bin");
  Cursor cursor(bytes);
  while (!cursor.done()) {
    const auto head = cursor.take<uint32_t>(4);
    const DTypeTraits& t = traits(static_cast<DType>(head[0]));
    const auto blocks = cursor.take<uint8_t>(head[1] * head[3]);
    const auto expected = cursor.take<float>(head[1] * head[2]);
    std::vector<float> one(head[2] + 1, 1234.5f);
    t.to_float(blocks.data() + head[3], one.data(), head[2]);
    EXPECT_EQ(std::memcmp(one.data(), expected.data() + head[2], head[2] * sizeof(float)), 0) << t.name;
    EXPECT_EQ(one.back(), 1234.5f) << t.name;
  }
}

// MXFP4's exponent has no sign, no zero and, read as ggml reads it, no NaN.
TEST(CodecDecode, Mxfp4ReadsEveryExponentAsAPowerOfTwo) {
  for (int e = 0; e < 256; ++e) {
    uint8_t block[17] = {static_cast<uint8_t>(e), 0x71};  // codes 1 (level 1) and 7 (level 12)
    float w[32];
    traits(DType::mxfp4).to_float(block, w, 32);
    EXPECT_EQ(w[0], std::ldexp(1.0f, e - 128));
    EXPECT_EQ(w[16], std::ldexp(12.0f, e - 128));  // infinite for e > 251
    EXPECT_EQ(w[1], 0.0f);
  }
}

TEST(CodecEncode, SimpleTypesRoundAsTheReferenceDoes) {
  const std::string bytes = read("simple.bin");
  Cursor cursor(bytes);
  const size_t n_blocks = cursor.take<uint32_t>(1)[0];
  const auto x = cursor.take<float>(n_blocks * 32);
  for (const DType type : {DType::q4_1, DType::q5_0, DType::q5_1, DType::mxfp4}) {
    const auto block = static_cast<size_t>(traits(type).block_bytes);
    const auto expected = cursor.take<uint8_t>(n_blocks * block);
    std::vector<uint8_t> got(expected.size());
    traits(type).from_float(x.data(), got.data(), static_cast<int64_t>(x.size()));
    for (size_t b = 0; b < n_blocks; ++b) {
      EXPECT_EQ(std::memcmp(got.data() + b * block, expected.data() + b * block, block), 0)
          << traits(type).name << ", block " << b;
    }
  }
  EXPECT_TRUE(cursor.done());
}

}  // namespace
}  // namespace hearth
