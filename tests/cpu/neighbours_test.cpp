// Products, predictors, rows and attention of up to kFewTokens tokens (neighbours.h).
#include "cpu/neighbours.h"

#include "core/hand_off.h"
#include "core/mailbox.h"

namespace hearth::test {
namespace {

class Neighbours : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Device, Neighbours, testing::ValuesIn(kEveryType),
                         [](const auto& p) { return std::string(traits(p.param).name); });

// --- products ---

TEST_P(Neighbours, Matmul) {
  for (const int64_t n : {32, 544, is_quantized(GetParam()) ? 4096 : 1003}) {
    const Weights adds = random_weights(1, GetParam(), 131, n), writes = random_weights(2, GetParam(), 37, n);
    std::mt19937 rng(5);
    const std::vector<float> bias = random_normal(rng, 131), y = random_normal(rng, kFewTokens * 136);
    check({fmt::format("matmul of {} columns", n), n, limits_of(GetParam(), 131, n),
           [&](Device& device, const Input& in, const Tokens& tokens) {
             std::vector<float> sums = gather(y, 136, tokens), products(tokens.size() * 37);
             const MatmulPart parts[] = {{adds.matrix(), {bias.data(), 131}, sums.data(), 136, true},
                                         {writes.matrix(), {}, products.data()}};
             device.matmul(parts, in, std::ssize(tokens));
             Rows rows(tokens.size());
             append(rows, sums, 136, 136), append(rows, products, 37, 37);
             return rows;
           }});
  }
}

// --- predictors ---

TEST_P(Neighbours, Predict) {
  constexpr int64_t kN = 700, kOwn = 300, kLinked = 130;
  const int64_t n_embd = is_quantized(GetParam()) ? 160 : 147, rank = 64;
  for (const bool low_rank : {true, false}) {
    const Weights fc1 = random_weights(1, GetParam(), rank, n_embd),
                  fc2 = random_weights(2, GetParam(), kN, low_rank ? rank : n_embd);
    std::mt19937 rng(10);
    const std::vector<float> bias = random_normal(rng, static_cast<size_t>(rank)),
                             threshold = random_normal(rng, kN, 10.0f);
    Predictor p{.fc2 = fc2.matrix(), .threshold = {threshold.data(), kN}};
    if (low_rank) p.fc1 = fc1.matrix(), p.fc1_bias = {bias.data(), rank}, p.relu = true;
    check({low_rank ? "low rank" : "gate copy", n_embd, limits_of(GetParam(), kN, n_embd),
           [&](Device& device, const Input& in, const Tokens& tokens) {
             const int64_t T = std::ssize(tokens);
             std::vector<int32_t> own(tokens.size() * kOwn), linked(tokens.size() * kLinked), counts(2 * tokens.size());
             const auto mailbox = device.hand_offs()->open_mailbox(T * n_embd, kN);
             const PredictArgs args{kOwn,
                                    {own.data(), counts.data(), kOwn},
                                    kLinked,
                                    {linked.data(), counts.data() + T, kLinked},
                                    {mailbox.get(), in.act.x, n_embd}};
             device.sparse_ffn()->predict(p, in, T, args);
             Rows rows(tokens.size());
             append(rows, args.own), append(rows, args.linked);
             const float* const posted = mailbox->wait_input();
             append(rows, std::vector<float>(posted, posted + T * n_embd), n_embd, n_embd);
             append(rows, mailbox->wait_neurons(T));
             mailbox->answer();
             return rows;
           }});
  }
}

// --- rows ---

TEST_P(Neighbours, Embed) {
  const int64_t n = is_quantized(GetParam()) ? 96 : 83;
  const Weights table = random_weights(1, GetParam(), 50, n), positions = random_weights(2, GetParam(), 30, n);
  const std::vector<int32_t> ids = {3, 49, 0, 3, 7, 21, 22, 48}, pos = {0, 5, 1, 20, 3, 3, 2, 19};
  for (const auto& device : devices(limits_of(GetParam(), 50, n))) {
    expect_no_neighbours(device->name(), [&](const Tokens& tokens) {
      std::vector<float> x(tokens.size() * static_cast<size_t>(n));
      const std::vector<int32_t> some_ids = gather(ids, 1, tokens), some_pos = gather(pos, 1, tokens);
      device->embed(table.matrix(), some_ids.data(), positions.matrix(), some_pos.data(), 2, std::ssize(tokens),
                    x.data());
      Rows rows(tokens.size());
      append(rows, x, n, n);
      return rows;
    });
  }
}

TEST(NeighboursOfAnyType, Norm) {
  constexpr int64_t kN = 147;
  const std::vector<float> x = inputs(kN);
  std::mt19937 rng(11);
  const std::vector<float> weight = random_normal(rng, kN), bias = random_normal(rng, kN);
  for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
    const NormArgs norm{.kind = kind, .weight = {weight.data(), kN}, .bias = {bias.data(), kN}, .n = kN};
    for (const auto& device : devices(limits_of(DType::q8_0, kN, kN))) {
      expect_no_neighbours(device->name(), [&](const Tokens& tokens) {
        Activations out(*device, gather(x, kN, tokens), kN);
        device->norm(norm, out.x.data(), std::ssize(tokens), out.act());
        std::vector<int32_t> q8;
        for (const std::byte b : out.q8) q8.push_back(static_cast<int32_t>(b));
        Rows rows(tokens.size());
        const auto row_bytes = static_cast<int64_t>(device->q8_bytes(kN));
        append(rows, out.x, kN, kN), append(rows, q8, row_bytes, row_bytes);
        return rows;
      });
    }
  }
}

// --- attention ---

// Tokens of several sequences, some with several tokens, one after the other or in one pass: a cache in other pages,
// rows in other slots.
TEST(NeighboursOfAnyType, Attention) {
  struct Where {
    int32_t sequence, pos;
  };
  constexpr Where kTokens[] = {{0, 300}, {1, 5}, {0, 301}, {2, 127}, {2, 128}, {1, 6}, {0, 302}, {3, 0}};
  constexpr int64_t kSequences = 4, kPagesEach = 3, kHeads = 6, kKvHeads = 2, kDim = 48, kKv = kKvHeads * kDim;
  constexpr int64_t kStride = kKv * kPagePositions + 32;
  constexpr size_t kOut = kHeads * kDim;
  std::mt19937 rng(12);
  const std::vector<float> q = random_normal(rng, kFewTokens * kOut), k = random_normal(rng, kFewTokens * kKv),
                           v = random_normal(rng, kFewTokens * kKv), q_norm = random_normal(rng, kDim),
                           k_norm = random_normal(rng, kDim);
  std::vector<float> inv_freq;
  for (int i = 0; i < 16; ++i) inv_freq.push_back(std::pow(0.7f, static_cast<float>(i)));
  // All sequences one behind the other; NaN where nothing is written yet.
  std::vector<f16_t> cache;
  for (const float x : random_normal(rng, kSequences * kPagesEach * kStride)) cache.push_back(f32_to_f16(x));
  for (const Where& w : kTokens) {
    for (int64_t h = 0; h < kKvHeads; ++h) {
      const int64_t page = w.sequence * kPagesEach + w.pos / kPagePositions, at = w.pos % kPagePositions;
      std::fill_n(cache.begin() + page * kStride + (h * kPagePositions + at) * kDim, (kPagePositions - at) * kDim,
                  f16_t{0x7E00});
    }
  }
  Limits limits = limits_for(kFewTokens, 1, kOut);
  limits.n_head = kHeads, limits.n_head_kv = kKvHeads, limits.head_dim = kDim;
  limits.max_context = kPagesEach * kPagePositions;
  // The passes: so many tokens each. Returns the outputs, and the cache as the sequences see it.
  const auto run = [&](Device& device, const std::vector<int64_t>& passes, int64_t window, int64_t max_kv) {
    std::vector<int32_t> slots(kSequences), pages(kSequences * kPagesEach);
    std::iota(slots.begin(), slots.end(), 0), std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng), std::shuffle(pages.begin(), pages.end(), rng);
    std::vector<f16_t> k_cache(cache.size()), v_cache(cache.size());
    const auto page_of = [&](int64_t sequence, int64_t i) {
      return pages[static_cast<size_t>(slots[static_cast<size_t>(sequence)] * kPagesEach + i)];
    };
    const auto each_page = [&](auto&& visit) {
      for (int64_t s = 0; s < kSequences; ++s) {
        for (int64_t i = 0; i < kPagesEach; ++i) visit((s * kPagesEach + i) * kStride, page_of(s, i) * kStride);
      }
    };
    each_page([&](int64_t from, int64_t to) {
      std::copy_n(cache.begin() + from, kStride, k_cache.begin() + to);
      std::copy_n(cache.begin() + from, kStride, v_cache.begin() + to);
    });
    std::vector<float> some_q = q, some_k = k;
    std::vector<int32_t> pos, slot;
    for (const Where& w : kTokens) pos.push_back(w.pos), slot.push_back(slots[static_cast<size_t>(w.sequence)]);
    Rows rows;
    size_t begin = 0;
    for (const int64_t T : passes) {
      AttentionArgs a;
      a.q = some_q.data() + begin * kOut, a.k = some_k.data() + begin * kKv, a.v = v.data() + begin * kKv;
      a.n_head = kHeads, a.n_head_kv = kKvHeads, a.head_dim = kDim;
      a.rope = RopeKind::neox, a.n_rot = 32, a.inv_freq = inv_freq.data();
      a.q_norm = {q_norm.data(), kDim}, a.k_norm = {k_norm.data(), kDim};
      a.cache = {k_cache.data(), v_cache.data(), kStride};
      a.rows = {pos.data() + begin, slot.data() + begin, pages.data(), kPagesEach};
      a.scale = 0.14f, a.window = window, a.max_kv = max_kv;
      Activations out(device, std::vector<float>(static_cast<size_t>(T) * kOut), kOut);
      device.attention(a, T, out.act());
      Activations quantized = out;
      device.quantize(quantized.act(), T, kOut);
      EXPECT_EQ(out.q8, quantized.q8);
      Rows some(static_cast<size_t>(T));
      append(some, out.x, kOut, kOut);
      rows.insert(rows.end(), some.begin(), some.end());
      begin += static_cast<size_t>(T);
    }
    std::vector<float>& after = rows.emplace_back();  // f16 as integers: NaN has bits, too
    each_page([&](int64_t, int64_t page) {
      std::copy_n(k_cache.begin() + page, kStride, std::back_inserter(after));
      std::copy_n(v_cache.begin() + page, kStride, std::back_inserter(after));
    });
    return rows;
  };
  for (const auto& device : devices(limits)) {
    for (const int64_t window : {0, 40, 200}) {
      const Rows alone = run(*device, std::vector<int64_t>(kFewTokens, 1), window, 303);
      for (int64_t T = 2; T <= kFewTokens; ++T) {
        const int64_t others = kFewTokens - T;
        std::vector<int64_t> passes = {T};
        if (others > 0) passes.push_back(others);
        const Rows together = run(*device, passes, window, limits.max_context);
        ASSERT_EQ(together.size(), alone.size());
        for (size_t t = 0; t < alone.size(); ++t) {
          ASSERT_TRUE(same_bits(together[t], alone[t])) << device->name() << ": token " << t << " among " << T;
        }
      }
    }
  }
}

}  // namespace
}  // namespace hearth::test
