// Every operation on 2 to 8 tokens gives each of them the bits that it has alone: all types, odd sizes, every kernel.
#include "few_tokens.h"

#include <optional>

#include "twin_mailbox.h"
#include "twin_predictor.h"

namespace hearth::test {
namespace {

class GpuAmongOthersTest : public GpuFfnTest {
 protected:
  static Twin<float> random(std::mt19937& rng, int64_t n) {
    return {*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n))};
  }
  static Twin<int32_t> counts(int64_t T) { return {*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(T), -7)}; }
  // Random lists of n neurons for each of T tokens.
  static TwinLists random_lists(std::mt19937& rng, int64_t T, int64_t n, double density) {
    TwinLists lists(*ref_, *gpu_, T, n);
    std::bernoulli_distribution named(density);
    for (int64_t t = 0; t < T; ++t) {
      std::vector<int32_t> ids;
      for (int32_t k = 0; k < n; ++k) {
        if (named(rng)) ids.push_back(k);
      }
      lists.write(*ref_, *gpu_, t, ids);
    }
    return lists;
  }
};

TEST_F(GpuAmongOthersTest, EmbedNormAndQuantize) {
  std::mt19937 rng(1);
  const int64_t T = 7, n = 544;
  const TwinMatrix table(*ref_, *gpu_, rng, DType::q4_0, 97, n), positions(*ref_, *gpu_, rng, DType::f16, 50, n);
  const Twin<int32_t> ids(*ref_, *gpu_, {96, 0, 5, 5, 17, 3, 8}), pos(*ref_, *gpu_, {3, 4, 5, 6, 7, 0, 9});
  const TwinAct x(*ref_, *gpu_, T, n, std::vector<float>(static_cast<size_t>(T * n), kNan));
  expect_as_alone(*gpu_, T, {{x.x, T}}, [&](int64_t t, int64_t count) {
    gpu_->embed(table.on(kGpu), ids.on(kGpu) + t, positions.on(kGpu), pos.on(kGpu) + t, 2, count, x.on(kGpu, t).x);
  });
  const Twin<float> weight = random(rng, n), bias = random(rng, n);
  for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
    NormArgs norm{kind, {weight.on(kGpu), n}, {}, 1e-5f, n};
    if (kind == NormKind::layer) norm.bias = {bias.on(kGpu), n};
    const TwinAct normed(*ref_, *gpu_, T, n, std::vector<float>(static_cast<size_t>(T * n), kNan));
    const TwinMatrix w(*ref_, *gpu_, rng, DType::q8_0, 33, n);
    const Twin<float> y = random(rng, T * 33);
    expect_as_alone(*gpu_, T, {{normed.x, T}, {y, T}}, [&](int64_t t, int64_t count) {
      gpu_->norm(norm, x.on(kGpu, t).x, count, normed.on(kGpu, t));
      const MatmulPart part{.w = w.on(kGpu), .y = y.on(kGpu) + t * 33};
      gpu_->matmul({&part, 1}, normed.on(kGpu, t), count);
    });
  }
}

TEST_F(GpuAmongOthersTest, Products) {
  std::mt19937 rng(2);
  struct Case {
    int64_t rows, cols;
  };
  // Few rows, two and four of them a warp, rows of more than a tile, and of no whole number of chunks.
  for (const DType type : gpu_types()) {
    for (const auto& [rows, least] : {Case{37, 416}, {2500, 64}, {4301, 160}, {9001, 32}, {13, 8192 + 544}, {203, 45}}) {
      const int64_t cols = whole_blocks(type, least);
      for (const int64_t T : {2, 3, 5, 8}) {
        SCOPED_TRACE(fmt::format("{} {} x {} T {}", traits(type).name, rows, cols, T));
        const TwinAct in = make_input(rng, T, cols);
        const TwinMatrix a(*ref_, *gpu_, rng, type, rows, cols), b(*ref_, *gpu_, rng, type, 5, cols);
        const Twin<float> bias = random(rng, rows), ya = random(rng, T * rows), yb = random(rng, T * 5);
        expect_as_alone(*gpu_, T, {{ya, T}, {yb, T}}, [&, rows = rows](int64_t t, int64_t count) {
          const MatmulPart parts[] = {
              {.w = a.on(kGpu), .bias = {bias.on(kGpu), rows}, .y = ya.on(kGpu) + t * rows, .accumulate = true},
              {.w = b.on(kGpu), .y = yb.on(kGpu) + t * 5}};
          gpu_->matmul(parts, in.on(kGpu, t), count);
        });
      }
    }
  }
}

// Normed on the way, in parts of two types.
TEST_F(GpuAmongOthersTest, ProductsOfANorm) {
  std::mt19937 rng(3);
  for (const DType type : gpu_types()) {
    for (const int64_t least : {32, 416, 4096}) {
      const int64_t cols = whole_blocks(type, least);
      const int64_t T = 6, rows = 4500;
      SCOPED_TRACE(fmt::format("{} cols {}", traits(type).name, cols));
      const Twin<float> x = random(rng, T * cols), weight = random(rng, cols);
      const TwinMatrix a(*ref_, *gpu_, rng, type, rows, cols), b(*ref_, *gpu_, rng, DType::f32, 7, cols);
      const TwinAct normed(*ref_, *gpu_, T, cols, std::vector<float>(static_cast<size_t>(T * cols), kNan));
      const Twin<float> ya = random(rng, T * rows), yb = random(rng, T * 7);
      expect_as_alone(*gpu_, T, {{normed.x, T}, {ya, T}, {yb, T}}, [&](int64_t t, int64_t count) {
        const MatmulPart parts[] = {{a.on(kGpu), {}, ya.on(kGpu) + t * rows}, {b.on(kGpu), {}, yb.on(kGpu) + t * 7}};
        const NormArgs norm{NormKind::rms, {weight.on(kGpu), cols}, {}, 1e-5f, cols};
        gpu_->matmul(parts, Input(norm, x.on(kGpu) + t * cols, normed.on(kGpu, t)), count);
      });
    }
  }
}

TEST_F(GpuAmongOthersTest, DenseFfn) {
  std::mt19937 rng(4);
  for (const DType type : gpu_types()) {
    for (const bool transposed : {false, true}) {
      for (const auto& [n_of_case, least] : {std::pair<int64_t, int64_t>{352, 160}, {1056, 288}, {3, 64}, {9203, 96}}) {
        if (!transposed && n_of_case % 32 != 0) continue;
        const int64_t n = transposed ? n_of_case : whole_blocks(type, n_of_case), n_embd = whole_blocks(type, least);
        for (const int64_t T : {2, 8}) {
          SCOPED_TRACE(fmt::format("{} transposed {} n {} T {}", traits(type).name, transposed, n, T));
          const TwinAct in = make_input(rng, T, n_embd);
          const TwinShard shard(*ref_, *gpu_, rng, type, n, n_embd, n_of_case != 352, transposed);
          const Twin<float> bias = random(rng, n_embd), y = random(rng, T * n_embd);
          expect_as_alone(*gpu_, T, {{y, T}}, [&, n_embd = n_embd](int64_t t, int64_t count) {
            gpu_->ffn_dense(shard.on(kGpu), in.on(kGpu, t), count, {bias.on(kGpu), n_embd}, y.on(kGpu) + t * n_embd,
                            nullptr);
          });
        }
      }
    }
  }
}

TEST_F(GpuAmongOthersTest, SparseFfn) {
  std::mt19937 rng(5);
  struct Case {
    int64_t n, n_embd;
  };
  for (const DType type : gpu_types()) {
    for (const auto& [n, least] : {Case{1, 64}, {31, 160}, {1000, 288}, {9001, 96}, {431, 4096}}) {
      const int64_t n_embd = whole_blocks(type, least);
      for (const bool exact : {true, false}) {
        const int64_t T = n == 1000 ? 8 : 3;
        SCOPED_TRACE(fmt::format("{} n {} n_embd {} {}", traits(type).name, n, n_embd, exact ? "exact" : "named"));
        const TwinAct in = make_input(rng, T, n_embd);
        TwinShard shard(*ref_, *gpu_, rng, type, n, n_embd, true, true);
        shard.act = Activation::relu;
        const TwinLists named = random_lists(rng, T, n, 0.3);
        const Twin<float> bias = random(rng, n_embd), y = random(rng, T * n_embd);
        const Twin<int32_t> n_active = counts(T);
        expect_as_alone(*gpu_, T, {{y, T}, {n_active, T}}, [&, n_embd = n_embd](int64_t t, int64_t count) {
          SparseArgs sparse{.threshold = 0.1f, .n_active = n_active.on(kGpu) + t};
          if (!exact) sparse.candidates = named.on(kGpu, t);
          sparse_ffn(kGpu).ffn_sparse(shard.on(kGpu), sparse, in.on(kGpu, t), count, {bias.on(kGpu), n_embd},
                                      y.on(kGpu) + t * n_embd, nullptr);
        });
      }
    }
  }
}

// Shards that the kernels for masks cannot take.
TEST_F(GpuAmongOthersTest, SparseFfnOfSeveralTypes) {
  std::mt19937 rng(6);
  for (const bool exact : {true, false}) {
    const int64_t T = 4, n = 700, n_embd = 160;
    const TwinAct in = make_input(rng, T, n_embd);
    TwinShard shard(*ref_, *gpu_, rng, DType::q4_0, n, n_embd, true, true);
    shard.down = TwinMatrix(*ref_, *gpu_, rng, DType::f16, n, n_embd, 0.1f);
    shard.act = Activation::relu;
    const TwinLists named = random_lists(rng, T, n, 0.4);
    const Twin<float> y = random(rng, T * n_embd);
    const Twin<int32_t> n_active = counts(T);
    expect_as_alone(*gpu_, T, {{y, T}, {n_active, T}}, [&](int64_t t, int64_t count) {
      SparseArgs sparse{.n_active = n_active.on(kGpu) + t};
      if (!exact) sparse.candidates = named.on(kGpu, t);
      sparse_ffn(kGpu).ffn_sparse(shard.on(kGpu), sparse, in.on(kGpu, t), count, {}, y.on(kGpu) + t * n_embd, nullptr);
    });
  }
}

// Named by a predictor, some of them read over the link.
TEST_F(GpuAmongOthersTest, PredictedAndLinkedNeurons) {
  std::mt19937 rng(7);
  for (const DType type : gpu_types()) {
    for (const int64_t least : {96, 1344, 33}) {  // in one kernel, in two, and by ordinary products
      if (is_quantized(type) && least == 33) continue;
      const int64_t rank = whole_blocks(type, least);
      const int64_t T = 5, n = 903, n_linked = 70, n_embd = whole_blocks(type, 288);
      SCOPED_TRACE(fmt::format("{} rank {}", traits(type).name, rank));
      const TwinAct in = make_input(rng, T, n_embd);
      TwinShard shard(*ref_, *gpu_, rng, type, n, n_embd, true, true),
          linked(*ref_, *gpu_, rng, type, n_linked, n_embd, true, true);
      shard.act = linked.act = Activation::relu;
      HostShard pinned(*gpu_, linked.on(kRef));
      const PredictorShape shape{n + n_linked, n_embd, rank, type, type, true, true};
      const TwinPredictor p(*ref_, *gpu_, rng, shape, in.on(kRef), 0.3);
      const TwinLists own(*ref_, *gpu_, T, n), far(*ref_, *gpu_, T, n_linked);
      const Twin<float> y = random(rng, T * n_embd);
      const Twin<int32_t> n_active = counts(T), n_far = counts(T);
      const FfnShard far_shard = gpu_->cold_rows()->link(pinned.shard(), pinned.link_memory());
      expect_as_alone(*gpu_, T, {{y, T}, {n_active, T}, {n_far, T}}, [&](int64_t t, int64_t count) {
        sparse_ffn(kGpu).predict(p.on(kGpu), in.on(kGpu, t), count,
                                 {n, own.on(kGpu, t), n_linked, far.on(kGpu, t), {}});
        const LinkedNeurons neurons{far_shard, far.on(kGpu, t), n_far.on(kGpu) + t};
        SparseArgs sparse{.candidates = own.on(kGpu, t), .n_active = n_active.on(kGpu) + t};
        sparse.linked = &neurons;
        sparse_ffn(kGpu).ffn_sparse(shard.on(kGpu), sparse, in.on(kGpu, t), count, {}, y.on(kGpu) + t * n_embd,
                                    nullptr);
      });
      EXPECT_EQ(own.read(kGpu, 0, n), p.named(0, n));
      EXPECT_EQ(far.read(kGpu, 0, n_linked, n % 32), p.named(n, n + n_linked));
    }
  }
}

TEST_F(GpuAmongOthersTest, Argmax) {
  std::mt19937 rng(8);
  const int64_t T = 8, n = 32001;
  const Twin<float> logits = random(rng, T * n);
  const Twin<int32_t> ids = counts(T);
  expect_as_alone(*gpu_, T, {{ids, T}},
                  [&](int64_t t, int64_t count) { gpu_->argmax(logits.on(kGpu) + t * n, n, count, ids.on(kGpu) + t); });
}

// Hand-offs of T tokens: each token's row, its neurons, and its answer.
TEST_F(GpuAmongOthersTest, HandOffs) {
  std::mt19937 rng(9);
  for (const DType type : {DType::f16, DType::q8_0}) {
    for (const int64_t rank : {96, 1344, 33}) {
      if (is_quantized(type) && rank == 33) continue;
      for (const bool normed : {false, true}) {
        for (const int64_t T : {2, 8}) {
          const int64_t n = 903, n_cold = 250, n_embd = 288;
          SCOPED_TRACE(fmt::format("{} rank {} normed {} T {}", traits(type).name, rank, normed, T));
          const TwinAct in = make_input(rng, T, n_embd);
          TwinShard shard(*ref_, *gpu_, rng, type, n, n_embd, true, true);
          shard.act = Activation::relu;
          const PredictorShape shape{n + n_cold, n_embd, rank, type, type, true, true};
          const TwinPredictor p(*ref_, *gpu_, rng, shape, in.on(kRef), 0.3);
          const TwinLists own(*ref_, *gpu_, T, n);
          const Twin<float> x = random(rng, T * n_embd), weight = random(rng, n_embd);
          const auto mailbox = hand_offs(kGpu).open_mailbox(8 * n_embd, n_cold);
          std::vector<Received> together, alone;
          expect_as_alone(*gpu_, T, {{x, T}}, [&](int64_t t, int64_t count) {
            Server server(*mailbox, n_embd, 1, count);
            const Act act = in.on(kGpu, t);
            float* const rows = x.on(kGpu) + t * n_embd;
            const NormArgs norm{NormKind::rms, {weight.on(kGpu), n_embd}, {}, 1e-5f, n_embd};
            const Input input = normed ? Input(norm, rows, act) : Input(act);
            const HandOff hand_off{mailbox.get(), normed ? act.x : rows, n_embd};
            sparse_ffn(kGpu).predict(p.on(kGpu), input, count, {n, own.on(kGpu, t), 0, {}, hand_off});
            const SparseArgs sparse{.candidates = own.on(kGpu, t), .collect = mailbox.get()};
            sparse_ffn(kGpu).ffn_sparse(shard.on(kGpu), sparse, act, count, {}, rows, nullptr);
            gpu_->synchronize();
            for (const Received& r : server.received()) (count > 1 ? together : alone).push_back(r);
          });
          ASSERT_EQ(together.size(), alone.size());
          size_t named = 0;
          for (size_t t = 0; t < alone.size(); ++t) {
            EXPECT_EQ(together[t].x, alone[t].x) << "token " << t;
            EXPECT_EQ(together[t].ids, alone[t].ids) << "token " << t;
            named += alone[t].ids.size();
          }
          EXPECT_GT(named, 0u);
        }
      }
    }
  }
}

// A plain hand-off of T tokens, and one whose predictor names none of the CPU's.
TEST_F(GpuAmongOthersTest, HandOffsWithoutNeurons) {
  std::mt19937 rng(10);
  const int64_t T = 8, n_embd = 160, n = 70;
  const TwinAct in = make_input(rng, T, n_embd);
  const TwinPredictor p(*ref_, *gpu_, rng, {n, n_embd, 64}, in.on(kRef), 0.5);
  const TwinLists own(*ref_, *gpu_, T, n);
  const Twin<float> x = random(rng, T * n_embd);
  const auto mailbox = hand_offs(kGpu).open_mailbox(T * n_embd, 64);
  for (int round = 0; round < 3; ++round) {
    {
      Server server(*mailbox, T * n_embd, 1, 1, Server::Brings::x);
      hand_offs(kGpu).post(*mailbox, x.on(kGpu), T * n_embd), hand_offs(kGpu).collect(*mailbox, x.on(kGpu), T * n_embd);
      gpu_->synchronize();
      EXPECT_EQ(server.received()[0].x.size(), static_cast<size_t>(T * n_embd));
    }
    Server server(*mailbox, n_embd, 1, T);
    const HandOff hand_off{mailbox.get(), x.on(kGpu), n_embd};
    sparse_ffn(kGpu).predict(p.on(kGpu), in.on(kGpu), T, {n, own.on(kGpu), 0, {}, hand_off});
    hand_offs(kGpu).collect(*mailbox, x.on(kGpu), T * n_embd);
    gpu_->synchronize();
    ASSERT_EQ(server.received().size(), static_cast<size_t>(T));
    for (const Received& r : server.received()) EXPECT_TRUE(r.ids.empty());
  }
}

}  // namespace
}  // namespace hearth::test
