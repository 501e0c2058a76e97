// Every operation of the SIMD device, on every instruction set of this machine, against the reference device; and bit
// for bit against itself with other numbers of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>

#include "core/panels.h"
#include "cpu/check_case.h"
#include "cpu/cpu.h"
#include "cpu/device_case.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {
namespace {

constexpr int64_t kTokens[] = {1, 2, 3, 7, 8, 33};
constexpr int64_t kManyTokens = 70;  // above every Kernels::dot_tokens, and not a multiple of a tile

int64_t random_cols(std::mt19937& rng, DType type, int64_t most) {
  const int64_t block = traits(type).block_size;
  return random_int(rng, 1, std::max<int64_t>(1, most / block)) * block;
}

class EveryType : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Device, EveryType, testing::ValuesIn(every_type()),
                         [](const auto& p) { return std::string(traits(p.param).name); });

TEST_P(EveryType, Matmul) {
  std::mt19937 rng(11);
  for (const int64_t T : kTokens) {
    check(matmul_case(rng(), GetParam(), T, {random_int(rng, 1, 90)}, random_cols(rng, GetParam(), 700)));
    check(matmul_case(rng(), GetParam(), T, {37, 1, 130}, random_cols(rng, GetParam(), 200),
                      {.bias = true, .strided = true}));
    check(matmul_case(rng(), GetParam(), T, {64}, whole_blocks(GetParam(), 544), {.bias = true, .accumulate = true}));
    check(matmul_case(rng(), GetParam(), T, {37, 1, 130}, random_cols(rng, GetParam(), 700),
                      {.bias = true, .accumulate = true, .packed = true}));
  }
  check(matmul_case(rng(), GetParam(), kManyTokens, {70, 3}, whole_blocks(GetParam(), 352),
                    {.bias = true, .strided = true}));
  check(matmul_case(rng(), GetParam(), kManyTokens, {33}, whole_blocks(GetParam(), 288), {.accumulate = true}));
}

TEST_P(EveryType, Embed) {
  std::mt19937 rng(12);
  for (const int64_t T : kTokens) {
    check(embed_case(rng(), GetParam(), T, random_cols(rng, GetParam(), 300), false));
    check(embed_case(rng(), GetParam(), T, random_cols(rng, GetParam(), 300), true));
  }
}

TEST_P(EveryType, FfnDense) {
  std::mt19937 rng(13);
  for (const int64_t T : kTokens) {
    for (const bool transposed : {true, false}) {
      // `down` has rows of n elements, down_t of n_embd.
      const int64_t n = transposed ? random_int(rng, 1, 150) : random_cols(rng, GetParam(), 350);
      FfnShape s{
          .type = GetParam(), .n = n, .n_embd = random_cols(rng, GetParam(), 200), .T = T, .transposed = transposed};
      check(ffn_case(rng(), s));
      s.act = Activation::silu;
      s.biases = true;
      check(ffn_case(rng(), s));
      s.gated = false;
      s.act = T % 2 == 0 ? Activation::gelu : Activation::gelu_tanh;
      check(ffn_case(rng(), s));
    }
  }
  check(ffn_case(
      1, {.type = GetParam(), .n = 64, .n_embd = whole_blocks(GetParam(), 96), .T = 3, .act = Activation::relu2}));
  check(ffn_case(2, {.type = GetParam(),
                     .n = 64,
                     .n_embd = whole_blocks(GetParam(), 96),
                     .T = 1,
                     .act = Activation::fat_relu,
                     .act_threshold = 1.5f}));
  check(ffn_case(3, {.type = GetParam(),
                     .n = 64,
                     .n_embd = whole_blocks(GetParam(), 96),
                     .T = 9,
                     .act = Activation::relu,
                     .up_relu = true}));
  for (const int64_t T : {1, 3, 9}) {  // clamped often
    check(ffn_case(7, {.type = GetParam(),
                       .n = 64,
                       .n_embd = whole_blocks(GetParam(), 96),
                       .T = T,
                       .act = Activation::clamped_silu,
                       .biases = true,
                       .act_threshold = 0.75f}));
  }
  check(ffn_case(4, {.type = GetParam(), .n = 1200, .n_embd = whole_blocks(GetParam(), 64), .T = 1}));
  check(ffn_case(5, {.type = GetParam(), .n = 320, .n_embd = whole_blocks(GetParam(), 160), .T = kManyTokens}));
  check(ffn_case(6, {.type = GetParam(),
                     .n = whole_blocks(GetParam(), 64),
                     .n_embd = whole_blocks(GetParam(), 160),
                     .T = kManyTokens,
                     .act = Activation::silu,
                     .transposed = false}));
}

TEST_P(EveryType, FfnSparse) {
  using Predicted = FfnShape::Predicted;
  std::mt19937 rng(14);
  int64_t T = 0;
  for (const double density : {0.0, 0.03, 0.1, 0.6, 1.0}) {
    for (const Predicted predicted : {Predicted::all, Predicted::superset, Predicted::subset, Predicted::none}) {
      FfnShape s{.type = GetParam(),
                 .n = random_int(rng, 1, 700),
                 .n_embd = random_cols(rng, GetParam(), 200),
                 .sparse = true};
      s.density = density;
      s.predicted = predicted;
      check(ffn_case(rng(), s));
      s.up_relu = s.biases = true;
      check(ffn_case(rng(), s));
      s.up_relu = s.gated = false;
      s.act = Activation::relu2;
      check(ffn_case(rng(), s));
      s.gated = true;
      s.act = Activation::silu;
      s.threshold = 0.2f;
      check(ffn_case(rng(), s));
      // The same with several tokens.
      s.n = random_int(rng, 1, 700);
      s.T = T++ % (kFewTokens - 1) + 2;
      check(ffn_case(rng(), s));
      s.act = Activation::relu;
      s.threshold = 0.0f;
      s.up_relu = true;
      check(ffn_case(rng(), s));
      s.biases = s.gated = s.up_relu = false;
      check(ffn_case(rng(), s));
    }
  }
}

// A partner's answer is added in the same pass.
TEST_P(EveryType, FfnSparseAddsAnAnswer) {
  std::mt19937 rng(19);
  for (const double density : {0.0, 0.1, 0.6, 1.0}) {
    FfnShape s{.type = GetParam(), .n_embd = random_cols(rng, GetParam(), 200), .sparse = true, .density = density};
    for (const bool gated : {true, false}) {
      s.gated = gated;
      s.n = random_int(rng, 1, 700);
      s.predicted = FfnShape::Predicted::superset;
      s.answered = true;
      s.up_relu = s.biases = gated;
      check(ffn_case(rng(), s));
      s.T = gated ? 2 : kFewTokens;
      check(ffn_case(rng(), s));
      s.T = 1;
      s.act = Activation::fat_relu;
      s.act_threshold = 0.5f;
      s.predicted = FfnShape::Predicted::all;
      check(ffn_case(rng(), s));
      s.act = Activation::silu;
      s.threshold = 0.2f;
      check(ffn_case(rng(), s));
      s = {.type = GetParam(), .n_embd = s.n_embd, .sparse = true, .density = density};
    }
  }
  // Lists at the borders of how they are cut, for every number of threads.
  for (const int64_t n : {1, 2, 5, 15, 16, 17, 32, 47, 48, 80, 81, 1300}) {
    check(ffn_case(rng(), {.type = GetParam(),
                           .n = n,
                           .n_embd = whole_blocks(GetParam(), 64),
                           .sparse = true,
                           .density = 1.0,
                           .predicted = FfnShape::Predicted::superset}));
    check(ffn_case(rng(), {.type = GetParam(),
                           .n = n,
                           .n_embd = whole_blocks(GetParam(), 64),
                           .T = 3,
                           .sparse = true,
                           .density = 1.0,
                           .predicted = FfnShape::Predicted::subset}));
  }
  check(ffn_case(
      rng(),
      {.type = GetParam(), .n = 20, .n_embd = whole_blocks(GetParam(), 2080), .sparse = true}));  // stripes of columns
}

TEST_P(EveryType, Predict) {
  using Kind = PredictShape::Kind;
  std::mt19937 rng(20);
  int64_t T = 0;
  for (const Kind kind : {Kind::low_rank, Kind::gate_copy}) {
    for (const double density : {0.0, 0.2, 1.0}) {
      for (const bool hand_off : {false, true}) {
        PredictShape s{.kind = kind, .type = GetParam(), .density = density, .hand_off = hand_off};
        s.n = random_int(rng, 1, 900);
        s.n_embd = random_cols(rng, GetParam(), 500);
        s.rank = random_cols(rng, GetParam(), 150);
        s.relu = s.bias = hand_off;
        const int64_t middle = std::min((s.n + 1) / 2 | 1, s.n);
        const auto check_with = [&](int64_t n_own, int64_t n_linked) {
          s.n_own = n_own, s.n_linked = n_linked;
          s.T = 1;
          check(predict_case(rng(), s));
          s.T = T++ % (kFewTokens - 1) + 2;
          check(predict_case(rng(), s));
        };
        for (const int64_t n_own : {int64_t{0}, middle, s.n}) check_with(n_own, hand_off ? 0 : s.n - n_own);
        s.relu = !s.relu;
        check_with(s.n, 0);
        check_with(s.n / 3, s.n / 3);  // the last ones are handed over, or nobody's
        check_with(0, s.n);
      }
    }
  }
}

TEST(Device, Norm) {
  std::mt19937 rng(15);
  for (const int64_t T : kTokens) {
    for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
      check(norm_case(rng(), kind, T, random_int(rng, 2, 600), false));
      check(norm_case(rng(), kind, T, random_int(rng, 2, 600), true));
    }
    check(quantize_case(rng(), T, 32 * random_int(rng, 2, 6)));
  }
}

TEST(Device, Rope) {
  std::mt19937 rng(16);
  for (const int64_t T : kTokens) {
    for (const RopeKind kind : {RopeKind::none, RopeKind::neox, RopeKind::interleaved}) {
      check(attention_case(rng(), {.runs = {{T, 5}}, .rope = kind, .n_rot = 64}));
      const AttentionShape odd{.runs = {{T, 5}, {1, 300}, {2, 126}},
                               .n_head = 3,
                               .n_head_kv = 3,
                               .head_dim = 20,
                               .rope = kind,
                               .n_rot = 12,
                               .norms = true};
      check(attention_case(rng(), odd));
    }
  }
}

TEST(Device, Attention) {
  std::mt19937 rng(17);
  const auto check_runs = [&](const std::vector<AttentionRun>& runs) {
    for (AttentionShape s : {AttentionShape{.n_head = 4, .n_head_kv = 2, .head_dim = 64},
                             AttentionShape{.n_head = 6, .n_head_kv = 2, .head_dim = 20},
                             AttentionShape{.n_head = 5, .n_head_kv = 5, .head_dim = 80, .window = 33},
                             AttentionShape{.n_head = 8, .n_head_kv = 1, .head_dim = 128, .soft_cap = 1.5f},
                             AttentionShape{.n_head = 4, .n_head_kv = 1, .head_dim = 32, .window = 9, .sinks = true},
                             AttentionShape{.n_head = 2, .n_head_kv = 2, .head_dim = 7, .window = 550}}) {
      s.runs = runs;
      check(attention_case(rng(), s));
    }
  };
  // One sequence, from its begin on and later.
  for (const int64_t T : {1, 2, 7, 8, 9, 33, 130}) {
    check(attention_case(rng(), {.runs = {{T, 0}}}));
    check(attention_case(rng(), {.runs = {{T, 300}}, .n_head = 6, .n_head_kv = 2, .head_dim = 20, .sinks = true}));
    check(attention_case(rng(), {.runs = {{T, 70}}, .n_head = 5, .n_head_kv = 5, .head_dim = 80, .window = 33}));
    check(attention_case(rng(), {.runs = {{T, 900}}, .n_head = 8, .n_head_kv = 1, .head_dim = 128}));
    check(attention_case(rng(), {.runs = {{T, 600}}, .n_head = 2, .n_head_kv = 2, .head_dim = 7, .window = 550}));
  }
  // Several ones; tokens on both sides of a page's end.
  check_runs({{1, 0}, {1, 127}, {1, 128}, {1, 255}, {1, 256}, {1, 700}, {1, 5}, {1, 1}});
  check_runs({{3, 126}, {4, 255}, {1, 600}});
  check_runs({{1, 600}, {40, 100}, {1, 0}, {64, 64}, {2, 127}});
  for (const int64_t T : {2, 20}) {
    check(attention_case(rng(), {.runs = {{T, 128}, {1, 400}, {T, 130}}, .forked = true}));
    check(attention_case(rng(), {.runs = {{T, 250}, {T, 129}}, .window = 140, .forked = true}));
  }
}

TEST(Device, Argmax) {
  std::mt19937 rng(18);
  const float nan = std::nanf(""), inf = INFINITY;
  auto logits = random_normal(rng, 1003);
  check(argmax_case(logits, "random"));
  logits[700] = logits[13] = 50.0f;
  check(argmax_case(logits, "tie"));
  logits[0] = logits[20] = nan;
  check(argmax_case(logits, "with NaN"));
  check(argmax_case({nan, nan, -inf, nan}, "one number"));
  check(argmax_case({nan, nan}, "no number"));
  check(argmax_case({-inf, -inf}, "no finite number"));
  check(argmax_case({1.0f}, "single"));
  for (const int64_t T : {2, 8, 20}) {
    logits = random_normal(rng, static_cast<size_t>(T * 177));
    for (int64_t t = 0; t < T; ++t) logits[static_cast<size_t>(t * 177 + t % 177)] = t % 3 == 0 ? nan : 9.0f;
    check(argmax_case(logits, "rows", T));
  }
}

// Sparse with threshold 0 loses nothing: it equals dense, on the same device.
TEST(Device, SparseEqualsDense) {
  ThreadTeam team(2);
  const auto check_shape = [&](const FfnShape& shape, cpu::Isa isa) {
    FfnShape s = shape;
    const Case sparse = ffn_case(21, s);
    const auto device = cpu::make_device(team, isa);
    const Results a = run_case(sparse, *device);
    // The same seed and shape give the same weights; only the operation differs.
    s.predicted = FfnShape::Predicted::superset;
    const Results b = run_case(ffn_case(21, s), *device);
    const Results dense = run_case(dense_twin(21, s), *device);
    for (size_t i = 0; i < a[0].second.size(); ++i) {
      ASSERT_EQ(a[0].second[i], b[0].second[i]) << "a superset of the active neurons changes nothing";
      ASSERT_NEAR(a[0].second[i], dense[0].second[i], 2 * sparse.tolerance[0][i]) << sparse.name;
    }
  };
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const DType type : every_type()) {
      for (const Activation act : {Activation::relu, Activation::relu2}) {
        for (const int64_t T : {1, 5}) {
          check_shape({.type = type,
                       .n = 400,
                       .n_embd = whole_blocks(type, 128),
                       .T = T,
                       .act = act,
                       .sparse = true,
                       .density = 0.2},
                      isa);
        }
      }
    }
  }
}

TEST(Device, BatchEqualsTokenByToken) {
  ThreadTeam team(2);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const auto device = cpu::make_device(team, isa);
    for (const DType type : every_type()) {
      const int64_t T = kManyTokens, rows = 50, cols = whole_blocks(type, 320);
      const Case batch = matmul_case(31, type, T, {rows}, cols);
      const Weights w = random_weights(77, type, rows, cols);
      const std::vector<float> x = random_activations(78, static_cast<size_t>(T * cols));
      device->reserve(batch.limits);
      Bound b(*device);
      const Act in = b.activations(x, T, cols);
      std::vector<float> together(static_cast<size_t>(T * rows)), apart(together.size());
      const Matrix m = device->adopt(w.matrix());
      const MatmulPart all{.w = m, .y = together.data()};
      device->matmul({&all, 1}, in, T);
      for (int64_t t = 0; t < T; ++t) {
        const MatmulPart one{.w = m, .y = apart.data() + t * rows};
        const Act token{in.x + t * cols,
                        static_cast<std::byte*>(in.q8) + static_cast<size_t>(t) * device->q8_bytes(cols)};
        device->matmul({&one, 1}, token, 1);
      }
      // Products of unit-variance numbers: |sum| of magnitudes about 0.64 cols.
      const double tolerance = 2 * (static_cast<double>(cols) / 4 + 16) * 0x1p-24 * static_cast<double>(cols);
      for (size_t i = 0; i < together.size(); ++i) ASSERT_NEAR(together[i], apart[i], tolerance);
    }
  }
}

TEST(Device, PanelsUnpackToTheFilesRows) {
  ThreadTeam team(2);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const auto device = cpu::make_device(team, isa);
    for (const DType type : every_type()) {
      for (const int64_t rows : {1, 32, 77}) {
        const Weights w = random_weights(79, type, rows, whole_blocks(type, 320));
        const Matrix m = w.matrix();
        if (device->packed_bytes(m) == 0) continue;
        std::vector<std::byte> panels(device->packed_bytes(m)), back(m.bytes());
        const Matrix packed = device->pack(m, panels.data());
        EXPECT_EQ(stored_bytes(packed), panels.size());
        const Matrix unpacked = unpack_panels(packed, back.data());
        EXPECT_EQ(unpacked.layout, Layout::rows);
        EXPECT_EQ(std::memcmp(unpacked.data, m.data, m.bytes()), 0) << traits(type).name << ", " << rows;
      }
    }
  }
}

TEST(Device, NonFiniteActivationsShow) {
  ThreadTeam team(1);
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(cpu::make_reference_device());
  for (const cpu::Isa isa : cpu::available_isas()) devices.push_back(cpu::make_device(team, isa));
  for (const auto& device : devices) {
    for (const float bad : {INFINITY, -INFINITY, std::nanf("")}) {
      Weights w = random_weights(5, DType::q8_0, 3, 64);
      Limits l;
      l.max_cols = l.n_embd = 64;
      l.quantized_weights = true;
      device->reserve(l);
      // A norm with a non-finite weight yields a non-finite activation.
      std::vector<float> x(64, 1.0f), weight(64, 1.0f), y(3), h(64);
      weight[40] = bad;
      std::vector<std::byte> q8(device->q8_bytes(64));
      const NormArgs norm{.weight = {weight.data(), 64}, .n = 64};
      const Act act{h.data(), q8.data()};
      device->norm(norm, x.data(), 1, act);
      const MatmulPart part{.w = device->adopt(w.matrix()), .y = y.data()};
      device->matmul({&part, 1}, act, 1);
      for (const float v : y) EXPECT_TRUE(std::isnan(v)) << device->name() << " hides " << bad;
    }
  }
}

// Whatever a block holds: ordinary numbers, zeros, numbers whose scale is not representable, infinities, NaN.
TEST(Device, QuantizedActivationsHaveTheSameBitsOnEveryInstructionSet) {
  constexpr int64_t kN = 40 * 32 - 6;
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  std::vector<float> x(kN);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t block = i / 32;
    const float scale = block % 4 == 0 ? 0.0f : block % 4 == 1 ? 1e-39f * static_cast<float>(block) : 1.0f;
    x[i] = i % 5 == 0 ? 0.0f : scale * normal(rng);
  }
  x[3 * 32 + 7] = INFINITY, x[7 * 32] = -INFINITY, x[11 * 32 + 31] = std::nanf(""), x[15 * 32] = -std::nanf("");
  ThreadTeam team(1);
  std::vector<std::byte> first;
  for (const cpu::Isa isa : cpu::available_isas()) {
    const auto device = cpu::make_device(team, isa);
    std::vector<std::byte> q8(device->q8_bytes(kN));
    device->quantize({x.data(), q8.data()}, 1, kN);
    if (first.empty()) first = q8;
    EXPECT_EQ(q8, first) << device->name();
  }
}

TEST(Device, AccountsForItsMemory) {
  ThreadTeam team(1);
  const auto device = cpu::make_device(team);
  EXPECT_TRUE(device->memory().empty());
  {
    const DeviceBuffer a = device->allocate(1000, Purpose::kv_cache);
    DeviceBuffer b = device->allocate(24, Purpose::kv_cache);
    ASSERT_EQ(device->memory().size(), 1u);
    EXPECT_EQ(device->memory()[0].purpose, Purpose::kv_cache);
    EXPECT_EQ(device->memory()[0].bytes, 1024u);
    b = {};
    EXPECT_EQ(device->memory()[0].bytes, 1000u);
  }
  EXPECT_TRUE(device->memory().empty());
}

}  // namespace
}  // namespace hearth::test
