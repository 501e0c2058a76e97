// Files made by gguf-py (tests/data/gguf/make_vectors.py): the reader sees what was put in, the writer makes the same
// bytes, and the quantisers agree with ggml's reference bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "core/error.h"
#include "gguf/build.h"
#include "gguf/gguf.h"
#include "support/paths.h"

namespace hearth {
namespace {

using gguf::Array;
using gguf::File;
using gguf::Value;

std::filesystem::path vectors(const std::string& name) {
  return test::data_dir() / "gguf" / name;
}

std::string read_all(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

TEST(GgufReference, EveryMetadataType) {
  const File f = File::open(vectors("reference.gguf"));
  EXPECT_EQ(f.alignment(), 64u);
  const auto is = [&](const char* key, const Value& expected) {
    ASSERT_NE(f.find(key), nullptr) << key;
    EXPECT_EQ(*f.find(key), expected) << key;
  };
  is("t.u8", uint8_t{200});
  is("t.i8", int8_t{-100});
  is("t.u16", uint16_t{60000});
  is("t.i16", int16_t{-30000});
  is("t.u32", uint32_t{4000000000});
  is("t.i32", int32_t{-2000000000});
  is("t.f32", 0.1f);
  is("t.true", true);
  is("t.false", false);
  is("t.string", std::string("grüße, 世界 🌍\n"));
  is("t.u64", (uint64_t{1} << 63) + 1);
  is("t.i64", -(int64_t{1} << 62));
  is("t.f64", 1e300);
  is("a.strings", Array(std::vector<std::string>{"", "a", "längere Zeichenkette"}));
  is("a.ints", Array(std::vector<int32_t>{1, -2, 3}));
  is("a.floats", Array(std::vector<float>{0.5f, -1.5f}));
  is("a.bools", Array(std::vector<bool>{true, false, true}));
}

TEST(GgufReference, Tensors) {
  const File f = File::open(vectors("reference.gguf"));
  ASSERT_EQ(f.tensors().size(), 6u);
  const auto is = [&](const char* name, const char* type, std::vector<int64_t> ne, uint64_t bytes) {
    const gguf::TensorInfo* t = f.find_tensor(name);
    ASSERT_NE(t, nullptr) << name;
    EXPECT_EQ(t->traits->name, std::string(type)) << name;
    EXPECT_EQ(t->ne, ne) << name;
    EXPECT_EQ(t->bytes, bytes) << name;
  };
  is("vector", "f32", {5}, 20);
  is("matrix", "f32", {4, 3}, 48);
  is("half", "f16", {4, 3, 2}, 48);
  is("cube", "i32", {5, 4, 3, 2}, 480);
  is("q8_0", "q8_0", {64, 3}, 204);
  is("bf16", "bf16", {64, 3}, 384);
  EXPECT_EQ(f.find_tensor("cube")->rows(), 24);
  const auto* cube = reinterpret_cast<const int32_t*>(f.data(*f.find_tensor("cube")).data());
  for (int32_t i = 0; i < 120; ++i) ASSERT_EQ(cube[i], i);
}

TEST(GgufReference, WriterMakesTheSameBytes) {
  const test::TempDir dir;
  for (const char* name : {"reference.gguf", "quants.gguf"}) {
    const File f = File::open(vectors(name));
    gguf::Writer writer(dir / name);
    for (const gguf::KeyValue& kv : f.metadata()) writer.set(kv.key, kv.value);
    for (const gguf::TensorInfo& t : f.tensors()) writer.add_tensor(t.name, t.traits->type, t.ne);
    writer.begin();
    for (size_t i = 0; i < f.tensors().size(); ++i) writer.write(i, 0, f.data(f.tensors()[i]));
    writer.finish();
    EXPECT_TRUE(read_all(dir / name) == read_all(vectors(name))) << name;
  }
}

TEST(GgufReference, QuantisersAgreeBitForBit) {
  const File f = File::open(vectors("quants.gguf"));
  const gguf::TensorInfo& x = *f.find_tensor("x");
  const auto* values = reinterpret_cast<const float*>(f.data(x).data());
  for (const DType type : {DType::q8_0, DType::q4_0}) {
    const DTypeTraits& t = traits(type);
    const gguf::TensorInfo* expected = f.find_tensor(std::string("x.") + t.name);
    ASSERT_NE(expected, nullptr);
    ASSERT_EQ(expected->ne, x.ne);
    std::vector<std::byte> block(row_bytes(type, x.cols()));
    for (int64_t r = 0; r < x.rows(); ++r) {
      t.from_float(values + r * x.cols(), block.data(), x.cols());
      const auto reference = f.data(*expected).subspan(static_cast<size_t>(r) * block.size(), block.size());
      EXPECT_TRUE(std::ranges::equal(block, reference)) << t.name << " row " << r;
    }
  }
}

TEST(GgufReference, SplitFilesOpenByAnyPart) {
  for (int part = 1; part <= 3; ++part) {
    const auto path = vectors(fmt::format("split-{:05}-of-00003.gguf", part));
    const File f = File::open(path);
    EXPECT_EQ(f.path(), path);
    EXPECT_EQ(f.part_paths().size(), 3u);
    EXPECT_EQ(f.require<std::string>("general.name"), "split");  // of the first part
    ASSERT_EQ(f.tensors().size(), 5u);
    uint64_t bytes = 0;
    for (int i = 0; i < 5; ++i) {
      const gguf::TensorInfo* t = f.find_tensor(fmt::format("t.{}", i));
      ASSERT_NE(t, nullptr);
      EXPECT_EQ(t->file, i / 2);
      EXPECT_EQ(t->rows(), i + 1);
      float first = -1;
      std::memcpy(&first, f.data(*t).data(), sizeof first);
      EXPECT_EQ(first, static_cast<float>(i));
    }
    for (const auto& p : f.part_paths()) bytes += std::filesystem::file_size(p);
    EXPECT_EQ(f.total_bytes(), bytes);
  }
}

class BrokenSplit : public testing::Test {
 protected:
  void SetUp() override {
    for (int i = 1; i <= 3; ++i) std::filesystem::copy(vectors(part(i)), dir_ / part(i));
  }
  static std::string part(int i) { return fmt::format("split-{:05}-of-00003.gguf", i); }
  std::string error_of(const std::string& name) {
    try {
      File::open(dir_ / name);
      return {};
    } catch (const Error& e) {
      return e.what();
    }
  }
  test::TempDir dir_;
};

TEST_F(BrokenSplit, MissingPart) {
  std::filesystem::remove(dir_ / part(2));
  EXPECT_NE(error_of(part(1)).find("split-00002-of-00003.gguf' is missing"), std::string::npos) << error_of(part(1));
}

TEST_F(BrokenSplit, Renamed) {
  std::filesystem::rename(dir_ / part(1), dir_ / "model.gguf");
  EXPECT_NE(error_of("model.gguf").find("parts must keep names"), std::string::npos);
}

TEST_F(BrokenSplit, PartsExchanged) {
  std::filesystem::rename(dir_ / part(2), dir_ / "x");
  std::filesystem::rename(dir_ / part(3), dir_ / part(2));
  std::filesystem::rename(dir_ / "x", dir_ / part(3));
  EXPECT_NE(error_of(part(1)).find("says that it is part 3 of 3, part 2 of 3"), std::string::npos) << error_of(part(1));
}

TEST_F(BrokenSplit, SameTensorInTwoParts) {
  std::string bytes = read_all(dir_ / part(3));
  const size_t at = bytes.find("t.4");
  ASSERT_NE(at, std::string::npos);
  bytes[at + 2] = '0';
  test::write_file(dir_ / part(3), bytes);
  EXPECT_NE(error_of(part(1)).find("'t.0' appears twice"), std::string::npos);
}

TEST_F(BrokenSplit, WrongTotal) {
  std::string bytes = read_all(dir_ / part(1));
  const size_t at = bytes.find("split.tensors.count") + std::string("split.tensors.count").size() + 4;
  bytes[at] = 6;
  test::write_file(dir_ / part(1), bytes);
  EXPECT_NE(error_of(part(2)).find("hold 5 tensors, split.tensors.count says 6"), std::string::npos)
      << error_of(part(2));
}

TEST(GgufPowerInfer, OldTypeNumbersAreTranslated) {
  const std::string image = test::ImageBuilder()
                                .header(3, 0, 3, "PWRI")
                                .tensor("blk.0.gpu_idx", {8}, 18, 0)
                                .tensor("blk.0.bytes", {8}, 16, 32)
                                .tensor("blk.0.w", {32, 1}, 2, 64)
                                .data(96)
                                .bytes();
  const std::vector<char> aligned(image.begin(), image.end());
  const File f = File::from_bytes(test::as_bytes({aligned.data(), aligned.size()}), "pi");
  EXPECT_TRUE(f.powerinfer());
  EXPECT_EQ(f.find_tensor("blk.0.gpu_idx")->traits->type, DType::i32);
  EXPECT_EQ(f.find_tensor("blk.0.bytes")->traits->type, DType::i8);
  EXPECT_EQ(f.find_tensor("blk.0.w")->traits->type, DType::q4_0);
}

TEST(GgufPowerInfer, RealIndexFile) {
  const std::string name = "profiles/llama-7b-relu.powerinfer.gguf.generated.gpuidx";
  HEARTH_NEEDS_SHARED(name);
  const File f = File::open(test::shared_dir() / name);
  EXPECT_TRUE(f.powerinfer());
  ASSERT_EQ(f.tensors().size(), 64u);
  const gguf::TensorInfo* idx = f.find_tensor("blk.31.gpu_idx");
  ASSERT_NE(idx, nullptr);
  EXPECT_EQ(idx->traits->type, DType::i32);
  EXPECT_EQ(idx->ne, std::vector<int64_t>{11008});
}

TEST(GgufShared, VocabularyFiles) {
  HEARTH_NEEDS_SHARED("vocab");
  const std::pair<const char*, size_t> files[] = {
      {"ggml-vocab-gpt-2.gguf", 50257}, {"ggml-vocab-falcon.gguf", 65024}, {"ggml-vocab-llama-spm.gguf", 32000}};
  for (const auto& [name, n_vocab] : files) {
    const File f = File::open(test::shared_dir() / "vocab" / name);
    EXPECT_EQ(f.require<std::vector<std::string>>("tokenizer.ggml.tokens").size(), n_vocab) << name;
  }
}

}  // namespace
}  // namespace hearth
