// The FFN of the GPU device against the reference: dense and sparse, every activation and type.
#include <fmt/format.h>

#include <numeric>

#include "core/error.h"
#include "twin_ffn.h"

namespace hearth::test {
namespace {

TEST_F(GpuFfnTest, DenseEveryTypeAndLayout) {
  std::mt19937 rng(1);
  for (const DType type : gpu_types()) {
    for (const bool transposed : {false, true}) {
      for (const bool gated : {true, false}) {
        for (const int64_t T : {1, 3, 6, 40}) {
          for (const auto& [n_of_case, least] : {std::pair<int64_t, int64_t>{352, 160}, {1056, 288}}) {
            const int64_t n = transposed ? n_of_case : whole_blocks(type, n_of_case);
            const int64_t n_embd = whole_blocks(type, least);
            SCOPED_TRACE(
                fmt::format("{} transposed {} gated {} T {} n {}", traits(type).name, transposed, gated, T, n));
            const TwinAct in = make_input(rng, T, n_embd);
            const TwinShard shard(*ref_, *gpu_, rng, type, n, n_embd, gated, transposed);
            const Twin<float> bias(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
            Twin<float> y(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(T * n_embd)));
            run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
              d.ffn_dense(shard.on(s), in.on(s), T, {bias.on(s), n_embd}, y.on(s), nullptr);
            });
            EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), bound(type, T));
          }
        }
      }
    }
  }
}

// Rows of several batches of chunks, of a whole one and of more than a tile; the last warp has fewer neurons.
TEST_F(GpuFfnTest, DenseOfLongRows) {
  std::mt19937 rng(12);
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0, DType::q4_k, DType::q6_k, DType::q3_k, DType::mxfp4}) {
    for (const int64_t n_embd : {1024, 1280, 2304, 12288, 12800}) {
      for (const bool gated : {true, false}) {
        SCOPED_TRACE(fmt::format("{} n_embd {} gated {}", traits(type).name, n_embd, gated));
        const TwinAct in = make_input(rng, 1, n_embd);
        const TwinShard shard(*ref_, *gpu_, rng, type, 32 * 3, n_embd, gated, true);
        Twin<float> y(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
        run_twins<float>(*ref_, *gpu_, {&y},
                         [&](int s, Device& d) { d.ffn_dense(shard.on(s), in.on(s), 1, {}, y.on(s), nullptr); });
        EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), bound(type, 1));
      }
    }
  }
}

TEST_F(GpuFfnTest, DenseEveryActivation) {
  std::mt19937 rng(2);
  const int64_t n = 203, n_embd = 128;  // a number of neurons that fills no block
  for (const Activation act : {Activation::relu, Activation::fat_relu, Activation::relu2, Activation::silu,
                               Activation::gelu, Activation::gelu_tanh}) {
    for (const bool up_relu : {false, true}) {
      for (const int64_t T : {1, 5}) {
        SCOPED_TRACE(fmt::format("act {} up_relu {} T {}", static_cast<int>(act), up_relu, T));
        const TwinAct in = make_input(rng, T, n_embd);
        TwinShard shard(*ref_, *gpu_, rng, DType::f32, n, n_embd, true, true);
        shard.act = act, shard.up_relu = up_relu, shard.biased = up_relu;
        Twin<float> y(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(T * n_embd)));
        run_twins<float>(*ref_, *gpu_, {&y},
                         [&](int s, Device& d) { d.ffn_dense(shard.on(s), in.on(s), T, {}, y.on(s), nullptr); });
        EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), 4e-6);
      }
    }
  }
}

TEST_F(GpuFfnTest, DenseOfVeryFewNeurons) {
  std::mt19937 rng(3);
  for (const int64_t n : {1, 2, 3, 4, 5, 33}) {
    SCOPED_TRACE(n);
    const TwinAct in = make_input(rng, 1, 64);
    const TwinShard shard(*ref_, *gpu_, rng, DType::f16, n, 64, true, true);
    Twin<float> y(*ref_, *gpu_, random_normal(rng, 64));
    run_twins<float>(*ref_, *gpu_, {&y},
                     [&](int s, Device& d) { d.ffn_dense(shard.on(s), in.on(s), 1, {}, y.on(s), nullptr); });
    EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), 2e-6);
  }
}

class GpuSparseTest : public GpuFfnTest {
 protected:
  // Runs the sparse FFN on both; ids, their number and y must agree. No pre-activation is near the threshold: biases
  // are chosen by the reference's own values so that each is at least `kMargin` away.
  static void expect_same(std::mt19937& rng, TwinShard& shard, int64_t n_embd, float threshold,
                          const std::vector<int32_t>* predicted, double error) {
    constexpr float kMargin = 0.02f;
    const int64_t n = shard.gate.on(kRef).rows;
    const TwinAct in = make_input(rng, 1, n_embd);
    Twin<float> z(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(n)));
    const MatmulPart part{.w = shard.gate.on(kRef), .y = z.on(kRef)};
    ref_->matmul({&part, 1}, in.on(kRef), 1);
    std::vector<float> bias;
    for (const float v : z.read(kRef)) bias.push_back(v > threshold ? kMargin : -kMargin);
    shard.gate_bias = Twin<float>(*ref_, *gpu_, bias);
    TwinLists named(*ref_, *gpu_, 1, n);
    if (predicted != nullptr) named.write(*ref_, *gpu_, 0, *predicted);
    const Twin<float> y_bias(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
    Twin<float> y(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
    const Twin<int32_t> n_active(*ref_, *gpu_, {-1});
    run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device&) {
      SparseArgs sparse{.threshold = threshold, .n_active = n_active.on(s)};
      if (predicted != nullptr) sparse.candidates = named.on(s);
      sparse_ffn(s).ffn_sparse(shard.on(s), sparse, in.on(s), 1, {y_bias.on(s), n_embd}, y.on(s), nullptr);
    });
    EXPECT_EQ(n_active.read(kGpu), n_active.read(kRef));
    EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), error);
  }
};

TEST_F(GpuSparseTest, ExactModeFindsTheActiveNeurons) {
  std::mt19937 rng(4);
  for (const DType type : gpu_types()) {
    for (const auto& [n, least] : {std::pair<int64_t, int64_t>{1, 64}, {31, 160}, {1000, 288}, {9001, 96}}) {
      const int64_t n_embd = whole_blocks(type, least);
      for (const bool gated : {true, false}) {
        SCOPED_TRACE(fmt::format("{} n {} n_embd {} gated {}", traits(type).name, n, n_embd, gated));
        TwinShard shard(*ref_, *gpu_, rng, type, n, n_embd, gated, true);
        shard.act = gated ? Activation::relu : Activation::relu2, shard.up_relu = n == 1000;
        expect_same(rng, shard, n_embd, 0.0f, nullptr, bound(type, 1));
      }
    }
  }
}

TEST_F(GpuSparseTest, PredictedNeuronsOnly) {
  std::mt19937 rng(5);
  for (const DType type : gpu_types()) {
    for (const int keep : {0, 3, 50, 100}) {
      SCOPED_TRACE(fmt::format("{} keep {} %", traits(type).name, keep));
      const int64_t n_embd = whole_blocks(type, 160);
      TwinShard shard(*ref_, *gpu_, rng, type, 6007, n_embd, true, true);
      shard.act = Activation::relu;
      std::vector<int32_t> predicted;
      for (int32_t k = 0; k < 6007; ++k) {
        if (random_int(rng, 0, 99) < keep) predicted.push_back(k);
      }
      expect_same(rng, shard, n_embd, 0.0f, &predicted, bound(type, 1));
    }
  }
}

TEST_F(GpuSparseTest, NoNeuronIsActive) {
  std::mt19937 rng(6);
  TwinShard shard(*ref_, *gpu_, rng, DType::f16, 500, 64, true, true);
  shard.act = Activation::relu;
  expect_same(rng, shard, 64, 1000.0f, nullptr, 2e-6);
}

TEST_F(GpuSparseTest, LongRowsAndSeveralRowsOfColumnsAThread) {
  std::mt19937 rng(7);
  for (const auto& [type, n_embd] : {std::pair<DType, int64_t>{DType::f32, 2048},
                                     {DType::f32, 4100},
                                     {DType::f16, 8192},
                                     {DType::bf16, 4104},
                                     {DType::q8_0, 2048},
                                     {DType::q8_0, 8224},
                                     {DType::q4_0, 8192},
                                     {DType::q4_k, 4352},
                                     {DType::q6_k, 8192},
                                     {DType::q3_k, 5120}}) {
    for (const bool exact : {true, false}) {
      SCOPED_TRACE(fmt::format("{} n_embd {} exact {}", traits(type).name, n_embd, exact));
      TwinShard shard(*ref_, *gpu_, rng, type, 431, n_embd, true, true);
      shard.act = Activation::relu;
      std::vector<int32_t> predicted;
      for (int32_t k = 0; k < 431; k += 1 + k % 3) predicted.push_back(k);
      expect_same(rng, shard, n_embd, 0.0f, exact ? nullptr : &predicted, 2 * bound(type, 1));
    }
  }
}

TEST_F(GpuSparseTest, WeightsOfSeveralTypes) {
  std::mt19937 rng(8);
  using enum DType;
  struct Mixture {
    DType gate, up, down;
    int64_t n_embd;
  };
  for (const auto& [gate, up, down, n_embd] :
       {Mixture{q4_0, q4_0, f16, 160}, Mixture{q4_k, q4_k, q6_k, 1280}, Mixture{q5_k, q5_k, q6_k, 512},
        Mixture{q4_k, q4_k, q5_k, 4096}, Mixture{q3_k, q3_k, q5_k, 768}, Mixture{q3_k, q3_k, q4_k, 256},
        Mixture{q2_k, q2_k, q3_k, 512}, Mixture{iq4_xs, iq4_xs, q5_k, 768}, Mixture{q5_0, q5_1, q4_1, 96}}) {
    for (const bool exact : {true, false}) {
      SCOPED_TRACE(fmt::format("{} {} {} {}", traits(gate).name, traits(up).name, traits(down).name, exact));
      TwinShard shard(*ref_, *gpu_, rng, gate, 700, n_embd, true, true);
      shard.up = TwinMatrix(*ref_, *gpu_, rng, up, 700, n_embd, 0.1f);
      shard.down = TwinMatrix(*ref_, *gpu_, rng, down, 700, n_embd, 0.1f);
      shard.act = Activation::relu;
      std::vector<int32_t> predicted;
      for (int32_t k = 3; k < 700; k += 2) predicted.push_back(k);
      expect_same(rng, shard, n_embd, 0.0f, exact ? nullptr : &predicted, bound(gate, 1));
    }
  }
}

// Every block of the GPU has more neurons than it takes, or asks for, at once.
TEST_F(GpuSparseTest, MoreNeuronsThanABlocksTile) {
  std::mt19937 rng(9);
  for (const auto& [type, n, n_embd] :
       {std::tuple<DType, int64_t, int64_t>{DType::f16, 9001, 64}, {DType::q8_0, 3601, 4096}}) {
    SCOPED_TRACE(traits(type).name);
    TwinShard shard(*ref_, *gpu_, rng, type, n, n_embd, true, true);
    shard.act = Activation::relu2;
    std::vector<int32_t> all(static_cast<size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    expect_same(rng, shard, n_embd, 0.0f, &all, bound(type, 1));
  }
}

TEST_F(GpuSparseTest, RowsThatCannotBeAlignedAreRefused) {
  std::mt19937 rng(10);
  TwinShard shard(*ref_, *gpu_, rng, DType::f16, 64, 66, true, true);
  shard.act = Activation::relu;
  const TwinAct in = make_input(rng, 1, 66);
  Twin<float> y(*ref_, *gpu_, std::vector<float>(66));
  EXPECT_THROW(sparse_ffn(kGpu).ffn_sparse(shard.on(kGpu), {}, in.on(kGpu), 1, {}, y.on(kGpu), nullptr), Error);
}

}  // namespace
}  // namespace hearth::test
