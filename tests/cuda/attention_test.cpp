// Attention of the GPU device against the reference: few tokens (the context split over blocks) and many (tensor
// cores).
#include <fmt/format.h>

#include "twin.h"

namespace hearth::test {
namespace {

struct AttentionCase {
  int64_t n_head, n_head_kv, head_dim, T, first_pos, window;
};
void PrintTo(const AttentionCase& c, std::ostream* os) {
  *os << fmt::format("heads {}/{} dim {} T {} pos {} window {}", c.n_head, c.n_head_kv, c.head_dim, c.T, c.first_pos,
                     c.window);
}

class GpuAttentionTest : public GpuTest, public ::testing::WithParamInterface<AttentionCase> {};

TEST_P(GpuAttentionTest, MatchesTheReference) {
  const AttentionCase c = GetParam();
  std::mt19937 rng(7);
  const int64_t n_kv = c.first_pos + c.T, n_ctx = n_kv + 5, n_out = c.n_head * c.head_dim;
  const auto random_f16 = [&](int64_t n) {
    std::vector<f16_t> v;
    for (const float f : random_normal(rng, static_cast<size_t>(n))) v.push_back(f32_to_f16(f));
    // Positions that were never written hold whatever they held: NaN must not come through.
    for (int64_t h = 0; h < c.n_head_kv; ++h) {
      std::fill_n(v.begin() + static_cast<std::ptrdiff_t>((h * n_ctx + n_kv) * c.head_dim), 5 * c.head_dim,
                  f16_t{0x7E00});
    }
    return v;
  };
  const Twin<f16_t> k(*ref_, *gpu_, random_f16(c.n_head_kv * n_ctx * c.head_dim)),
      v(*ref_, *gpu_, random_f16(c.n_head_kv * n_ctx * c.head_dim));
  const int64_t stride = n_out + 8;
  const Twin<float> q(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(c.T * stride)));
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < c.T; ++t) positions.push_back(static_cast<int32_t>(c.first_pos + t));
  const Twin<int32_t> pos(*ref_, *gpu_, positions);
  const auto attend = [&](int s, Device& d, int64_t max_kv, float* out) {
    AttentionArgs a;
    a.q = q.on(s), a.q_stride = stride, a.k_cache = k.on(s), a.v_cache = v.on(s), a.n_ctx = n_ctx;
    a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
    a.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)), a.window = c.window, a.pos = pos.on(s),
    a.max_kv = max_kv;
    d.attention(a, c.T, {out, nullptr});
  };
  Twin<float> out(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(c.T * n_out), kNan));
  run_twins<float>(*ref_, *gpu_, {&out}, [&](int s, Device& d) { attend(s, d, n_kv, out.on(s)); });
  const std::vector<float> got = out.read(kGpu), want = out.read(kRef);
  // Split attention is f32 throughout: scores of head_dim products, then up to n_kv terms in chains of n_kv / 8 or
  // fewer. On tensor cores q and the probabilities are rounded to f16: an error of about 2^-11 / sqrt(3) in scores and
  // weights each.
  const double bound = c.T <= 8 ? (static_cast<double>(n_kv) / 8 + 64) * kEps : 4 * kEpsF16;
  EXPECT_LE(relative_error(got, want), bound);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 64 * bound) << i;

  attend(kGpu, *gpu_, n_ctx, out.on(kGpu));  // a larger bound on the context changes the grid, not a bit of the result
  const auto again = out.read(kGpu);
  EXPECT_EQ(std::memcmp(again.data(), got.data(), out.bytes()), 0);
}

std::vector<AttentionCase> attention_cases() {
  std::vector<AttentionCase> cases;
  for (const int64_t dim : {16, 32, 64, 80, 96, 128, 256}) {
    for (const int64_t T : {1, 2, 7, 33, 130})
      cases.push_back({4, 2, dim, T, 0, 0}), cases.push_back({4, 4, dim, T, 61, 0});
  }
  for (const int64_t group : {1, 2, 3, 4, 7, 8, 16}) {
    for (const int64_t T : {1, 20}) cases.push_back({group * 2, 2, 64, T, 150, 0});
  }
  for (const int64_t window : {1, 17, 64, 100, 1000}) {
    for (const int64_t T : {1, 3, 130}) cases.push_back({4, 2, 64, T, 190, window});
  }
  cases.push_back({32, 32, 128, 1, 700, 0});
  cases.push_back({8, 1, 128, 1, 9000, 0});
  cases.push_back({2, 2, 128, 1, 15000, 4096});
  cases.push_back({2, 1, 128, 9, 3000, 0});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, GpuAttentionTest, ::testing::ValuesIn(attention_cases()));

// One token, from raw q, k and v, as every layer of a decode does it.
struct TokenCase {
  int64_t n_head, n_head_kv, head_dim, pos, window;
  RopeKind rope;
  bool norm;
};
void PrintTo(const TokenCase& c, std::ostream* os) {
  *os << fmt::format("heads {}/{} dim {} pos {} window {} rope {} norm {}", c.n_head, c.n_head_kv, c.head_dim, c.pos,
                     c.window, static_cast<int>(c.rope), c.norm);
}

class GpuTokenTest : public GpuTest, public ::testing::WithParamInterface<TokenCase> {};

TEST_P(GpuTokenTest, RopeThenAttention) {
  const TokenCase c = GetParam();
  std::mt19937 rng(11);
  const int64_t n_ctx = c.pos + 4, n_q = c.n_head * c.head_dim, n_kv = c.n_head_kv * c.head_dim;
  std::vector<f16_t> old;
  for (const float f : random_normal(rng, static_cast<size_t>(n_kv * n_ctx))) old.push_back(f32_to_f16(f));
  for (int64_t h = 0; h < c.n_head_kv; ++h) {  // from the token's own position on: NaN until it is written
    std::fill_n(old.begin() + static_cast<std::ptrdiff_t>((h * n_ctx + c.pos) * c.head_dim), 4 * c.head_dim,
                f16_t{0x7E00});
  }
  Twin<f16_t> k_cache(*ref_, *gpu_, old), v_cache(*ref_, *gpu_, old);
  Twin<float> q(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_q))),
      k(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_kv))),
      out(*ref_, *gpu_, std::vector<float>(static_cast<size_t>(n_q), kNan));
  const Twin<float> v(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n_kv))),
      q_norm(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(c.head_dim))),
      k_norm(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(c.head_dim)));
  const int64_t n_rot = c.rope == RopeKind::none ? 0 : c.head_dim / 8 * 4;
  std::vector<float> freq(static_cast<size_t>(c.head_dim));
  for (size_t i = 0; i < freq.size(); ++i) freq[i] = std::pow(0.9f, static_cast<float>(i));
  const Twin<float> inv_freq(*ref_, *gpu_, freq);
  const Twin<int32_t> pos(*ref_, *gpu_, {static_cast<int32_t>(c.pos)});
  const auto token = [&](int s, Device& d, int64_t max_kv) {
    RopeKvArgs r;
    r.q = q.on(s), r.k = k.on(s), r.v = v.on(s), r.n_head = c.n_head, r.n_head_kv = c.n_head_kv;
    r.head_dim = c.head_dim, r.rope = c.rope, r.n_rot = n_rot, r.inv_freq = inv_freq.on(s), r.pos = pos.on(s);
    r.attention_factor = 1.25f, r.k_cache = k_cache.on(s), r.v_cache = v_cache.on(s), r.n_ctx = n_ctx;
    if (c.norm) r.q_norm = {q_norm.on(s), c.head_dim}, r.k_norm = {k_norm.on(s), c.head_dim};
    d.rope_kv(r, 1);
    AttentionArgs a;
    a.q = q.on(s), a.k_cache = r.k_cache, a.v_cache = r.v_cache, a.n_ctx = n_ctx, a.n_head = c.n_head;
    a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim, a.window = c.window, a.pos = pos.on(s), a.max_kv = max_kv;
    a.scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    d.attention(a, 1, {out.on(s), nullptr});
  };
  run_twins<float>(*ref_, *gpu_, {&q, &k, &out}, [&](int s, Device& d) { token(s, d, c.pos + 1); });
  const std::vector<float> got = out.read(kGpu);
  // The new key is rounded to f16, on either side of a tie now and then: its own score may move by that much.
  EXPECT_LE(relative_error(got, out.read(kRef)), static_cast<double>(c.pos) / 8 * kEps + kEpsF16);
  EXPECT_LE(relative_error(q.read(kGpu), q.read(kRef)), 16 * kEps) << "q is rotated in place";
  EXPECT_EQ(v_cache.read(kGpu), v_cache.read(kRef));
  const std::vector<f16_t> k_got = k_cache.read(kGpu), k_want = k_cache.read(kRef);
  for (size_t i = 0; i < k_got.size(); ++i) {
    const float a = f16_to_f32(k_got[i]), b = f16_to_f32(k_want[i]);
    ASSERT_TRUE(std::isnan(b) ? std::isnan(a) : std::fabs(a - b) <= 2 * kEpsF16 * std::fabs(b) + 1e-6) << i;
  }
  q.reset(kGpu), k.reset(kGpu), k_cache.reset(kGpu), v_cache.reset(kGpu);
  token(kGpu, *gpu_, n_ctx);  // a larger bound on the context changes the grid, not a bit of the result
  const auto again = out.read(kGpu);
  EXPECT_EQ(std::memcmp(again.data(), got.data(), out.bytes()), 0);
}

std::vector<TokenCase> token_cases() {
  std::vector<TokenCase> cases;
  for (const int64_t dim : {16, 32, 64, 80, 96, 128, 256}) {
    for (const RopeKind rope : {RopeKind::none, RopeKind::interleaved, RopeKind::neox}) {
      cases.push_back({4, 2, dim, 0, 0, rope, false}), cases.push_back({4, 4, dim, 300, 0, rope, true});
    }
  }
  for (const int64_t group : {1, 2, 3, 4, 7, 8, 16}) {
    cases.push_back({group * 2, 2, 64, 150, 0, RopeKind::neox, true});
    cases.push_back({group * 2, 2, 128, 5000, 0, RopeKind::interleaved, false});
  }
  for (const int64_t window : {1, 17, 100, 1000}) cases.push_back({4, 2, 64, 700, window, RopeKind::neox, false});
  cases.push_back({32, 32, 128, 255, 0, RopeKind::interleaved, false});
  cases.push_back({32, 32, 128, 256, 0, RopeKind::interleaved, false});
  cases.push_back({2, 2, 128, 15000, 4096, RopeKind::interleaved, false});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Tokens, GpuTokenTest, ::testing::ValuesIn(token_cases()));

}  // namespace
}  // namespace hearth::test
