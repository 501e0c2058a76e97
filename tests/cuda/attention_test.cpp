// Attention over the paged cache of the GPU device: against the reference, for few tokens (the context split over
// blocks) and many (tensor cores); and a few tokens together against each alone.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/recording.h"
#include "twin.h"

namespace hearth::test {
namespace {

constexpr f16_t kNanF16 = 0x7E00;

struct Shape {
  int64_t n_head = 4, n_head_kv = 2, head_dim = 64, window = 0;
  RopeKind rope = RopeKind::none;
  bool norm = false;
  float soft_cap = 0;
  bool sinks = false;
  int64_t latent = 0;  // elements of the latent that a key ends with, which is the value, too
  int64_t value_dim() const { return latent > 0 ? latent : head_dim; }
};
// New tokens of one sequence, which has first_position in the cache already.
struct Part {
  int64_t first_position, n_rows;
};
struct AttentionCase {
  Shape shape;
  std::vector<Part> parts;  // each of a sequence of its own
};
void PrintTo(const AttentionCase& c, std::ostream* os) {
  const Shape& s = c.shape;
  *os << fmt::format("heads {}/{} dim {} window {} rope {} norm {} cap {} sinks {} latent {}:", s.n_head, s.n_head_kv,
                     s.head_dim, s.window, static_cast<int>(s.rope), s.norm, s.soft_cap, s.sinks, s.latent);
  for (const Part& p : c.parts) *os << fmt::format(" {}+{}", p.first_position, p.n_rows);
}

std::vector<float> random_floats(std::mt19937& rng, int64_t n) {
  return random_normal(rng, static_cast<size_t>(n));
}

// A batch of tokens and the paged cache of their sequences, whose pages and slots are in random order. Everything that
// nobody has written is NaN: it must not come through.
class PagedTokens {
 public:
  PagedTokens(Device& ref, Device& gpu, const AttentionCase& c, bool interleaved = false)
      : shape_(c.shape), device_{&ref, &gpu} {
    std::mt19937 rng(7);
    const auto n_slots = static_cast<int64_t>(c.parts.size());
    std::vector<int32_t> pos, slot, slots(c.parts.size()), table;
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    for (const Part& p : c.parts) {
      max_kv_ = std::max(max_kv_, p.first_position + p.n_rows);
      runs_.push_back({static_cast<int64_t>(pos.size()), p.n_rows, p.first_position});
      for (int64_t i = 0; i < p.n_rows; ++i) {
        pos.push_back(static_cast<int32_t>(p.first_position + i));
        slot.push_back(slots[runs_.size() - 1]);
      }
    }
    if (interleaved) interleave(pos, slot);
    T_ = static_cast<int64_t>(pos.size());

    pages_stride_ = (max_kv_ + kPagePositions - 1) / kPagePositions + 1;
    const int64_t n_pages = n_slots * pages_stride_;
    table.resize(static_cast<size_t>(n_pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng);

    const int64_t in_page = shape_.n_head_kv * kPagePositions * shape_.head_dim;
    v_offset_ = in_page + 16, stride_ = 2 * in_page + 48;  // another layer's part may lie between
    std::vector<f16_t> cache(static_cast<size_t>(n_pages * stride_), kNanF16);
    std::normal_distribution<float> normal;
    for (size_t s = 0; s < c.parts.size(); ++s) {
      for (int64_t p = 0; p < c.parts[s].first_position; ++p) {
        const int64_t page = table[static_cast<size_t>(slots[s] * pages_stride_ + p / kPagePositions)];
        for (int64_t h = 0; h < shape_.n_head_kv; ++h) {
          const int64_t at = page * stride_ + (h * kPagePositions + p % kPagePositions) * shape_.head_dim;
          for (const int64_t part : {at, at + v_offset_}) {
            for (int64_t i = 0; i < shape_.head_dim; ++i)
              cache[static_cast<size_t>(part + i)] = f32_to_f16(normal(rng));
          }
        }
      }
    }
    const auto floats = [&](int64_t n) { return std::make_unique<Twin<float>>(ref, gpu, random_floats(rng, n)); };
    n_q_ = shape_.n_head * shape_.head_dim, n_kv_ = shape_.n_head_kv * shape_.head_dim;
    n_out_ = shape_.n_head * shape_.value_dim();
    q_ = floats(T_ * n_q_), k_ = floats(T_ * n_kv_), v_ = floats(T_ * n_kv_);
    q_norm_ = floats(shape_.head_dim), k_norm_ = floats(shape_.head_dim), sinks_ = floats(shape_.n_head);
    latent_norm_ = floats(std::max<int64_t>(shape_.latent, 1));
    std::vector<float> freq(static_cast<size_t>(shape_.head_dim));
    for (size_t i = 0; i < freq.size(); ++i) freq[i] = std::pow(0.9f, static_cast<float>(i));
    inv_freq_ = std::make_unique<Twin<float>>(ref, gpu, freq);
    cache_ = std::make_unique<Twin<f16_t>>(ref, gpu, cache);
    pos_ = std::make_unique<Twin<int32_t>>(ref, gpu, pos), slot_ = std::make_unique<Twin<int32_t>>(ref, gpu, slot);
    table_ = std::make_unique<Twin<int32_t>>(ref, gpu, table);
    out_ = std::make_unique<Twin<float>>(ref, gpu, std::vector<float>(static_cast<size_t>(T_ * n_out_), kNan));
    q8_bytes_ = gpu.q8_bytes(n_out_);
    q8_ = std::make_unique<Twin<uint8_t>>(ref, gpu, std::vector<uint8_t>(static_cast<size_t>(T_) * q8_bytes_));
  }

  int64_t T() const { return T_; }
  int64_t max_kv() const { return max_kv_; }
  int64_t n_ctx() const { return pages_stride_ * kPagePositions; }
  const Twin<float>& out() const { return *out_; }
  const Twin<f16_t>& cache() const { return *cache_; }
  const Twin<uint8_t>& q8() const { return *q8_; }

  void reset(int side) { q_->reset(side), k_->reset(side), cache_->reset(side), out_->reset(side), q8_->reset(side); }
  // The attention of rows [first, first + n).
  void attend(int side, int64_t first, int64_t n, int64_t max_kv) {
    AttentionArgs a;
    a.q = q_->on(side) + first * n_q_, a.k = k_->on(side) + first * n_kv_, a.v = v_->on(side) + first * n_kv_;
    a.n_head = shape_.n_head, a.n_head_kv = shape_.n_head_kv, a.head_dim = shape_.head_dim;
    a.rope = shape_.rope, a.n_rot = shape_.rope == RopeKind::none ? 0 : shape_.head_dim / 8 * 4;
    if (shape_.latent > 0) {
      a.v = nullptr, a.latent_norm = {latent_norm_->on(side), shape_.latent};
      if (shape_.rope != RopeKind::none) a.n_rot = shape_.head_dim - shape_.latent;
    }
    a.inv_freq = inv_freq_->on(side), a.attention_factor = 1.25f;
    if (shape_.norm) a.q_norm = {q_norm_->on(side), a.head_dim}, a.k_norm = {k_norm_->on(side), a.head_dim};
    a.soft_cap = shape_.soft_cap;
    if (shape_.sinks) a.sinks = {sinks_->on(side), a.n_head};
    a.cache = {cache_->on(side), cache_->on(side) + v_offset_, stride_};
    a.rows = {pos_->on(side) + first, slot_->on(side) + first, table_->on(side), pages_stride_, {}};
    if (n > kFewTokens) a.rows.runs = runs_;
    a.scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim)), a.window = shape_.window, a.max_kv = max_kv;
    void* const q8 = side == kGpu ? q8_->on(side) + static_cast<size_t>(first) * q8_bytes_ : nullptr;
    device_[side]->attention(a, n, {out_->on(side) + first * n_out_, q8});
  }
  // Puts the inputs of rows [first, first + n) where those of the first n rows are, on the GPU.
  void move_rows(int64_t first, int64_t n) {
    const auto move = [&](const auto& twin, int64_t width) {
      device_[kGpu]->upload(twin.on(kGpu), twin.initial().data() + first * width,
                            static_cast<size_t>(n * width) * sizeof(twin.initial()[0]));
    };
    move(*q_, n_q_), move(*k_, n_kv_), move(*v_, n_kv_), move(*pos_, 1), move(*slot_, 1);
  }
  // The 8-bit form of the output, made from it afterwards.
  std::vector<uint8_t> quantized_output() {
    q8_->reset(kGpu);
    device_[kGpu]->quantize({out_->on(kGpu), q8_->on(kGpu)}, T_, n_out_);
    return q8_->read(kGpu);
  }

 private:
  // One row of each sequence in turn, so that neighbours are of different ones.
  void interleave(std::vector<int32_t>& pos, std::vector<int32_t>& slot) const {
    std::vector<int32_t> p, s;
    for (int64_t i = 0; p.size() < pos.size(); ++i) {
      for (const BatchRun& r : runs_) {
        if (i >= r.n_rows) continue;
        p.push_back(pos[static_cast<size_t>(r.first_row + i)]), s.push_back(slot[static_cast<size_t>(r.first_row + i)]);
      }
    }
    pos = p, slot = s;
  }

  Shape shape_;
  Device* device_[2];
  std::vector<BatchRun> runs_;
  int64_t T_ = 0, max_kv_ = 0, pages_stride_ = 0, v_offset_ = 0, stride_ = 0, n_q_ = 0, n_kv_ = 0, n_out_ = 0;
  size_t q8_bytes_ = 0;
  std::unique_ptr<Twin<float>> q_, k_, v_, q_norm_, k_norm_, sinks_, latent_norm_, inv_freq_, out_;
  std::unique_ptr<Twin<f16_t>> cache_;
  std::unique_ptr<Twin<int32_t>> pos_, slot_, table_;
  std::unique_ptr<Twin<uint8_t>> q8_;
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// --- against the reference ---

class GpuAttentionTest : public GpuTest, public ::testing::WithParamInterface<AttentionCase> {};

TEST_P(GpuAttentionTest, MatchesTheReference) {
  const AttentionCase c = GetParam();
  PagedTokens tokens(*ref_, *gpu_, c);
  tokens.attend(kRef, 0, tokens.T(), tokens.max_kv());
  tokens.attend(kGpu, 0, tokens.T(), tokens.max_kv());
  const std::vector<float> got = tokens.out().read(kGpu), want = tokens.out().read(kRef);
  // Split attention is f32 throughout: scores of head_dim products, then up to max_kv terms in chains of max_kv / 8 or
  // fewer. On tensor cores q and the probabilities are rounded to f16: an error of about 2^-11 / sqrt(3) in scores and
  // weights each. A new key that was changed is rounded to f16, on either side of a tie now and then: its own score may
  // move by that much.
  const double changed = c.shape.rope != RopeKind::none || c.shape.norm || c.shape.latent > 0 ? kEpsF16 : 0;
  const double few = (static_cast<double>(tokens.max_kv()) / 8 + 64) * kEps;
  const double bound = (tokens.T() <= kFewTokens ? few : 4 * kEpsF16) + changed;
  EXPECT_LE(relative_error(got, want), bound);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 64 * bound) << i;

  const std::vector<f16_t> cache = tokens.cache().read(kGpu), cache_want = tokens.cache().read(kRef);
  const double absolute = changed > 0 ? 64 * kEps : 0;  // of f32 in the rotation of values up to 16, where they cancel
  for (size_t i = 0; i < cache.size(); ++i) {
    const float a = f16_to_f32(cache[i]), b = f16_to_f32(cache_want[i]);
    ASSERT_TRUE(std::isnan(b) ? std::isnan(a) : std::fabs(a - b) <= 2 * changed * std::fabs(b) + absolute) << i;
  }
  const std::vector<uint8_t> q8 = tokens.q8().read(kGpu);
  EXPECT_TRUE(same_bits(tokens.quantized_output(), q8)) << "the 8-bit form";

  // Neither another run nor a larger bound on the context, which changes the grid, changes a bit.
  for (const int64_t max_kv : {tokens.max_kv(), tokens.n_ctx()}) {
    tokens.reset(kGpu);
    tokens.attend(kGpu, 0, tokens.T(), max_kv);
    EXPECT_TRUE(same_bits(tokens.out().read(kGpu), got)) << max_kv;
    EXPECT_TRUE(same_bits(tokens.cache().read(kGpu), cache)) << max_kv;
  }
}

std::vector<AttentionCase> attention_cases() {
  std::vector<AttentionCase> cases;
  for (const int64_t dim : {16, 32, 64, 80, 96, 128, 256}) {
    for (const RopeKind rope : {RopeKind::none, RopeKind::interleaved, RopeKind::neox}) {
      for (const int64_t n : {1, 2, 7, 33, 130}) {
        cases.push_back({{4, 2, dim, 0, rope, false}, {{0, n}}});
        cases.push_back({{4, 4, dim, 0, rope, true}, {{61, n}}});
      }
      cases.push_back({{4, 2, dim, 0, rope, true}, {{300, 1}, {0, 2}, {127, 3}}});
      cases.push_back({{4, 2, dim, 0, rope, true}, {{5, 33}, {0, 17}, {700, 1}, {128, 65}, {63, 64}}});
    }
  }
  for (const int64_t group : {1, 2, 3, 4, 7, 8, 16}) {
    for (const int64_t n : {1, 3, 20}) {
      cases.push_back({{group * 2, 2, 64, 0, RopeKind::neox, true}, {{150, n}}});
      cases.push_back({{group * 2, 2, 128, 0, RopeKind::interleaved, false}, {{2990, n}, {10, n}}});
    }
  }
  for (const int64_t window : {1, 17, 64, 100, 128, 1000}) {
    for (const int64_t first : {0, 127, 190, 1300}) {
      for (const int64_t n : {1, 3, 130}) cases.push_back({{4, 2, 64, window, RopeKind::neox, false}, {{first, n}}});
    }
    cases.push_back({{4, 2, 80, window, RopeKind::none, false}, {{900, 2}, {0, 1}, {130, 3}}});
    cases.push_back({{4, 2, 256, window, RopeKind::none, false}, {{900, 70}, {0, 1}, {130, 40}}});
  }
  for (const int64_t n : {1, 5, 70}) {
    for (const int64_t first : {0, 200, 1300}) {
      cases.push_back({{8, 2, 64, 0, RopeKind::neox, false, 1.5f}, {{first, n}}});
      cases.push_back({{8, 2, 64, 0, RopeKind::neox, false, 0, true}, {{first, n}}});
      cases.push_back({{16, 8, 256, 100, RopeKind::neox, true, 50.0f, true}, {{first, n}, {3, n}}});
    }
  }
  for (const int64_t first : {126, 127, 128, 255, 256, 999, 1023, 1024, 2047, 2999}) {
    cases.push_back({{32, 32, 128, 0, RopeKind::interleaved, false}, {{first, 1}}});
    cases.push_back({{8, 2, 64, 0, RopeKind::neox, false}, {{first, 1}}});
  }
  cases.push_back({{8, 1, 128, 0, RopeKind::neox, false}, {{9000, 1}}});
  cases.push_back({{2, 2, 128, 4096, RopeKind::interleaved, false}, {{15000, 1}}});
  cases.push_back({{2, 1, 128, 0, RopeKind::none, false}, {{3000, 9}}});
  for (const Shape& s :
       {Shape{.n_head = 4, .n_head_kv = 1, .head_dim = 40, .rope = RopeKind::interleaved, .latent = 32},
        Shape{.n_head = 19, .n_head_kv = 1, .head_dim = 576, .rope = RopeKind::neox, .latent = 512},
        Shape{.n_head = 9, .n_head_kv = 1, .head_dim = 320, .soft_cap = 2, .sinks = true, .latent = 264},
        Shape{.n_head = 8, .n_head_kv = 1, .head_dim = 64, .window = 100, .latent = 64}}) {
    for (const int64_t n : {1, 3, 8, 9, 70}) {
      for (const int64_t first : {0, 31, 127, 300, 1300}) cases.push_back({s, {{first, n}}});
    }
    cases.push_back({s, {{5, 33}, {0, 17}, {700, 1}, {128, 65}, {63, 64}}});
    cases.push_back({s, {{2999, 2}, {0, 1}, {130, 3}}});
  }
  std::vector<Part> many;  // more runs than one launch takes
  for (int64_t i = 0; i < 70; ++i) many.push_back({i * 3, 1 + i % 3});
  cases.push_back({{2, 1, 64, 0, RopeKind::neox, false}, many});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, GpuAttentionTest, ::testing::ValuesIn(attention_cases()));

// --- a few tokens together ---

class GpuFewTokensTest : public GpuTest, public ::testing::WithParamInterface<AttentionCase> {};

TEST_P(GpuFewTokensTest, HaveTheSameBitsAsAlone) {
  for (const bool interleaved : {false, true}) {
    PagedTokens tokens(*ref_, *gpu_, GetParam(), interleaved);
    ASSERT_LE(tokens.T(), kFewTokens);
    tokens.attend(kGpu, 0, tokens.T(), tokens.n_ctx());
    const std::vector<float> together = tokens.out().read(kGpu);
    const std::vector<f16_t> cache = tokens.cache().read(kGpu);
    const std::vector<uint8_t> q8 = tokens.q8().read(kGpu);
    for (const float x : together) ASSERT_TRUE(std::isfinite(x));
    tokens.reset(kGpu);
    for (int64_t t = 0; t < tokens.T(); ++t) tokens.attend(kGpu, t, 1, tokens.max_kv());
    EXPECT_TRUE(same_bits(tokens.out().read(kGpu), together));
    EXPECT_TRUE(same_bits(tokens.cache().read(kGpu), cache));
    EXPECT_TRUE(same_bits(tokens.q8().read(kGpu), q8));
  }
}

std::vector<AttentionCase> few_cases() {
  std::vector<AttentionCase> cases;
  for (const int64_t dim : {16, 64, 80, 96, 128, 256}) {
    for (const RopeKind rope : {RopeKind::none, RopeKind::interleaved, RopeKind::neox}) {
      const Shape s{4, 2, dim, 0, rope, rope != RopeKind::interleaved};
      for (int64_t n = 2; n <= kFewTokens; ++n) cases.push_back({s, {{123 * n, n}}});
      cases.push_back({s, {{0, 1}, {127, 1}, {128, 1}, {3000, 1}, {1000, 1}, {1, 1}, {255, 1}, {700, 1}}});
      cases.push_back({s, {{126, 4}, {2999, 2}, {5, 1}}});
    }
  }
  for (const int64_t group : {1, 3, 4, 8, 16}) {
    for (const int64_t window : {0, 1, 100, 300}) {
      cases.push_back({{group * 2, 2, 128, window, RopeKind::neox, true}, {{1500, 3}, {40, 2}}});
    }
  }
  cases.push_back({{32, 32, 128, 0, RopeKind::interleaved, false}, {{2047, 4}, {300, 1}}});
  const Shape latent{.n_head = 19, .n_head_kv = 1, .head_dim = 576, .rope = RopeKind::interleaved, .latent = 512};
  cases.push_back({latent, {{2047, 4}, {300, 1}, {0, 2}}});
  cases.push_back({latent, {{1, 8}}});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Shapes, GpuFewTokensTest, ::testing::ValuesIn(few_cases()));

// --- recorded ---

class GpuRecordedAttentionTest : public GpuTest {};

TEST_F(GpuRecordedAttentionTest, ReadsPositionsSlotsAndPagesWhenItRuns) {
  for (const std::vector<Part>& parts :
       {std::vector<Part>{{2100, 1}, {90, 1}}, std::vector<Part>{{700, 3}, {255, 3}}}) {
    const Shape shape{8, 2, 128, 0, RopeKind::neox, true};
    PagedTokens tokens(*ref_, *gpu_, {shape, parts});
    const int64_t n = parts[0].n_rows;
    std::vector<float> direct[2], recorded[2];
    for (const int64_t part : {0, 1}) {
      tokens.reset(kGpu);
      tokens.attend(kGpu, part * n, n, tokens.n_ctx());
      direct[part] = tokens.out().read(kGpu);
    }
    tokens.reset(kGpu);
    gpu_->recording()->begin();
    tokens.attend(kGpu, 0, n, tokens.n_ctx());
    const int id = gpu_->recording()->end();
    for (const int64_t part : {0, 1}) {
      tokens.reset(kGpu);
      tokens.move_rows(part * n, n);
      gpu_->recording()->launch(id);
      recorded[part] = tokens.out().read(kGpu);
      const auto width = static_cast<std::ptrdiff_t>(n * shape.n_head * shape.head_dim);
      EXPECT_TRUE(std::equal(recorded[part].begin(), recorded[part].begin() + width,
                             direct[part].begin() + static_cast<std::ptrdiff_t>(part) * width));
    }
  }
}

}  // namespace
}  // namespace hearth::test
