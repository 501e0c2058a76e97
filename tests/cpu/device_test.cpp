// Every operation of the SIMD device, on every instruction set of this machine, against the reference device; and bit
// for bit against itself with other numbers of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <random>

#include "cpu/cpu.h"
#include "cpu/device_case.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {
namespace {

using Results = std::vector<std::pair<std::string, std::vector<double>>>;

Results run_case(const Case& c, Device& device) {
  device.reserve(c.limits);
  Bound bound(device);
  const auto run = c.bind(bound);
  bound.reset();
  run();
  return bound.read();
}

bool same_bits(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

// Elements that an operation leaves alone (NaN in both, behind a stride) agree; all others within the tolerance.
void compare(const Case& c, const Results& expected, const Results& got, const std::string& device) {
  ASSERT_EQ(expected.size(), got.size());
  ASSERT_EQ(expected.size(), c.tolerance.size());
  for (size_t o = 0; o < expected.size(); ++o) {
    const auto& [name, want] = expected[o];
    const std::vector<double>& have = got[o].second;
    ASSERT_EQ(want.size(), have.size());
    ASSERT_EQ(want.size(), c.tolerance[o].size());
    double squares = 0, largest_tolerance = 0, worst = 0;
    size_t n = 0, worst_at = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(std::isnan(want[i]), std::isnan(have[i]))
          << c.name << " on " << device << ": " << name << "[" << i << "]";
      if (std::isnan(want[i])) continue;
      ASSERT_TRUE(std::isfinite(want[i]) && std::isfinite(have[i])) << c.name << ": " << name << "[" << i << "]";
      squares += want[i] * want[i];
      ++n;
      largest_tolerance = std::max(largest_tolerance, c.tolerance[o][i]);
      const double excess = std::fabs(want[i] - have[i]) - c.tolerance[o][i];
      if (excess > worst) {
        worst = excess;
        worst_at = i;
      }
    }
    EXPECT_LE(worst, 0.0) << c.name << " on " << device << ": " << name << "[" << worst_at << "] is " << have[worst_at]
                          << ", expected " << want[worst_at] << " within " << c.tolerance[o][worst_at];
    if (largest_tolerance == 0) continue;  // exact, or empty
    EXPECT_LE(largest_tolerance, c.vacuous * std::sqrt(squares / static_cast<double>(n)))
        << c.name << ": the bound on " << name << " says nothing";
  }
}

void check(const Case& c) {
  SCOPED_TRACE(c.name);
  const auto reference = cpu::make_reference_device();
  const Results expected = run_case(c, *reference);
  for (const cpu::Isa isa : cpu::available_isas()) {
    Results one;
    for (const int threads : {1, 2, 3, 5}) {
      static std::map<int, std::unique_ptr<ThreadTeam>> teams;
      auto& team = teams[threads];
      if (!team) team = std::make_unique<ThreadTeam>(threads);
      const auto device = cpu::make_device(*team, isa);
      const Results got = run_case(c, *device);
      if (threads == 1) {
        compare(c, expected, got, device->name());
        one = got;
        continue;
      }
      for (size_t o = 0; o < one.size(); ++o) {
        for (size_t i = 0; i < one[o].second.size(); ++i) {
          ASSERT_TRUE(same_bits(one[o].second[i], got[o].second[i]))
              << device->name() << ": " << one[o].first << "[" << i << "] is " << got[o].second[i]
              << ", with one thread " << one[o].second[i];
        }
      }
    }
  }
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0};
constexpr int64_t kTokens[] = {1, 2, 3, 7, 8, 33};
constexpr int64_t kManyTokens = 70;  // above every Kernels::dot_tokens, and not a multiple of a tile

int64_t random_cols(std::mt19937& rng, DType type, int64_t most) {
  const int64_t block = traits(type).block_size;
  return random_int(rng, 1, most / block) * block;
}

class EveryType : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Device, EveryType, testing::ValuesIn(kTypes),
                         [](const auto& p) { return std::string(traits(p.param).name); });

TEST_P(EveryType, Matmul) {
  std::mt19937 rng(11);
  for (const int64_t T : kTokens) {
    check(matmul_case(rng(), GetParam(), T, {random_int(rng, 1, 90)}, random_cols(rng, GetParam(), 700)));
    check(matmul_case(rng(), GetParam(), T, {37, 1, 130}, random_cols(rng, GetParam(), 200),
                      {.bias = true, .strided = true}));
    check(matmul_case(rng(), GetParam(), T, {64}, 544, {.bias = true, .accumulate = true}));
  }
  check(matmul_case(rng(), GetParam(), kManyTokens, {70, 3}, 352, {.bias = true, .strided = true}));
  check(matmul_case(rng(), GetParam(), kManyTokens, {33}, 288, {.accumulate = true}));
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
      s.act = Activation::gelu;
      check(ffn_case(rng(), s));
    }
  }
  check(ffn_case(1, {.type = GetParam(), .n = 64, .n_embd = 96, .T = 3, .act = Activation::relu2}));
  check(ffn_case(
      2, {.type = GetParam(), .n = 64, .n_embd = 96, .T = 1, .act = Activation::fat_relu, .act_threshold = 1.5f}));
  check(ffn_case(3, {.type = GetParam(), .n = 64, .n_embd = 96, .T = 9, .act = Activation::relu, .up_relu = true}));
  check(ffn_case(4, {.type = GetParam(), .n = 1200, .n_embd = 64, .T = 1}));
  check(ffn_case(5, {.type = GetParam(), .n = 320, .n_embd = 160, .T = kManyTokens}));
  check(ffn_case(
      6, {.type = GetParam(), .n = 64, .n_embd = 160, .T = kManyTokens, .act = Activation::silu, .transposed = false}));
}

TEST_P(EveryType, FfnSparse) {
  using Predicted = FfnShape::Predicted;
  std::mt19937 rng(14);
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
    }
  }
}

// Gates that come with the list, and gates that are handed over.
TEST_P(EveryType, FfnSparseExchanges) {
  std::mt19937 rng(19);
  for (const double density : {0.0, 0.1, 0.6, 1.0}) {
    FfnShape s{.type = GetParam(), .n_embd = random_cols(rng, GetParam(), 200), .sparse = true, .density = density};
    for (const bool gated : {true, false}) {
      s.gated = gated;
      s.n = random_int(rng, 1, 700);
      s.predicted = FfnShape::Predicted::superset;
      s.gate_values = true;
      s.up_relu = s.biases = gated;
      check(ffn_case(rng(), s));
      s.act = Activation::fat_relu;
      s.act_threshold = 0.5f;
      check(ffn_case(rng(), s));
      s.predicted = FfnShape::Predicted::all;
      s.gate_values = false;
      s.n_handed = random_int(rng, 1, 300);
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
                           .n_embd = 64,
                           .sparse = true,
                           .density = 1.0,
                           .predicted = FfnShape::Predicted::superset}));
  }
  check(ffn_case(rng(), {.type = GetParam(), .n = 20, .n_embd = 2080, .sparse = true}));  // stripes of columns
}

TEST_P(EveryType, Predict) {
  using Kind = PredictShape::Kind;
  std::mt19937 rng(20);
  for (const Kind kind : {Kind::low_rank, Kind::gate_copy, Kind::signs}) {
    if (kind == Kind::signs && GetParam() != DType::f32) continue;  // reads no weights
    for (const double density : {0.0, 0.2, 1.0}) {
      for (const bool hand_off : {false, true}) {
        PredictShape s{.kind = kind, .type = GetParam(), .density = density, .hand_off = hand_off};
        s.n = random_int(rng, 1, 900);
        s.n_embd = random_cols(rng, GetParam(), 500);
        s.rank = random_cols(rng, GetParam(), 150);
        s.relu = s.bias = hand_off;
        for (const int64_t n_first : {int64_t{0}, (s.n + 1) / 2 | 1, s.n}) {
          s.n_first = std::min(n_first, s.n);
          check(predict_case(rng(), s));
        }
        s.relu = !s.relu;
        check(predict_case(rng(), s));
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
      check(rope_case(rng(), {.kind = kind, .T = T}));
      check(rope_case(rng(),
                      {.kind = kind, .T = T, .n_head = 3, .n_head_kv = 3, .head_dim = 20, .n_rot = 12, .norms = true}));
    }
  }
}

TEST(Device, Attention) {
  std::mt19937 rng(17);
  for (const int64_t T : {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{33}, int64_t{130}}) {
    check(attention_case(rng(), {.T = T, .first_pos = 0, .n_ctx = 140}));
    check(attention_case(rng(), {.T = T, .first_pos = 300, .n_head = 6, .n_head_kv = 2, .head_dim = 20, .n_ctx = 500}));
    check(attention_case(
        rng(), {.T = T, .first_pos = 70, .n_head = 5, .n_head_kv = 5, .head_dim = 80, .n_ctx = 200, .window = 33}));
    check(
        attention_case(rng(), {.T = T, .first_pos = 900, .n_head = 8, .n_head_kv = 1, .head_dim = 128, .n_ctx = 1030}));
    check(attention_case(
        rng(), {.T = T, .first_pos = 600, .n_head = 2, .n_head_kv = 2, .head_dim = 7, .n_ctx = 800, .window = 550}));
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
}

// Sparse with threshold 0 loses nothing: it equals dense, on the same device.
TEST(Device, SparseEqualsDense) {
  ThreadTeam team(2);
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (const DType type : kTypes) {
      for (const Activation act : {Activation::relu, Activation::relu2}) {
        FfnShape s{.type = type, .n = 400, .n_embd = 128, .act = act, .sparse = true, .density = 0.2};
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
      }
    }
  }
}

// k of the n numbers from 0 on, ascending.
std::vector<int32_t> random_subset(std::mt19937& rng, int64_t n, int64_t k) {
  std::vector<int32_t> all(static_cast<size_t>(n)), some;
  std::iota(all.begin(), all.end(), 0);
  std::sample(all.begin(), all.end(), std::back_inserter(some), k, rng);
  return some;
}

// Rows that are fetched early, for a list that is more or less the one that comes, and parts of lists that follow the
// threads' speeds change nothing but the time.
TEST(Device, FetchedRowsAndLearntPartsGiveTheSameBits) {
  std::mt19937 rng(77);
  for (const int n_threads : {1, 2, 3}) {
    ThreadTeam team(n_threads);
    const auto device = cpu::make_device(team);
    for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
      const int64_t n = 700, n_embd = 320;
      const Weights gate = random_weights(1, type, n, n_embd), up = random_weights(2, type, n, n_embd),
                    down = random_weights(3, type, n, n_embd);
      FfnShard s;
      s.act = Activation::relu;
      s.gate = device->adopt(gate.matrix()), s.up = device->adopt(up.matrix()), s.down_t = device->adopt(down.matrix());
      Limits limits = limits_for(1, n, n_embd);
      limits.n_ff = n, limits.quantized_weights = true;
      device->reserve(limits);
      Bound b(*device);
      const Act in = b.activations(random_activations(4, static_cast<size_t>(n_embd)), 1, n_embd);
      for (const int64_t n_listed : {0, 1, 2, 50, 400, 700}) {
        const std::vector<int32_t> listed = random_subset(rng, n, n_listed);
        const auto n_predicted = static_cast<int32_t>(listed.size());
        // `too_late`: the hand-off is there before fetch() has brought any row, its list after fetch_input() has gone
        // on.
        const auto sum_of = [&](const std::vector<int32_t>* hinted, bool too_late) {
          HostMailbox box(1, n);
          const float x = 0;
          if (too_late) box.post_input(&x, 1);
          if (hinted != nullptr) device->fetch(s, *hinted, box);
          if (too_late) box.wait_input();
          if (hinted != nullptr) device->fetch_input(s, in, box);
          std::vector<float> y(static_cast<size_t>(n_embd), 0.5f);
          SparseArgs sparse;
          sparse.predicted = listed.data(), sparse.n_predicted = &n_predicted;
          device->ffn_sparse(s, sparse, in, {}, y.data());
          return y;
        };
        const std::vector<float> expected = sum_of(nullptr, false);
        for (const auto& hinted : {listed, random_subset(rng, n, n_listed), random_subset(rng, n, n / 3), {}}) {
          ASSERT_EQ(sum_of(&hinted, false), expected) << n_threads << " threads, " << n_listed << " listed";
          ASSERT_EQ(sum_of(&hinted, true), expected) << n_threads << " threads, " << n_listed << " listed";
        }
      }
    }
  }
}

// A list that was fetched is dealt one piece to a thread, however long it is; but not a longer one than scratch holds.
TEST(Device, AFetchedListMayBeLongerThanScratch) {
  ThreadTeam team(1);
  const auto device = cpu::make_device(team);
  const int64_t n = 40'000, n_embd = 32;
  const Weights gate = random_weights(1, DType::f16, n, n_embd), up = random_weights(2, DType::f16, n, n_embd),
                down = random_weights(3, DType::f16, n, n_embd);
  FfnShard s;
  s.act = Activation::relu;
  s.gate = device->adopt(gate.matrix()), s.up = device->adopt(up.matrix()), s.down_t = device->adopt(down.matrix());
  const std::vector<float> bias(static_cast<size_t>(n), 1e3f);  // all active
  s.gate_bias = {bias.data(), n};
  Limits limits = limits_for(1, n, n_embd);
  limits.n_ff = n;
  device->reserve(limits);
  Bound b(*device);
  const Act in = b.activations(random_activations(4, static_cast<size_t>(n_embd)), 1, n_embd);
  std::vector<int32_t> all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  const auto count = static_cast<int32_t>(n);
  const auto sum_of = [&](bool fetched) {
    const HostMailbox nothing_comes(1, 1);
    if (fetched) device->fetch(s, all, nothing_comes);
    std::vector<float> y(static_cast<size_t>(n_embd), 0.5f);
    SparseArgs sparse;
    sparse.predicted = all.data(), sparse.n_predicted = &count;
    device->ffn_sparse(s, sparse, in, {}, y.data());
    return y;
  };
  EXPECT_EQ(sum_of(true), sum_of(false));
}

TEST(Device, BatchEqualsTokenByToken) {
  ThreadTeam team(2);
  for (const cpu::Isa isa : cpu::available_isas()) {
    const auto device = cpu::make_device(team, isa);
    for (const DType type : kTypes) {
      const int64_t T = kManyTokens, rows = 50, cols = 320;
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
