// Embedding, norm, argmax and recordings of the GPU device against the reference.
#include <fmt/format.h>

#include <array>

#include "twin.h"

namespace hearth::test {
namespace {

using GpuOpsTest = GpuTest;
constexpr std::array kAllTypes = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0};

TEST_F(GpuOpsTest, Embed) {
  std::mt19937 rng(1);
  for (const DType type : kAllTypes) {
    for (const int64_t n : {32, 544, 2048}) {
      SCOPED_TRACE(fmt::format("{} n {}", traits(type).name, n));
      const TwinMatrix table(*ref_, *gpu_, rng, type, 97, n), positions(*ref_, *gpu_, rng, type, 50, n);
      const Twin<int32_t> ids(*ref_, *gpu_, {96, 0, 5, 5, 17}), pos(*ref_, *gpu_, {3, 4, 5, 6, 7});
      for (const bool learned : {false, true}) {
        Twin<float> x(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(5 * n), kNan));
        run_twins<float>(*ref_, *gpu_, {&x}, [&](int s, Device& d) {
          d.embed(table.on(s), ids.on(s), learned ? positions.on(s) : Matrix{}, pos.on(s), 2, 5, x.on(s));
        });
        EXPECT_LE(relative_error(x.read(kGpu), x.read(kRef)), 2 * kEps);
      }
    }
  }
}

TEST_F(GpuOpsTest, Norm) {
  std::mt19937 rng(2);
  for (const int64_t n : {1, 33, 100, 512, 4096, 5000, 9000, 16384}) {
    for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
      for (const int64_t T : {1, 3}) {
        SCOPED_TRACE(fmt::format("n {} kind {} T {}", n, static_cast<int>(kind), T));
        if (n == 1 && kind == NormKind::layer) continue;  // 0 / eps
        const auto size = static_cast<size_t>(n);
        const Twin<float> x(*ref_, *gpu_, random_normal(rng, size * static_cast<size_t>(T), 3.0f, 0.5f));
        const Twin<float> weight(*ref_, *gpu_, random_normal(rng, size)), bias(*ref_, *gpu_, random_normal(rng, size));
        Twin<float> y(*ref_, *gpu_, std::vector<float>(size * static_cast<size_t>(T), kNan));
        run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
          NormArgs a{kind, {weight.on(s), n}, {}, 1e-5f, n};
          if (kind == NormKind::layer) a.bias = {bias.on(s), n};
          d.norm(a, x.on(s), T, {y.on(s), nullptr});
        });
        // A sum over n / threads terms and a tree, once or twice, then four roundings.
        EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), 64 * kEps);
      }
    }
  }
}

TEST_F(GpuOpsTest, NormInPlace) {
  std::mt19937 rng(3);
  const int64_t n = 700;
  const Twin<float> weight(*ref_, *gpu_, random_normal(rng, 700));
  Twin<float> x(*ref_, *gpu_, random_normal(rng, 1400));
  run_twins<float>(*ref_, *gpu_, {&x}, [&](int s, Device& d) {
    d.norm({NormKind::rms, {weight.on(s), n}, {}, 1e-6f, n}, x.on(s), 2, {x.on(s), nullptr});
  });
  EXPECT_LE(relative_error(x.read(kGpu), x.read(kRef)), 32 * kEps);
}

TEST_F(GpuOpsTest, AddNormScaleAndSoftCap) {
  std::mt19937 rng(4);
  for (const int64_t n : {1, 33, 700, 4096}) {
    constexpr int64_t T = 3;
    const auto size = static_cast<size_t>(n);
    const Twin<float> weight(*ref_, *gpu_, random_normal(rng, size));
    Twin<float> x(*ref_, *gpu_, random_normal(rng, T * size, 3.0f)), y(*ref_, *gpu_, random_normal(rng, T * size)),
        scaled(*ref_, *gpu_, random_normal(rng, size)), capped(*ref_, *gpu_, random_normal(rng, size, 40.0f));
    run_twins<float>(*ref_, *gpu_, {&x, &y, &scaled, &capped}, [&](int s, Device& d) {
      d.add_norm({NormKind::rms, {weight.on(s), n}, {}, 1e-6f, n}, x.on(s), T, y.on(s));
      d.scale(1.7f, n, scaled.on(s));
      d.soft_cap(30.0f, n, capped.on(s));
    });
    EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), 64 * kEps);
    EXPECT_LE(relative_error(scaled.read(kGpu), scaled.read(kRef)), kEps);
    EXPECT_LE(relative_error(capped.read(kGpu), capped.read(kRef)), 8 * kEps);
  }
}

// A norm done by the product that reads it. Its result is there all the same.
TEST_F(GpuOpsTest, NormOnTheWayToAProduct) {
  std::mt19937 rng(8);
  for (const DType type : kAllTypes) {
    for (const int64_t n : {32, 416, 4096, 8192, 9216}) {
      for (const int64_t T : {1, 3, 20}) {
        if (T > 1 && n > 4096) continue;
        SCOPED_TRACE(fmt::format("{} n {} T {}", traits(type).name, n, T));
        const auto size = static_cast<size_t>(n), rows = static_cast<size_t>(T);
        const Twin<float> x(*ref_, *gpu_, random_normal(rng, rows * size, 3.0f)),
            weight(*ref_, *gpu_, random_normal(rng, size));
        const TwinMatrix a(*ref_, *gpu_, rng, type, 70, n), b(*ref_, *gpu_, rng, DType::f16, 3, n);
        TwinAct normed(*ref_, *gpu_, T, n, std::vector<float>(rows * size, kNan));
        Twin<float> ya(*ref_, *gpu_, random_normal(rng, rows * 70)),
            yb(*ref_, *gpu_, std::vector<float>(rows * 3, kNan));
        run_twins<float>(*ref_, *gpu_, {&normed.x, &ya, &yb}, [&](int s, Device& d) {
          const MatmulPart parts[] = {{.w = a.on(s), .y = ya.on(s), .accumulate = true}, {.w = b.on(s), .y = yb.on(s)}};
          d.matmul(parts, Input({NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n}, x.on(s), normed.on(s)), T);
        });
        const bool batch = T > kFewTokens;
        const double half = batch ? 3 * kEpsF16 : 2e-6;
        EXPECT_LE(relative_error(normed.x.read(kGpu), normed.x.read(kRef)), 64 * kEps);
        EXPECT_LE(relative_error(ya.read(kGpu), ya.read(kRef)), is_quantized(type)    ? (batch ? 2e-2 : 2e-3)
                                                                : type == DType::bf16 ? (batch ? 3 * kEpsBf16 : 2e-6)
                                                                : type == DType::f32  ? 2e-6
                                                                                      : half);
        EXPECT_LE(relative_error(yb.read(kGpu), yb.read(kRef)), half);
        // The 8-bit form is there too: a quantised product reads it once more.
        const TwinMatrix q(*ref_, *gpu_, rng, DType::q8_0, 40, n);
        Twin<float> yq(*ref_, *gpu_, std::vector<float>(rows * 40, kNan));
        run_twins<float>(*ref_, *gpu_, {&yq}, [&](int s, Device& d) {
          const MatmulPart part{.w = q.on(s), .y = yq.on(s)};
          d.matmul({&part, 1}, normed.on(s), T);
        });
        EXPECT_LE(relative_error(yq.read(kGpu), yq.read(kRef)), batch ? 2e-2 : 2e-3);
      }
    }
  }
}

// The product overwrites what the norm reads: the norm comes first.
TEST_F(GpuOpsTest, NormOfWhatTheProductAddsTo) {
  std::mt19937 rng(9);
  const int64_t n = 512;
  const Twin<float> weight(*ref_, *gpu_, random_normal(rng, 512));
  const TwinMatrix w(*ref_, *gpu_, rng, DType::f16, n, n, 0.1f);
  for (const int64_t T : {1, 4}) {
    const auto size = static_cast<size_t>(T * n);
    Twin<float> x(*ref_, *gpu_, random_normal(rng, size)), normed(*ref_, *gpu_, std::vector<float>(size, kNan));
    run_twins<float>(*ref_, *gpu_, {&x, &normed}, [&](int s, Device& d) {
      const MatmulPart part{.w = w.on(s), .y = x.on(s), .accumulate = true};
      d.matmul({&part, 1}, Input({NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n}, x.on(s), {normed.on(s), nullptr}),
               T);
    });
    EXPECT_LE(relative_error(x.read(kGpu), x.read(kRef)), 2e-6);
    EXPECT_LE(relative_error(normed.read(kGpu), normed.read(kRef)), 2e-6);
  }
}

// More neurons than a block of the transposed down projection stages at once.
TEST_F(GpuOpsTest, TransposedDownOfManyNeurons) {
  std::mt19937 rng(10);
  const int64_t n = 9216, n_embd = 4096;
  const TwinMatrix gate(*ref_, *gpu_, rng, DType::f16, n, n_embd, 0.02f),
      down(*ref_, *gpu_, rng, DType::f32, n, n_embd);
  const Twin<float> in(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
  Twin<float> y(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_embd)));
  run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
    FfnShard f;
    f.gate = gate.on(s), f.down_t = down.on(s);
    f.act = Activation::relu;
    d.ffn_dense(f, Act{in.on(s), nullptr}, 1, {}, y.on(s), nullptr);
  });
  EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), 2e-6);
}

TEST_F(GpuOpsTest, ArgmaxTakesTheFirstLargestAndNeverNan) {
  std::mt19937 rng(5);
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<std::vector<float>> cases = {
      {1.0f}, {kNan}, {kNan, kNan, -kInf}, {-1, 3, 3, 2}, {kNan, -5, kNan}, {-0.0f, 0.0f, -0.0f}, {-kInf, -kInf}};
  for (const size_t n : {size_t{1000}, size_t{32000}, size_t{152064}}) {
    std::vector<float> v = random_normal(rng, n);
    cases.push_back(v);
    v[n - 1] = 100.0f;
    cases.push_back(v);
    v[n / 3] = v[n / 2] = 200.0f, v[n / 4] = kNan;
    cases.push_back(v);
  }
  for (const auto& logits : cases) {
    const Twin<float> x(*ref_, *gpu_, logits);
    Twin<int32_t> id(*ref_, *gpu_, {-7});
    run_twins<int32_t>(*ref_, *gpu_, {&id},
                       [&](int s, Device& d) { d.argmax(x.on(s), static_cast<int64_t>(logits.size()), 1, id.on(s)); });
    EXPECT_EQ(id.read(kGpu), id.read(kRef)) << "n " << logits.size() << " first " << logits[0];
  }
}

TEST_F(GpuOpsTest, ArgmaxOfManyRows) {
  std::mt19937 rng(11);
  for (const auto& [T, n] : {std::pair<int64_t, int64_t>{5, 32001}, {8, 700}, {19, 3}}) {
    const Twin<float> x(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(T * n)));
    Twin<int32_t> ids(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(T), -7));
    run_twins<int32_t>(*ref_, *gpu_, {&ids},
                       [&, n = n, T = T](int s, Device& d) { d.argmax(x.on(s), n, T, ids.on(s)); });
    EXPECT_EQ(ids.read(kGpu), ids.read(kRef)) << "T " << T;
  }
}

// A layer as the engine runs it, recorded once and replayed for one token after the other.
TEST_F(GpuOpsTest, RecordingOfALayerGivesWhatItsOperationsGive) {
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    SCOPED_TRACE(traits(type).name);
    std::mt19937 rng(6);
    const int64_t n = 256, n_ff = 608, heads = 4, dim = 64, n_pages = 3;
    const auto matrix = [&](int64_t rows, int64_t cols) {
      return TwinMatrix(*ref_, *gpu_, rng, type, rows, cols, 0.06f);
    };
    const TwinMatrix wq = matrix(n, n), wk = matrix(n, n), wv = matrix(n, n), wo = matrix(n, n), gate = matrix(n_ff, n),
                     up = matrix(n_ff, n), down = matrix(n, n_ff);
    const Twin<float> weight(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n)));
    const Twin<float> inv_freq(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(dim / 2), 0.1f));
    Twin<float> x(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n)));
    const std::vector<float> empty(static_cast<size_t>(n), kNan);
    const Twin<float> q(*ref_, *gpu_, empty), k(*ref_, *gpu_, empty), v(*ref_, *gpu_, empty);
    const TwinAct normed(*ref_, *gpu_, 1, n, empty), attn(*ref_, *gpu_, 1, n, empty);
    const int64_t page = heads * kPagePositions * dim;
    Twin<f16_t> kv(*ref_, *gpu_, std::vector<f16_t>(static_cast<size_t>(2 * n_pages * page), 0));
    const Twin<int32_t> pages(*ref_, *gpu_, {2, 0, 1}), slot(*ref_, *gpu_, {0});
    Twin<int32_t> pos(*ref_, *gpu_, {0});
    const auto layer = [&](int s, Device& d, int64_t max_kv) {
      const NormArgs norm{NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n};
      const NextNorm next{norm, gate.on(s), false};
      const Input in(norm, x.on(s), normed.on(s));
      const MatmulPart qkv[] = {{wq.on(s), {}, q.on(s)}, {wk.on(s), {}, k.on(s)}, {wv.on(s), {}, v.on(s)}};
      d.matmul(qkv, in, 1);
      AttentionArgs a;
      a.q = q.on(s), a.k = k.on(s), a.v = v.on(s), a.n_head = a.n_head_kv = heads, a.head_dim = dim;
      a.rope = RopeKind::neox, a.n_rot = dim, a.inv_freq = inv_freq.on(s);
      a.cache = {kv.on(s), kv.on(s) + page, 2 * page};
      a.rows = {pos.on(s), slot.on(s), pages.on(s), n_pages, {}};
      a.scale = 0.125f, a.max_kv = max_kv;
      d.attention(a, 1, attn.on(s));
      const MatmulPart o{.w = wo.on(s), .y = x.on(s), .accumulate = true};
      d.matmul({&o, 1}, attn.on(s), 1, &next);
      FfnShard f;
      f.gate = gate.on(s), f.up = up.on(s), f.down = down.on(s), f.act = Activation::silu;
      d.ffn_dense(f, in, 1, {}, x.on(s), nullptr);
    };
    const auto run = [&](const std::function<void(int32_t)>& step) {
      x.reset(kGpu), kv.reset(kGpu);
      for (int32_t p = 0; p < 150; ++p) {
        gpu_->upload(pos.on(kGpu), &p, 4);
        step(p);
      }
      return x.read(kGpu);
    };
    gpu_->recording()->begin();
    layer(kGpu, *gpu_, n_pages * kPagePositions);
    const int id = gpu_->recording()->end();
    const auto replayed = run([&](int32_t) { gpu_->recording()->launch(id); });
    const auto direct = run([&](int32_t p) { layer(kGpu, *gpu_, p + 1); });
    EXPECT_EQ(std::memcmp(replayed.data(), direct.data(), replayed.size() * 4), 0);
    for (int32_t p = 0; p < 150; ++p) {
      ref_->upload(pos.on(kRef), &p, 4);
      layer(kRef, *ref_, p + 1);
    }
    // Rounding differences of 150 steps; quantised activations add steps that fall the other way.
    EXPECT_LE(relative_error(replayed, x.read(kRef)), is_quantized(type) ? 2e-2 : 1e-3);
  }
}

}  // namespace
}  // namespace hearth::test
