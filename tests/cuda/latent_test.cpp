// Products by head, which latent attention has before and after it (attention_test.cpp), against the reference.
#include <fmt/format.h>

#include "core/latent_attention.h"
#include "few_tokens.h"

namespace hearth::test {
namespace {

class GpuLatentTest : public GpuTest {};

TEST_F(GpuLatentTest, ProductsByHead) {
  std::mt19937 rng(1);
  struct Shape {
    int64_t n_head, rows, cols, n_tail;
  };
  for (const DType type : gpu_types()) {
    for (const Shape& s : {Shape{16, 512, 128, 64}, {3, 33, 32, 8}, {2, 70, 544, 0}, {1, 1, 1024, 3}}) {
      const int64_t cols = whole_blocks(type, s.cols), n_x = s.n_head * (cols + s.n_tail),
                    n_y = s.n_head * (s.n_tail + s.rows);
      for (const int64_t T : {1, 3, 8, 9, 21}) {
        SCOPED_TRACE(fmt::format("{} heads {} rows {} cols {} tail {} T {}", traits(type).name, s.n_head, s.rows, cols,
                                 s.n_tail, T));
        // Whole multiples of amax / 127 in every block: the reference's 8-bit form of them loses nothing.
        std::vector<float> values;
        for (int64_t i = 0; i < T * n_x; ++i) {
          const int64_t at = i % (cols + s.n_tail);
          values.push_back(static_cast<float>(at % 32 == 7 ? 127 : random_int(rng, -127, 127)) / 64.0f);
        }
        const Twin<float> x(*ref_, *gpu_, values);
        const TwinMatrix w(*ref_, *gpu_, rng, type, s.n_head * s.rows, cols);
        Twin<float> y(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(T * n_y), kNan));
        const auto run = [&](int side, int64_t t, int64_t n) {
          const HeadProducts p{w.on(side), s.n_head, s.n_tail, x.on(side) + t * n_x, y.on(side) + t * n_y};
          device(side).latent_attention()->head_products(p, n);
        };
        run_twins<float>(*ref_, *gpu_, {&y}, [&](int side, Device&) { run(side, 0, T); });
        const std::vector<float> got = y.read(kGpu);
        EXPECT_LE(relative_error(got, y.read(kRef)), 1e-5);
        for (int64_t i = 0; i < T * n_y; ++i) {  // what is passed through has the same bits
          const int64_t at = i % (s.n_tail + s.rows), head = i / (s.n_tail + s.rows);
          if (at >= s.n_tail) continue;
          ASSERT_EQ(got[static_cast<size_t>(i)], values[static_cast<size_t>(head * (cols + s.n_tail) + cols + at)]);
        }
        if (T > kFewTokens) continue;
        y.reset(kGpu);
        expect_as_alone(*gpu_, T, {{y, T}}, [&](int64_t t, int64_t n) { run(kGpu, t, n); });
      }
    }
  }
}

}  // namespace
}  // namespace hearth::test
