// The GPU device's predictors against the reference: the same neurons.
#include <fmt/format.h>

#include "twin_predictor.h"

namespace hearth::test {
namespace {

class GpuPredictTest : public GpuFfnTest {
 protected:
  // Both devices must name the same neurons, and leave the rest of the lists' memory alone.
  static void expect_named(const TwinPredictor& p, const TwinAct& in, int64_t n_own, int64_t n_linked) {
    const TwinLists own(*ref_, *gpu_, 1, n_own), linked(*ref_, *gpu_, 1, n_linked);
    for (const int s : {kRef, kGpu}) {
      SCOPED_TRACE(s == kRef ? "reference" : "GPU");
      sparse_ffn(s).predict(p.on(s), in.on(s), 1, {n_own, own.on(s), n_linked, linked.on(s), {}});
      if (n_own > 0) {
        EXPECT_EQ(own.read(s, 0, n_own), p.named(0, n_own));
      }
      if (n_linked > 0) {
        EXPECT_EQ(linked.read(s, 0, n_linked, n_own % 32), p.named(n_own, n_own + n_linked));
      }
    }
    EXPECT_TRUE(own.kept_rest((n_own + 31) / 32) && linked.kept_rest((n_own % 32 + n_linked + 31) / 32));
    EXPECT_TRUE(n_linked > 0 || linked.kept_rest(0));
  }
  static void expect_predicted(std::mt19937& rng, const PredictorShape& shape, double density) {
    const TwinAct in = make_input(rng, 1, shape.n_embd);
    const TwinPredictor p(*ref_, *gpu_, rng, shape, in.on(kRef), density);
    for (const int64_t n_own : {int64_t{0}, shape.n / 3, shape.n}) {
      for (const int64_t n_linked : {int64_t{0}, (shape.n - n_own + 1) / 2, shape.n - n_own}) {
        SCOPED_TRACE(fmt::format("n {} n_embd {} rank {} fc1 {} fc2 {} n_own {} n_linked {} density {}", shape.n,
                                 shape.n_embd, shape.rank, traits(shape.fc1).name, traits(shape.fc2).name, n_own,
                                 n_linked, density));
        expect_named(p, in, n_own, n_linked);
      }
    }
  }
};

TEST_F(GpuPredictTest, EveryTypeAndShape) {
  std::mt19937 rng(20);
  const auto expect = [&](DType fc1, DType fc2) {
    expect_predicted(rng, {1003, whole_blocks(fc1, 288), whole_blocks(fc2, 96), fc1, fc2, true, true}, 0.1);
    expect_predicted(rng, {33, whole_blocks(fc1, 96), whole_blocks(fc2, 1056), fc1, fc2, false, false}, 0.3);
  };
  constexpr DType kOwnKernels[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0};
  for (const DType fc1 : kOwnKernels) {
    for (const DType fc2 : kOwnKernels) expect(fc1, fc2);
  }
  for (const DType type : gpu_types()) expect(type, type), expect(DType::f16, type), expect(type, DType::f16);
}

// Both products in one kernel up to 8 rows of fc1 a multiprocessor, in two beyond.
TEST_F(GpuPredictTest, LargePredictors) {
  std::mt19937 rng(26);
  for (const DType type : gpu_types()) {
    expect_predicted(rng, {9001, whole_blocks(type, 1120), 1024, type, type, true, true}, 0.1);
    expect_predicted(rng, {70, whole_blocks(type, 96), whole_blocks(type, 1344), type, type}, 0.2);
  }
  expect_predicted(rng, {8000, 4096, 1024, DType::f16, DType::f16}, 0.1);
}

TEST_F(GpuPredictTest, ReluAndBias) {
  std::mt19937 rng(21);
  for (const bool relu : {false, true}) {
    for (const bool biased : {false, true}) {
      expect_predicted(rng, {500, 160, 64, DType::f16, DType::q8_0, relu, biased}, 0.2);
    }
  }
}

TEST_F(GpuPredictTest, NoneAllAndOneNeuron) {
  std::mt19937 rng(22);
  for (const double density : {0.0, 0.02, 1.0}) {
    expect_predicted(rng, {9001, 64, 32}, density);
    expect_predicted(rng, {1, 64, 32}, density);
  }
}

TEST_F(GpuPredictTest, CopyOfTheGate) {
  std::mt19937 rng(23);
  for (const DType type : gpu_types()) {
    expect_predicted(rng, {777, whole_blocks(type, 288), 0, type, type}, 0.1);
    expect_predicted(rng, {777, whole_blocks(type, 4128), 0, type, type}, 0.1);
  }
}

// Rows that 16-byte loads cannot be aligned to, or too long for a block's registers.
TEST_F(GpuPredictTest, ShapesWithoutTheirOwnKernel) {
  std::mt19937 rng(24);
  expect_predicted(rng, {300, 96, 33}, 0.2);
  expect_predicted(rng, {300, 99, 40, DType::bf16, DType::f32, true, true}, 0.2);
  expect_predicted(rng, {70, 9000, 0, DType::f32, DType::f32}, 0.2);
}

}  // namespace
}  // namespace hearth::test
