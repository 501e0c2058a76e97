#pragma once
// What every kind of Products must do, compared with plain loops in double precision; used for the host's and a GPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/products.h"
#include "support/random.h"

namespace hearth::test {

// A host matrix with what it holds, as f32.
struct HostMatrix {
  HostMatrix(std::mt19937& rng, DType type, int64_t rows, int64_t cols)
      : values(random_normal(rng, static_cast<size_t>(rows * cols))),
        storage(static_cast<size_t>(rows) * row_bytes(type, cols)),
        matrix{type, rows, cols, storage.data()} {
    traits(type).from_float(values.data(), storage.data(), rows * cols);
    traits(type).to_float(storage.data(), values.data(), rows * cols);
  }
  HostMatrix(const HostMatrix&) = delete;
  HostMatrix& operator=(const HostMatrix&) = delete;
  std::vector<float> values;
  std::vector<std::byte> storage;
  Matrix matrix;
};

inline std::vector<float> read(Products& products, const Block& b) {
  std::vector<float> values(static_cast<size_t>(b.rows * b.cols));
  products.read(b, values.data());
  return values;
}

struct ProductShape {
  int64_t rows, depth, cols;
  bool a_transposed = false, b_transposed = false;
  ProductForm form = {};
};

// Operands and result are parts of larger blocks, filled with NaN outside of the operands; around the result nothing
// may change.
inline void check_product(Products& products, const ProductShape& s) {
  SCOPED_TRACE(testing::Message() << s.rows << " x " << s.depth << " x " << s.cols << (s.a_transposed ? " aT" : "")
                                  << (s.b_transposed ? " bT" : "") << " scale " << s.form.scale
                                  << (s.form.accumulate ? " added" : ""));
  std::mt19937 rng(static_cast<unsigned>(s.rows * 31 + s.depth * 7 + s.cols));
  const auto stored = [&](int64_t rows, int64_t cols, bool is_transposed) {
    return is_transposed ? std::pair(cols, rows) : std::pair(rows, cols);
  };
  constexpr int64_t kBefore = 3, kAfter = 2;  // rows and columns around each part
  const auto framed = [&](int64_t rows, int64_t cols, const std::vector<float>& inner, float outside) {
    const int64_t width = cols + kBefore + kAfter;
    std::vector<float> all(static_cast<size_t>((rows + kBefore + kAfter) * width), outside);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c)
        all[static_cast<size_t>((r + kBefore) * width + c + kBefore)] = inner[static_cast<size_t>(r * cols + c)];
    }
    OwnedBlock b = products.upload({DType::f32, rows + kBefore + kAfter, width, all.data()});
    return std::pair(std::move(b), all);
  };
  const auto [a_rows, a_cols] = stored(s.rows, s.depth, s.a_transposed);
  const auto [b_rows, b_cols] = stored(s.depth, s.cols, s.b_transposed);
  const auto a = random_normal(rng, static_cast<size_t>(a_rows * a_cols)),
             b = random_normal(rng, static_cast<size_t>(b_rows * b_cols)),
             c = random_normal(rng, static_cast<size_t>(s.rows * s.cols));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto [a_block, a_all] = framed(a_rows, a_cols, a, nan);
  const auto [b_block, b_all] = framed(b_rows, b_cols, b, nan);
  const auto [c_block, c_all] = framed(s.rows, s.cols, c, 7.0f);
  products.multiply({a_block->part(kBefore, kBefore, a_rows, a_cols), s.a_transposed},
                    {b_block->part(kBefore, kBefore, b_rows, b_cols), s.b_transposed},
                    c_block->part(kBefore, kBefore, s.rows, s.cols), s.form);
  std::vector<float> expected = c_all;
  const int64_t width = c_block->cols;
  const std::vector<float> got = read(products, c_block);
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t col = 0; col < s.cols; ++col) {
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < s.depth; ++k) {
        const double x = a[static_cast<size_t>(s.a_transposed ? k * s.rows + r : r * s.depth + k)];
        const double y = b[static_cast<size_t>(s.b_transposed ? col * s.depth + k : k * s.cols + col)];
        sum += x * y, magnitude += std::fabs(x * y);
      }
      const double before = s.form.accumulate ? c[static_cast<size_t>(r * s.cols + col)] : 0;
      const double want = before + static_cast<double>(s.form.scale) * sum;
      const auto at = static_cast<size_t>((r + kBefore) * width + col + kBefore);
      // f32 sums in any order: the error is at most that of a chain, in practice a walk's.
      const double bound = (std::fabs(s.form.scale) * magnitude + std::fabs(before)) *
                           (8 + std::sqrt(static_cast<double>(s.depth))) * 0x1p-24;
      ASSERT_LT(bound, 0.05 * (1 + std::fabs(s.form.scale)) * std::sqrt(static_cast<double>(s.depth)));
      ASSERT_NEAR(static_cast<double>(got[at]), want, bound) << "row " << r << ", column " << col;
      expected[at] = got[at];
    }
  }
  EXPECT_EQ(got, expected) << "something beside the result was written";
}

inline void check_products(Products& products) {
  for (const bool at : {false, true}) {
    for (const bool bt : {false, true}) {
      check_product(products, {1, 1, 1, at, bt});
      check_product(products, {33, 65, 17, at, bt});
      check_product(products, {7, 300, 129, at, bt, {.scale = -0.5f, .accumulate = true}});
      check_product(products, {300, 5, 40, at, bt, {.scale = 2.0f}});
      check_product(products, {2, 5000, 3, at, bt});  // longer than one product of the host's
      check_product(products, {3, 2, 4500, at, bt, {.accumulate = true}});
      check_product(products, {1, 70, 260, at, bt});
    }
  }
}

// Every type a model may have comes and goes unchanged, into a part of a block too.
inline void check_transfers(Products& products) {
  std::mt19937 rng(5);
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0}) {
    SCOPED_TRACE(traits(type).name);
    const HostMatrix m(rng, type, 37, 96);
    EXPECT_EQ(read(products, products.upload(m.matrix)), m.values);
    const OwnedBlock large = products.allocate(40, 101);
    const Block part = large->part(2, 4, 37, 96);
    products.write(m.matrix, part);
    std::vector<float> rows(37 * 100, -1.0f), whole(40 * 101);
    products.read(part, rows.data(), 100);
    products.read(large, whole.data());
    for (size_t r = 0; r < 40; ++r) {
      for (size_t c = 0; c < 101; ++c) {
        const bool inside = r >= 2 && r < 39 && c >= 4 && c < 100;
        ASSERT_EQ(whole[r * 101 + c], inside ? m.values[(r - 2) * 96 + c - 4] : 0.0f) << r << ", " << c;
      }
    }
    for (size_t r = 0; r < 37; ++r) {
      for (size_t c = 0; c < 100; ++c) ASSERT_EQ(rows[r * 100 + c], c < 96 ? m.values[r * 96 + c] : -1.0f);
    }
    const OwnedBlock other = products.allocate(37, 96);
    products.copy(part, other);
    EXPECT_EQ(read(products, other), m.values);
  }
}

inline void check_memory(Products& products) {
  const size_t before = products.bytes();
  {
    const OwnedBlock a = products.allocate(100, 50);
    OwnedBlock b = products.allocate(10, 10);
    EXPECT_EQ(products.bytes(), before + 5100 * sizeof(float));
    OwnedBlock c = std::move(b);
    EXPECT_EQ(products.bytes(), before + 5100 * sizeof(float));
    c = OwnedBlock();
    EXPECT_EQ(read(products, a), std::vector<float>(5000));
  }
  EXPECT_EQ(products.bytes(), before);
  EXPECT_GE(products.peak_bytes(), before + 5100 * sizeof(float));
}

// Three steps against the paper's formulas in double precision.
inline void check_adam(Products& products) {
  std::mt19937 rng(8);
  const HostMatrix start(rng, DType::f32, 5, 1003);
  const OwnedBlock value = products.upload(start.matrix), gradient = products.allocate(5, 1003),
                   first = products.allocate(5, 1003), second = products.allocate(5, 1003);
  std::vector<double> x(start.values.begin(), start.values.end()), m(x.size()), v(x.size());
  for (int step = 1; step <= 3; ++step) {
    const HostMatrix g(rng, DType::f32, 5, 1003);
    products.write(g.matrix, gradient);
    const AdamStep s{.rate = 0.01f, .decay = 0.1f, .step = step};
    products.adam(value, gradient, first, second, s);
    for (size_t i = 0; i < x.size(); ++i) {
      const double d = g.values[i];
      m[i] = 0.9 * m[i] + 0.1 * d, v[i] = 0.999 * v[i] + 0.001 * d * d;
      x[i] -= 0.01 *
              (m[i] / (1 - std::pow(0.9, step)) / (std::sqrt(v[i] / (1 - std::pow(0.999, step))) + 1e-8) + 0.1 * x[i]);
    }
  }
  const std::vector<float> got = read(products, value);
  // A step moves by about the rate; 1 - beta2 in f32 is good to 3e-5.
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(static_cast<double>(got[i]), x[i], 3 * 0.01 * 1e-3) << i;
}

}  // namespace hearth::test
