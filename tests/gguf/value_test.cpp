// get() and require(): conversions that lose nothing are made, the others are errors that say what was expected and
// found.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "gguf/gguf.h"
#include "support/paths.h"

namespace hearth {
namespace {

using gguf::Array;
using gguf::File;
using gguf::Value;

class GgufValues : public testing::Test {
 protected:
  File with(Value value) {
    gguf::Writer writer(dir_ / "v.gguf");
    writer.set("k", std::move(value));
    writer.begin();
    writer.finish();
    return File::open(dir_ / "v.gguf");
  }
  template <typename T>
  T get(Value value) {
    return with(std::move(value)).get<T>("k").value();
  }
  template <typename T>
  std::string error_of(Value value) {
    const File f = with(std::move(value));
    try {
      f.get<T>("k");
      return {};
    } catch (const Error& e) {
      return e.what();
    }
  }
  test::TempDir dir_;
};

TEST_F(GgufValues, IntegersConvertWhereTheyFit) {
  EXPECT_EQ(get<int32_t>(uint8_t{200}), 200);
  EXPECT_EQ(get<uint32_t>(int64_t{4000000000}), 4000000000u);
  EXPECT_EQ(get<int64_t>(int8_t{-1}), -1);
  EXPECT_EQ(get<uint64_t>(std::numeric_limits<uint64_t>::max()), std::numeric_limits<uint64_t>::max());
  EXPECT_NE(error_of<int32_t>(uint32_t{4000000000}), "");
  EXPECT_NE(error_of<uint32_t>(int32_t{-1}), "");
  EXPECT_NE(error_of<int64_t>(uint64_t{1} << 63), "");
}

TEST_F(GgufValues, FloatsAndIntegers) {
  EXPECT_EQ(get<float>(int32_t{1 << 24}), 16777216.0f);
  EXPECT_NE(error_of<float>(int32_t{(1 << 24) + 1}), "");
  EXPECT_EQ(get<int32_t>(3.0f), 3);
  EXPECT_EQ(get<int32_t>(-2147483648.0), std::numeric_limits<int32_t>::min());
  EXPECT_NE(error_of<int32_t>(2147483648.0), "");
  EXPECT_NE(error_of<int32_t>(3.5f), "");
  EXPECT_NE(error_of<int64_t>(0x1p63), "");
  EXPECT_NE(error_of<uint64_t>(-1.0f), "");
  EXPECT_NE(error_of<uint64_t>(std::nanf("")), "");
  EXPECT_NE(error_of<int32_t>(std::numeric_limits<float>::infinity()), "");
  EXPECT_EQ(get<float>(1e-5), 1e-5f);  // f64 is rounded
  EXPECT_NE(error_of<float>(1e39), "");
}

TEST_F(GgufValues, NoOtherConversions) {
  EXPECT_EQ(get<bool>(true), true);
  EXPECT_NE(error_of<bool>(uint8_t{1}), "");
  EXPECT_NE(error_of<int32_t>(true), "");
  EXPECT_NE(error_of<std::string>(uint8_t{1}), "");
  EXPECT_NE(error_of<int32_t>(std::string("1")), "");
  EXPECT_NE(error_of<int32_t>(Array(std::vector<int32_t>{1})), "");
  EXPECT_NE(error_of<std::vector<int32_t>>(int32_t{1}), "");
  EXPECT_NE(error_of<std::vector<std::string>>(Array(std::vector<int32_t>{1})), "");
  EXPECT_NE(error_of<std::vector<float>>(Array(std::vector<bool>{true})), "");
}

TEST_F(GgufValues, Arrays) {
  EXPECT_EQ(get<std::vector<int32_t>>(Array(std::vector<uint64_t>{1, 2})), (std::vector<int32_t>{1, 2}));
  EXPECT_NE(error_of<std::vector<int32_t>>(Array(std::vector<uint64_t>{1, uint64_t{1} << 40})), "");
  EXPECT_EQ(get<std::vector<float>>(Array(std::vector<double>{0.5})), std::vector<float>{0.5f});
  EXPECT_EQ(get<std::vector<std::string>>(Array(std::vector<std::string>{"a", ""})),
            (std::vector<std::string>{"a", ""}));
}

TEST_F(GgufValues, MessagesNameKeyExpectationAndFinding) {
  const std::string number = error_of<uint32_t>(int32_t{-7});
  EXPECT_NE(number.find("'k' should be a whole number from 0 to 4294967295, it is i32 -7"), std::string::npos)
      << number;
  const std::string array = error_of<std::string>(Array(std::vector<float>{1, 2, 3}));
  EXPECT_NE(array.find("should be a string, it is an array of 3 f32"), std::string::npos) << array;
  const File f = with(true);
  EXPECT_EQ(f.get<bool>("absent"), std::nullopt);
  try {
    f.require<uint32_t>("llama.block_count");
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("no key 'llama.block_count'"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace hearth
