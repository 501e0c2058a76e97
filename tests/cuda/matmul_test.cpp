// Products of the GPU device against the reference: every type, one token and batches, odd shapes.
#include <fmt/format.h>

#include <array>

#include "twin.h"

namespace hearth::test {
namespace {

class GpuMatmulTest : public GpuTest {
 protected:
  // The same input on both devices, with its 8-bit form made by each: whole multiples of amax / 127 in every block, so
  // that the 8-bit form loses nothing.
  static TwinAct make_input(std::mt19937& rng, int64_t T, int64_t n) {
    std::vector<float> values;
    for (int64_t i = 0; i < T * n; ++i) {
      values.push_back(static_cast<float>(i % 32 == 7 ? 127 : random_int(rng, -127, 127)) / 64.0f);
    }
    TwinAct in(*ref_, *gpu_, T, n, values);
    for (const int s : {kRef, kGpu}) device(s).quantize(in.on(s), T, n);
    return in;
  }

  // Rounding of y[t][r], from the sum of |w x| that it is made of.
  static double tolerance(DType type, int64_t T, int64_t cols, double magnitude) {
    const double f32_sum = static_cast<double>(cols) / 32 + 24;  // a lane's chain, then the tree and the epilogue
    double relative = f32_sum * kEps;
    const bool batch = T > kFewTokens;
    if (batch && is_quantized(type)) relative += kEpsF16;  // weights rounded to f16; the inputs are exact in f16
    if (batch && type != DType::f32)
      relative += static_cast<double>(cols) * kEps / 8;    // tensor cores add in their own order
    if (batch && type == DType::f16) relative += kEpsF16;  // inputs rounded to f16
    if (batch && type == DType::bf16) relative += kEpsBf16;
    return relative * magnitude + 1e-6;
  }
  void expect_product(DType type, const TwinMatrix& w, const TwinAct& in, int64_t T, const std::vector<float>& got,
                      const std::vector<float>& want, int64_t stride = 0) {
    const Matrix& m = w.on(kRef);
    const auto x = in.x.read(kRef);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t r = 0; r < m.rows; ++r) {
        double magnitude = 2.0;  // what y held, and the bias
        for (int64_t c = 0; c < m.cols; ++c) {
          magnitude += std::fabs(static_cast<double>(w.values()[static_cast<size_t>(r * m.cols + c)]) *
                                 x[static_cast<size_t>(t * m.cols + c)]);
        }
        const auto at = static_cast<size_t>(t * (stride != 0 ? stride : m.rows) + r);
        ASSERT_NEAR(got[at], want[at], tolerance(type, T, m.cols, magnitude)) << "t " << t << " r " << r;
      }
    }
  }
};

TEST_F(GpuMatmulTest, GroupsWithBiasStrideAndResidual) {
  std::mt19937 rng(1);
  for (const DType type : gpu_types()) {
    for (const int64_t least : {32, 416, 1024}) {
      const int64_t cols = whole_blocks(type, least);
      for (const int64_t T : {1, 2, 4, 7, 33, 130}) {
        if (T > 7 && cols == 1024) continue;
        SCOPED_TRACE(fmt::format("{} cols {} T {}", traits(type).name, cols, T));
        const TwinAct in = make_input(rng, T, cols);
        const TwinMatrix a(*ref_, *gpu_, rng, type, 37, cols), b(*ref_, *gpu_, rng, type, 5, cols),
            c(*ref_, *gpu_, rng, type, 1, cols);
        const Twin<float> bias(*ref_, *gpu_, random_normal(rng, 37));
        const auto rows = static_cast<size_t>(T);
        Twin<float> ya(*ref_, *gpu_, std::vector<float>(rows * 40, kNan)),
            yb(*ref_, *gpu_, random_normal(rng, rows * 5)), yc(*ref_, *gpu_, std::vector<float>(rows, kNan));
        run_twins<float>(*ref_, *gpu_, {&ya, &yb, &yc}, [&](int s, Device& d) {
          const MatmulPart parts[] = {{.w = a.on(s), .bias = {bias.on(s), 37}, .y = ya.on(s), .y_stride = 40},
                                      {.w = b.on(s), .y = yb.on(s), .accumulate = true},
                                      {.w = c.on(s), .y = yc.on(s)}};
          d.matmul(parts, in.on(s), T);
        });
        expect_product(type, a, in, T, ya.read(kGpu), ya.read(kRef), 40);
        expect_product(type, b, in, T, yb.read(kGpu), yb.read(kRef), 5);
        expect_product(type, c, in, T, yc.read(kGpu), yc.read(kRef), 1);
        const auto padded = ya.read(kGpu);
        for (size_t t = 0; t < rows; ++t) EXPECT_TRUE(std::isnan(padded[t * 40 + 37])) << "wrote between the rows of y";
      }
    }
  }
}

TEST_F(GpuMatmulTest, ManyRowsAndRowsLongerThanATile) {
  std::mt19937 rng(2);
  for (const DType type : gpu_types()) {
    for (const auto& [rows, least] : {std::pair<int64_t, int64_t>{9001, 64}, {13, 8192 + 544}, {3, 8192}}) {
      const int64_t cols = whole_blocks(type, least);
      SCOPED_TRACE(fmt::format("{} {} x {}", traits(type).name, rows, cols));
      const TwinAct in = make_input(rng, 1, cols);
      const TwinMatrix w(*ref_, *gpu_, rng, type, rows, cols);
      Twin<float> y(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(rows), kNan));
      run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
        const MatmulPart part{.w = w.on(s), .y = y.on(s)};
        d.matmul({&part, 1}, in.on(s), 1);
      });
      expect_product(type, w, in, 1, y.read(kGpu), y.read(kRef));
    }
  }
}

TEST_F(GpuMatmulTest, ColumnsThatNoWideLoadFits) {
  std::mt19937 rng(3);
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int64_t cols : {1, 7, 203}) {
      for (const int64_t T : {1, 9}) {
        SCOPED_TRACE(fmt::format("{} cols {} T {}", traits(type).name, cols, T));
        const Twin<float> x(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(T * cols)));
        const TwinMatrix w(*ref_, *gpu_, rng, type, 11, cols);
        Twin<float> y(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(T * 11), kNan));
        run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
          const MatmulPart part{.w = w.on(s), .y = y.on(s)};
          d.matmul({&part, 1}, Act{x.on(s), nullptr}, T);
        });
        const double bound =
            T <= kFewTokens || type == DType::f32 ? 1e-6 : (type == DType::f16 ? 2 * kEpsF16 : 2 * kEpsBf16);
        EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), bound);
      }
    }
  }
}

TEST_F(GpuMatmulTest, PartsOfDifferentTypes) {
  std::mt19937 rng(4);
  for (const int64_t T : {1, 20}) {
    const TwinAct in = make_input(rng, T, 256);
    const TwinMatrix a(*ref_, *gpu_, rng, DType::q4_0, 19, 256), b(*ref_, *gpu_, rng, DType::f16, 7, 256),
        c(*ref_, *gpu_, rng, DType::q8_0, 3, 256);
    const auto rows = static_cast<size_t>(T);
    Twin<float> ya(*ref_, *gpu_, std::vector<float>(rows * 19, kNan)),
        yb(*ref_, *gpu_, std::vector<float>(rows * 7, kNan)), yc(*ref_, *gpu_, std::vector<float>(rows * 3, kNan));
    run_twins<float>(*ref_, *gpu_, {&ya, &yb, &yc}, [&](int s, Device& d) {
      const MatmulPart parts[] = {{a.on(s), {}, ya.on(s)}, {b.on(s), {}, yb.on(s)}, {c.on(s), {}, yc.on(s)}};
      d.matmul(parts, in.on(s), T);
    });
    expect_product(DType::q4_0, a, in, T, ya.read(kGpu), ya.read(kRef));
    expect_product(DType::f16, b, in, T, yb.read(kGpu), yb.read(kRef));
    expect_product(DType::q8_0, c, in, T, yc.read(kGpu), yc.read(kRef));
  }
}

}  // namespace
}  // namespace hearth::test
