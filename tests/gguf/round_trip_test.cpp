// What the writer writes, the reader reads: random metadata and tensors, alignment, threads, and the writer's own
// refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "core/error.h"
#include "gguf/gguf.h"
#include "support/paths.h"
#include "support/random.h"

namespace hearth {
namespace {

using gguf::Array;
using gguf::Value;
using test::random_int;

std::string random_string(std::mt19937& rng) {
  std::string s(static_cast<size_t>(random_int(rng, 0, 40)), '\0');
  for (char& c : s) c = static_cast<char>(random_int(rng, 0, 255));  // values may hold any bytes, zeros as well
  return s;
}

template <typename T>
T random_scalar(std::mt19937& rng) {
  if constexpr (std::is_same_v<T, bool>)
    return random_int(rng, 0, 1) == 1;
  else if constexpr (std::is_same_v<T, std::string>)
    return random_string(rng);
  else if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(std::normal_distribution<double>(0, 1e6)(rng));
  else
    return static_cast<T>(std::uniform_int_distribution<uint64_t>()(rng));
}

template <typename T>
Array random_elements(std::mt19937& rng) {
  std::vector<T> v(static_cast<size_t>(random_int(rng, 0, 50)));
  for (size_t i = 0; i < v.size(); ++i) v[i] = random_scalar<T>(rng);
  return v;
}

template <typename T>
Value random_scalar_or_array(std::mt19937& rng) {
  if (random_int(rng, 0, 1) == 0) return Value(std::in_place_type<T>, random_scalar<T>(rng));
  return random_elements<T>(rng);
}

Value random_value(std::mt19937& rng) {
  switch (random_int(rng, 0, 11)) {
    case 0:
      return random_scalar_or_array<uint8_t>(rng);
    case 1:
      return random_scalar_or_array<int8_t>(rng);
    case 2:
      return random_scalar_or_array<uint16_t>(rng);
    case 3:
      return random_scalar_or_array<int16_t>(rng);
    case 4:
      return random_scalar_or_array<uint32_t>(rng);
    case 5:
      return random_scalar_or_array<int32_t>(rng);
    case 6:
      return random_scalar_or_array<float>(rng);
    case 7:
      return random_scalar_or_array<bool>(rng);
    case 8:
      return random_scalar_or_array<std::string>(rng);
    case 9:
      return random_scalar_or_array<uint64_t>(rng);
    case 10:
      return random_scalar_or_array<int64_t>(rng);
    default:
      return random_scalar_or_array<double>(rng);
  }
}

std::vector<std::byte> random_bytes(std::mt19937& rng, size_t n) {
  std::vector<std::byte> v(n);
  for (std::byte& b : v) b = static_cast<std::byte>(random_int(rng, 0, 255));
  return v;
}

TEST(GgufRoundTrip, RandomFiles) {
  const test::TempDir dir;
  constexpr DType types[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0, DType::i32, DType::f64};
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    gguf::Writer writer(dir / "a.gguf");
    std::vector<gguf::KeyValue> metadata;
    const int64_t n_keys = random_int(rng, 0, 30);
    for (int64_t i = 0; i < n_keys; ++i) {
      metadata.push_back({"key." + std::to_string(i), random_value(rng)});
      writer.set(metadata.back().key, metadata.back().value);
    }
    const uint32_t alignment = 1u << random_int(rng, 3, 12);
    const bool aligned = seed % 2 == 1;
    if (aligned) writer.set("general.alignment", alignment);
    struct Tensor {
      std::string name;
      DType type;
      std::vector<int64_t> ne;
      std::vector<std::byte> data;
    };
    std::vector<Tensor> tensors;
    const int64_t n_tensors = random_int(rng, 0, 12);
    for (int64_t i = 0; i < n_tensors; ++i) {
      Tensor t;
      t.name = "blk." + std::to_string(i) + ".weight";
      t.type = types[random_int(rng, 0, 6)];
      const int64_t n_dims = random_int(rng, 1, 4);
      t.ne.push_back(32 * random_int(rng, 1, 4));
      for (int64_t d = 1; d < n_dims; ++d) t.ne.push_back(random_int(rng, 1, 4));
      writer.add_tensor(t.name, t.type, t.ne);
      tensors.push_back(std::move(t));
    }
    writer.begin();
    for (size_t i = tensors.size(); i-- > 0;) {  // any order will do
      tensors[i].data = random_bytes(rng, writer.tensor_bytes(i));
      const size_t half = tensors[i].data.size() / 2;
      const std::span<const std::byte> data(tensors[i].data);
      writer.write(i, half, data.subspan(half));
      writer.write(i, 0, data.first(half));
    }
    const uint64_t promised = writer.file_bytes();
    writer.finish();

    const gguf::File file = gguf::File::open(dir / "a.gguf");
    EXPECT_EQ(file.version(), 3u);
    EXPECT_FALSE(file.powerinfer());
    EXPECT_EQ(file.alignment(), aligned ? alignment : 32u);
    EXPECT_EQ(file.total_bytes(), promised);
    ASSERT_EQ(file.metadata().size(), metadata.size() + (aligned ? 1 : 0));
    for (size_t i = 0; i < metadata.size(); ++i) {
      EXPECT_EQ(file.metadata()[i].key, metadata[i].key);
      EXPECT_EQ(file.metadata()[i].value, metadata[i].value);
      EXPECT_EQ(file.find(metadata[i].key), &file.metadata()[i].value);
    }
    ASSERT_EQ(file.tensors().size(), tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const gguf::TensorInfo& t = file.tensors()[i];
      EXPECT_EQ(t.name, tensors[i].name);
      EXPECT_EQ(t.traits->type, tensors[i].type);
      EXPECT_EQ(t.ne, tensors[i].ne);
      EXPECT_EQ(t.offset % file.alignment(), 0u);
      EXPECT_EQ(file.find_tensor(t.name), &t);
      EXPECT_TRUE(std::ranges::equal(file.data(t), tensors[i].data));
      file.will_need(t);
      file.dont_need(t);
    }
    EXPECT_EQ(file.find("absent"), nullptr);
    EXPECT_EQ(file.find_tensor("absent"), nullptr);
  }
}

TEST(GgufRoundTrip, ManyThreadsWriteOneTensor) {
  const test::TempDir dir;
  constexpr int64_t rows = 64, cols = 1024;
  constexpr size_t row_size = cols * sizeof(float);
  gguf::Writer writer(dir / "a.gguf");
  const size_t tensor = writer.add_tensor("w", DType::f32, {cols, rows});
  writer.begin();
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      for (int64_t r = id; r < rows; r += 4) {
        const std::vector<float> row(cols, static_cast<float>(r));
        writer.write(tensor, static_cast<size_t>(r) * row_size, std::as_bytes(std::span(row)));
      }
    });
  }
  for (std::thread& t : threads) t.join();
  writer.finish();
  const gguf::File file = gguf::File::open(dir / "a.gguf");
  const auto* values = reinterpret_cast<const float*>(file.data(file.tensors()[0]).data());
  for (int64_t i = 0; i < rows * cols; ++i) ASSERT_EQ(values[i], static_cast<float>(i / cols));
}

TEST(GgufWriter, NothingAppearsBeforeFinish) {
  const test::TempDir dir;
  {
    gguf::Writer writer(dir / "a.gguf");
    writer.set("k", Value(uint32_t{1}));
    writer.begin();
    EXPECT_FALSE(std::filesystem::exists(dir / "a.gguf"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(GgufWriter, SetReplaces) {
  const test::TempDir dir;
  gguf::Writer writer(dir / "a.gguf");
  writer.set("k", Value(uint32_t{1}));
  writer.set("k", Value(std::string("two")));
  writer.begin();
  writer.finish();
  const gguf::File file = gguf::File::open(dir / "a.gguf");
  ASSERT_EQ(file.metadata().size(), 1u);
  EXPECT_EQ(file.require<std::string>("k"), "two");
}

TEST(GgufWriter, Refusals) {
  const test::TempDir dir;
  gguf::Writer writer(dir / "a.gguf");
  writer.add_tensor("w", DType::q8_0, {32, 2});
  EXPECT_THROW(writer.add_tensor("w", DType::f32, {1}), Error);
  EXPECT_THROW(writer.add_tensor("v", DType::q8_0, {33, 2}), Error);
  EXPECT_THROW(writer.add_tensor("v", DType::f32, {}), Error);
  EXPECT_THROW(writer.add_tensor("v", DType::f32, {1, 1, 1, 1, 1}), Error);
  EXPECT_THROW(writer.add_tensor("v", DType::f32, {int64_t{1} << 40, int64_t{1} << 40}), Error);
  EXPECT_THROW(writer.add_tensor(std::string(65, 'n'), DType::f32, {1}), Error);
  EXPECT_THROW(writer.add_tensor("", DType::f32, {1}), Error);
  EXPECT_THROW(writer.set("", Value(uint32_t{1})), Error);
  writer.set("general.alignment", Value(uint32_t{24}));
  EXPECT_THROW(writer.begin(), Error);
  EXPECT_THROW(gguf::Writer(dir / "no" / "such" / "dir.gguf"), Error);
  EXPECT_THROW(gguf::Writer(dir.path()), Error);
}

TEST(GgufWriterDeathTest, MissingOrRepeatedBytesAreBugs) {
  const test::TempDir dir;
  const std::vector<std::byte> data(16);
  const auto write = [&](std::vector<uint64_t> offsets) {
    gguf::Writer writer(dir / "a.gguf");
    writer.add_tensor("w", DType::f32, {8});
    writer.begin();
    for (const uint64_t offset : offsets) writer.write(0, offset, data);
    writer.finish();
  };
  EXPECT_DEATH(write({0}), "not written completely");
  EXPECT_DEATH(write({0, 8}), "written twice");
  EXPECT_DEATH(write({0, 20}), "does not hold");
  write({16, 0});
}

}  // namespace
}  // namespace hearth
