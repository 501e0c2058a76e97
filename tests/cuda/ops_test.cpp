// Embedding, norm, rotary embedding, argmax and graphs of the GPU device against the reference.
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

// One token: a norm may be done by the product that reads it. Its result is there all the same.
TEST_F(GpuOpsTest, NormBeforeAProduct) {
  std::mt19937 rng(8);
  for (const DType type : kAllTypes) {
    for (const int64_t n : {32, 416, 4096, 8192, 9216}) {
      SCOPED_TRACE(fmt::format("{} n {}", traits(type).name, n));
      const auto size = static_cast<size_t>(n);
      const Twin<float> x(*ref_, *gpu_, random_normal(rng, size, 3.0f)), weight(*ref_, *gpu_, random_normal(rng, size));
      const TwinMatrix a(*ref_, *gpu_, rng, type, 70, n), b(*ref_, *gpu_, rng, DType::f16, 3, n);
      Twin<float> normed(*ref_, *gpu_, std::vector<float>(size, kNan)), ya(*ref_, *gpu_, random_normal(rng, 70)),
          yb(*ref_, *gpu_, std::vector<float>(3, kNan));
      Twin<std::byte> ref_q8(*ref_, *gpu_, std::vector<std::byte>(ref_->q8_bytes(n))),
          gpu_q8(*ref_, *gpu_, std::vector<std::byte>(gpu_->q8_bytes(n)));
      run_twins<float>(*ref_, *gpu_, {&normed, &ya, &yb}, [&](int s, Device& d) {
        const Act in{normed.on(s), s == kGpu ? gpu_q8.on(s) : ref_q8.on(s)};
        const MatmulPart parts[] = {{.w = a.on(s), .y = ya.on(s), .accumulate = true}, {.w = b.on(s), .y = yb.on(s)}};
        d.norm({NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n}, x.on(s), 1, in);
        d.matmul(parts, in, 1);
      });
      EXPECT_LE(relative_error(normed.read(kGpu), normed.read(kRef)), 64 * kEps);
      EXPECT_LE(relative_error(ya.read(kGpu), ya.read(kRef)), is_quantized(type) ? 2e-3 : 2e-6);
      EXPECT_LE(relative_error(yb.read(kGpu), yb.read(kRef)), 2e-6);
      // The 8-bit form is there too: a quantised product reads it once more.
      const TwinMatrix q(*ref_, *gpu_, rng, DType::q8_0, 40, n);
      Twin<float> yq(*ref_, *gpu_, std::vector<float>(40, kNan));
      run_twins<float>(*ref_, *gpu_, {&yq}, [&](int s, Device& d) {
        const MatmulPart part{.w = q.on(s), .y = yq.on(s)};
        d.matmul({&part, 1}, {normed.on(s), s == kGpu ? gpu_q8.on(s) : ref_q8.on(s)}, 1);
      });
      EXPECT_LE(relative_error(yq.read(kGpu), yq.read(kRef)), 2e-3);
    }
  }
}

// What reads or overwrites the norm's operands in between gets them as if the norm had been done at once.
TEST_F(GpuOpsTest, NormIsDoneBeforeWhatFollows) {
  std::mt19937 rng(9);
  const int64_t n = 512;
  const Twin<float> weight(*ref_, *gpu_, random_normal(rng, 512)), other(*ref_, *gpu_, random_normal(rng, 512));
  const TwinMatrix w(*ref_, *gpu_, rng, DType::f16, n, n, 0.1f);
  Twin<float> x(*ref_, *gpu_, random_normal(rng, 512)), normed(*ref_, *gpu_, std::vector<float>(512, kNan)),
      twice(*ref_, *gpu_, std::vector<float>(512, kNan));
  const auto norm = [&](int s, Device& d, const float* from, float* to) {
    d.norm({NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n}, from, 1, {to, nullptr});
  };
  const auto expect_same = [&] {
    EXPECT_LE(relative_error(x.read(kGpu), x.read(kRef)), 2e-6);
    EXPECT_LE(relative_error(normed.read(kGpu), normed.read(kRef)), 2e-6);
    EXPECT_LE(relative_error(twice.read(kGpu), twice.read(kRef)), 2e-6);
  };
  const auto reset = [&] { x.reset(), normed.reset(), twice.reset(); };
  twice.reset(), reset();
  run_twins<float>(*ref_, *gpu_, {&x, &normed}, [&](int s, Device& d) {  // the product changes the norm's own input
    norm(s, d, x.on(s), normed.on(s));
    const MatmulPart part{.w = w.on(s), .y = x.on(s), .accumulate = true};
    d.matmul({&part, 1}, {normed.on(s), nullptr}, 1);
  });
  EXPECT_LE(relative_error(x.read(kGpu), x.read(kRef)), 2e-6);
  reset();
  run_twins<float>(*ref_, *gpu_, {&x, &normed, &twice}, [&](int s, Device& d) {  // a norm of a norm
    norm(s, d, x.on(s), normed.on(s));
    norm(s, d, normed.on(s), twice.on(s));
  });
  expect_same();
  reset();
  run_twins<float>(*ref_, *gpu_, {&x, &normed, &twice}, [&](int s, Device& d) {  // its input is replaced
    norm(s, d, x.on(s), normed.on(s));
    d.upload(x.on(s), other.initial().data(), x.bytes());
    norm(s, d, normed.on(s), twice.on(s));
    d.fill_zero(normed.on(s), 4);
  });
  expect_same();
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
    d.ffn_dense(f, {in.on(s), nullptr}, 1, {}, y.on(s));
  });
  EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), 2e-6);
}

struct RopeCase {
  RopeKind kind;
  int64_t n_head, n_head_kv, head_dim, n_rot, T, first_pos;
  bool norm, fused_strides;
};

void PrintTo(const RopeCase& c, std::ostream* os) {
  *os << fmt::format("kind {} heads {}/{} dim {} rot {} T {} pos {} norm {} fused {}", static_cast<int>(c.kind),
                     c.n_head, c.n_head_kv, c.head_dim, c.n_rot, c.T, c.first_pos, c.norm, c.fused_strides);
}

class GpuRopeTest : public GpuTest, public ::testing::WithParamInterface<RopeCase> {};

TEST_P(GpuRopeTest, RotatesAndWritesTheCache) {
  const RopeCase c = GetParam();
  std::mt19937 rng(4);
  const int64_t n_ctx = c.first_pos + c.T + 3, d = c.head_dim;
  const int64_t n_q = c.n_head * d, n_kv = c.n_head_kv * d, all = n_q + 2 * n_kv;
  Twin<float> qkv(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(c.T * all)));
  const auto cache = static_cast<size_t>(c.n_head_kv * n_ctx * d);
  Twin<f16_t> k_cache(*ref_, *gpu_, std::vector<f16_t>(cache, 0x7E00)),
      v_cache(*ref_, *gpu_, std::vector<f16_t>(cache, 0x7E00));
  std::vector<float> freq(static_cast<size_t>(c.n_rot / 2));
  for (size_t i = 0; i < freq.size(); ++i)
    freq[i] = std::pow(10000.0f, -2.0f * static_cast<float>(i) / static_cast<float>(c.n_rot));
  const Twin<float> inv_freq(*ref_, *gpu_, freq), q_norm(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(d))),
      k_norm(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(d)));
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < c.T; ++t) positions.push_back(static_cast<int32_t>(c.first_pos + t));
  const Twin<int32_t> pos(*ref_, *gpu_, positions);
  run_twins<float>(*ref_, *gpu_, {&qkv}, [&](int s, Device& dev) {
    RopeKvArgs a;
    if (c.fused_strides) {
      a.q = qkv.on(s), a.k = a.q + n_q, a.v = a.k + n_kv, a.q_stride = a.k_stride = a.v_stride = all;
    } else {
      a.q = qkv.on(s), a.k = a.q + c.T * n_q, a.v = a.k + c.T * n_kv;
    }
    a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = d, a.rope = c.kind, a.n_rot = c.n_rot;
    a.inv_freq = inv_freq.on(s), a.attention_factor = 1.25f, a.pos = pos.on(s);
    if (c.norm) a.q_norm = {q_norm.on(s), d}, a.k_norm = {k_norm.on(s), d};
    a.k_cache = k_cache.on(s), a.v_cache = v_cache.on(s), a.n_ctx = n_ctx;
    dev.rope_kv(a, c.T);
  });
  // Compare q alone: what is left in k is undefined.
  const std::vector<float> got = qkv.read(kGpu), want = qkv.read(kRef);
  std::vector<float> q_got, q_want;
  for (int64_t t = 0; t < c.T; ++t) {
    const auto at = static_cast<std::ptrdiff_t>(t * (c.fused_strides ? all : n_q));
    q_got.insert(q_got.end(), got.begin() + at, got.begin() + at + n_q);
    q_want.insert(q_want.end(), want.begin() + at, want.begin() + at + n_q);
  }
  EXPECT_LE(relative_error(q_got, q_want), 16 * kEps);
  const auto k_got = k_cache.read(kGpu), k_want = k_cache.read(kRef), v_got = v_cache.read(kGpu),
             v_want = v_cache.read(kRef);
  EXPECT_EQ(v_got, v_want);
  for (size_t i = 0; i < cache; ++i) {  // a rounding of f16 may fall the other way
    const float a = f16_to_f32(k_got[i]), b = f16_to_f32(k_want[i]);
    if (std::isnan(b)) {
      ASSERT_TRUE(std::isnan(a)) << "wrote a position that is not its own, at " << i;
    } else {
      ASSERT_NEAR(a, b, 2 * kEpsF16 * std::fabs(b) + 1e-6) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuRopeTest,
                         ::testing::Values(RopeCase{RopeKind::interleaved, 8, 8, 64, 64, 1, 0, false, false},
                                           RopeCase{RopeKind::interleaved, 6, 2, 128, 128, 7, 16000, false, true},
                                           RopeCase{RopeKind::neox, 4, 1, 80, 32, 3, 100, false, false},
                                           RopeCase{RopeKind::neox, 8, 2, 64, 64, 33, 5, true, false},
                                           RopeCase{RopeKind::neox, 2, 2, 256, 256, 2, 30000, true, true},
                                           RopeCase{RopeKind::none, 4, 4, 32, 0, 5, 1, false, false}));

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
                       [&](int s, Device& d) { d.argmax(x.on(s), static_cast<int64_t>(logits.size()), id.on(s)); });
    EXPECT_EQ(id.read(kGpu), id.read(kRef)) << "n " << logits.size() << " first " << logits[0];
  }
}

// A layer as the engine runs it, recorded once and replayed for one token after the other.
TEST_F(GpuOpsTest, GraphOfALayerGivesWhatItsOperationsGive) {
  for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
    SCOPED_TRACE(traits(type).name);
    std::mt19937 rng(6);
    const int64_t n = 256, n_ff = 608, heads = 4, dim = 64, n_ctx = 300;
    const auto matrix = [&](int64_t rows, int64_t cols) {
      return TwinMatrix(*ref_, *gpu_, rng, type, rows, cols, 0.06f);
    };
    const TwinMatrix wq = matrix(n, n), wk = matrix(n, n), wv = matrix(n, n), wo = matrix(n, n), gate = matrix(n_ff, n),
                     up = matrix(n_ff, n), down = matrix(n, n_ff);
    const Twin<float> weight(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n)));
    const Twin<float> inv_freq(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(dim / 2), 0.1f));
    Twin<float> x(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n)));
    const std::vector<float> empty(static_cast<size_t>(n), kNan);
    Twin<float> normed(*ref_, *gpu_, empty), q(*ref_, *gpu_, empty), k(*ref_, *gpu_, empty), v(*ref_, *gpu_, empty),
        attn(*ref_, *gpu_, empty);
    const std::vector<std::byte> q8(4096);
    Twin<std::byte> normed_q8(*ref_, *gpu_, q8), attn_q8(*ref_, *gpu_, q8);
    const auto cache = static_cast<size_t>(2 * heads * n_ctx * dim);
    Twin<f16_t> kv(*ref_, *gpu_, std::vector<f16_t>(cache, 0));
    Twin<int32_t> pos(*ref_, *gpu_, {0});
    const auto layer = [&](int s, Device& d, int64_t max_kv) {
      const Act in{normed.on(s), is_quantized(type) ? normed_q8.on(s) : nullptr};
      const Act out{attn.on(s), is_quantized(type) ? attn_q8.on(s) : nullptr};
      const NormArgs norm{NormKind::rms, {weight.on(s), n}, {}, 1e-5f, n};
      d.norm(norm, x.on(s), 1, in);
      const MatmulPart qkv[] = {{wq.on(s), {}, q.on(s)}, {wk.on(s), {}, k.on(s)}, {wv.on(s), {}, v.on(s)}};
      d.matmul(qkv, in, 1);
      RopeKvArgs r;
      r.q = q.on(s), r.k = k.on(s), r.v = v.on(s), r.n_head = r.n_head_kv = heads, r.head_dim = dim;
      r.rope = RopeKind::neox, r.n_rot = dim, r.inv_freq = inv_freq.on(s), r.pos = pos.on(s), r.n_ctx = n_ctx;
      r.k_cache = kv.on(s), r.v_cache = kv.on(s) + cache / 2;
      d.rope_kv(r, 1);
      AttentionArgs a;
      a.q = q.on(s), a.k_cache = r.k_cache, a.v_cache = r.v_cache, a.n_ctx = n_ctx, a.n_head = a.n_head_kv = heads;
      a.head_dim = dim, a.scale = 0.125f, a.pos = pos.on(s), a.max_kv = max_kv;
      d.attention(a, 1, out);
      const MatmulPart o{.w = wo.on(s), .y = x.on(s), .accumulate = true};
      d.matmul({&o, 1}, out, 1);
      d.norm(norm, x.on(s), 1, in);
      FfnShard f;
      f.gate = gate.on(s), f.up = up.on(s), f.down = down.on(s), f.act = Activation::silu;
      d.ffn_dense(f, in, 1, {}, x.on(s));
    };
    const auto run = [&](const std::function<void(int32_t)>& step) {
      x.reset(kGpu), kv.reset(kGpu);
      for (int32_t p = 0; p < 150; ++p) {
        gpu_->upload(pos.on(kGpu), &p, 4);
        step(p);
      }
      return x.read(kGpu);
    };
    gpu_->begin_capture();
    layer(kGpu, *gpu_, n_ctx);
    const int graph = gpu_->end_capture();
    const auto replayed = run([&](int32_t) { gpu_->launch(graph); });
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
