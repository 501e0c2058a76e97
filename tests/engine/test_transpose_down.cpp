// Down projections of foreign quantised files, quantised again as the sparse kernels read them.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/model.h"
#include "support/errors.h"
#include "support/paths.h"
#include "support/random.h"
#include "support/tiny_model.h"

namespace hearth {
namespace {

TEST(TransposeDown, IsTheTypesOwnEncodingOfTheTransposedValues) {
  std::mt19937 rng(3);
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0, DType::q5_1, DType::q2_k,
                           DType::q4_k, DType::q6_k, DType::iq4_xs, DType::mxfp4}) {
    SCOPED_TRACE(traits(type).name);
    const DTypeTraits& t = traits(type);
    const int64_t block = t.block_size, rows = 3 * block, cols = 2 * block;
    const std::vector<float> wanted = test::random_normal(rng, static_cast<size_t>(rows * cols));
    std::vector<std::byte> data(static_cast<size_t>(rows) * row_bytes(type, cols));
    std::vector<float> values(wanted.size());
    for (int64_t r = 0; r < rows; ++r) {
      std::byte* row = data.data() + static_cast<size_t>(r) * row_bytes(type, cols);
      t.from_float(wanted.data() + r * cols, row, cols);
      t.to_float(row, values.data() + r * cols, cols);
    }
    const Matrix m{type, rows, cols, data.data()};
    ASSERT_TRUE(model::can_transpose(m, type));
    HostBuffer storage(model::transposed_bytes(m, type));
    model::RequantizationError error;
    const Matrix got = model::transpose(m, type, {storage.data(), storage.bytes()}, error);
    ASSERT_EQ(got.rows, cols);
    ASSERT_EQ(got.cols, rows);
    ASSERT_EQ(got.type, type);
    double squared_error = 0, squared = 0;
    std::vector<float> column(static_cast<size_t>(rows)), decoded(column.size());
    std::vector<std::byte> encoded(row_bytes(type, rows));
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t r = 0; r < rows; ++r) column[static_cast<size_t>(r)] = values[static_cast<size_t>(r * cols + c)];
      t.from_float(column.data(), encoded.data(), rows);
      ASSERT_EQ(std::memcmp(encoded.data(), got.row(c), encoded.size()), 0) << "row " << c;
      t.to_float(encoded.data(), decoded.data(), rows);
      for (size_t r = 0; r < column.size(); ++r) {
        squared_error += std::pow(static_cast<double>(decoded[r]) - column[r], 2);
        squared += std::pow(static_cast<double>(column[r]), 2);
      }
    }
    if (t.quantized()) {
      EXPECT_DOUBLE_EQ(error.relative(), std::sqrt(squared_error / squared));
      EXPECT_GT(error.relative(), 0);
    } else {
      EXPECT_EQ(error.relative(), 0);
    }
  }
}

TEST(TransposeDown, NeedsWholeBlocks) {
  EXPECT_FALSE(model::can_transpose({DType::q4_k, 384, 256, nullptr}, DType::q4_k));
  EXPECT_TRUE(model::can_transpose({DType::q4_k, 384, 256, nullptr}, DType::q8_0));
  EXPECT_TRUE(model::can_transpose({DType::q4_0, 96, 256, nullptr}, DType::q4_0));
}

class ForeignFile : public testing::Test {
 protected:
  test::TempDir dir_;
};

TEST_F(ForeignFile, IsRefusedWithAHintAndRunsSparselyWhenAsked) {
  const auto path = test::write_tiny_model(dir_ / "m.gguf", {.type = DType::q6_k, .n_embd = 256, .n_ff = 512});
  auto plain = model::Model::load(path);
  const auto reason = plain.prepare_sparse();
  ASSERT_TRUE(reason.has_value());
  EXPECT_NE(reason->find("--transpose-down"), std::string::npos) << *reason;
  EXPECT_TRUE(plain.why_not_by_neuron(1).has_value());

  auto transposed = model::Model::load(path, {.activation = {}, .transpose_down = {.wanted = true}});
  EXPECT_FALSE(transposed.why_not_by_neuron(0).has_value());
  ASSERT_FALSE(transposed.prepare_sparse().has_value());
  const double error = transposed.requantization_error().relative();
  EXPECT_GT(error, 0);
  EXPECT_LT(error, 0.03) << "Q6_K of Gaussian values is 1.7 % off";

  ThreadTeam team(2);
  const auto run = [&](model::Model& m, engine::Sparsity sparsity) {
    const auto device = cpu::make_device(team);
    engine::Engine engine(m, *device, {.sparsity = sparsity});
    engine::Sequence text = engine.sequence();
    const std::vector<int32_t> ids = {5, 17, 100, 33};
    const auto logits = engine.eval(text, ids);
    return std::vector<float>(logits.begin(), logits.end());
  };
  const auto dense = run(plain, engine::Sparsity::off), sparse = run(transposed, engine::Sparsity::exact);
  double difference = 0, size = 0;
  for (size_t i = 0; i < dense.size(); ++i) {
    difference += std::pow(static_cast<double>(sparse[i]) - dense[i], 2);
    size += std::pow(static_cast<double>(dense[i]), 2);
  }
  // The down projections are a part of what makes a logit: their error is not amplified.
  EXPECT_LT(std::sqrt(difference / size), 2 * error);
  EXPECT_GT(difference, 0);
}

// A better type loses less; what was made once is taken from the file beside the model, bit for bit, and made anew
// where the file is another model's or of another type.
TEST_F(ForeignFile, TakesATypeAndIsKeptBesideTheModel) {
  const auto path = test::write_tiny_model(dir_ / "m.gguf", {.type = DType::q4_k, .n_embd = 256, .n_ff = 512});
  const auto kept = model::transposed_path(path);
  EXPECT_EQ(kept, dir_ / "m.down_t.gguf");
  const auto load = [](const std::filesystem::path& file, std::optional<DType> type, bool cached) {
    auto m = model::Model::load(file, {.activation = {}, .transpose_down = {true, type, cached}});
    EXPECT_FALSE(m.prepare_sparse().has_value());
    return m;
  };
  const auto same = [](const model::Model& a, const model::Model& b) {
    for (size_t l = 0; l < a.weights().layers.size(); ++l) {
      const Matrix &x = a.weights().layers[l].ffn.down_t, &y = b.weights().layers[l].ffn.down_t;
      if (x.type != y.type || x.rows != y.rows || std::memcmp(x.data, y.data, x.bytes()) != 0) return false;
    }
    return true;
  };
  const auto own = load(path, {}, false), better = load(path, DType::q8_0, false);
  EXPECT_FALSE(std::filesystem::exists(kept));
  EXPECT_EQ(better.weights().layers[0].ffn.down_t.type, DType::q8_0);
  EXPECT_LT(better.requantization_error().relative(), 0.2 * own.requantization_error().relative());

  for (const std::optional<DType> type : {std::optional<DType>(), std::optional(DType::q8_0), std::optional<DType>()}) {
    const model::Model& expected = type ? better : own;
    const auto made = load(path, type, true);
    ASSERT_TRUE(std::filesystem::exists(kept));
    EXPECT_TRUE(made.owns(made.weights().layers[0].ffn.down_t)) << "quantised again";
    const auto mapped = load(path, type, true);
    EXPECT_FALSE(mapped.owns(mapped.weights().layers[0].ffn.down_t)) << "mapped";
    EXPECT_TRUE(same(expected, made) && same(expected, mapped));
    EXPECT_EQ(mapped.requantization_error().relative(), expected.requantization_error().relative());
  }
  const auto other =
      test::write_tiny_model(dir_ / "other.gguf", {.type = DType::q4_k, .n_embd = 256, .n_ff = 512, .seed = 9});
  std::filesystem::copy(kept, model::transposed_path(other));
  const auto made = load(other, {}, true);
  EXPECT_TRUE(made.owns(made.weights().layers[0].ffn.down_t)) << "the file was another model's";

  std::filesystem::resize_file(kept, std::filesystem::file_size(kept) - 40);
  auto broken = model::Model::load(path, {.activation = {}, .transpose_down = {true, {}, true}});
  const std::string message = test::message_of([&] { (void)broken.prepare_sparse(); });
  EXPECT_NE(message.find("m.down_t.gguf"), std::string::npos) << message;
}

TEST_F(ForeignFile, OfRowsThatNoBlockDividesSaysSo) {
  const auto path =
      test::write_tiny_model(dir_ / "m.gguf", {.type = DType::f16, .down_type = DType::q4_k, .n_ff = 256});
  auto m = model::Model::load(path, {.activation = {}, .transpose_down = {.wanted = true}});
  const auto reason = m.prepare_sparse();
  ASSERT_TRUE(reason.has_value());
  EXPECT_NE(reason->find("256"), std::string::npos) << *reason;
}

}  // namespace
}  // namespace hearth
