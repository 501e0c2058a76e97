// The feed-forward network of up to kFewTokens tokens (neighbours.h): dense, and of active neurons alone.
#include "core/cold_rows.h"
#include "core/hand_off.h"
#include "core/mailbox.h"
#include "cpu/neighbours.h"

namespace hearth::test {
namespace {

class NeighboursFfn : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Device, NeighboursFfn, testing::ValuesIn(kEveryType),
                         [](const auto& p) { return std::string(traits(p.param).name); });

struct Ffn {
  static constexpr int32_t kN = 1216;
  explicit Ffn(DType type, bool gated = true, bool transposed = true)
      : n_embd(is_quantized(type) ? 160 : 83),
        gate(random_weights(1, type, kN, n_embd)),
        up(gated ? random_weights(2, type, kN, n_embd) : Weights{}),
        down(random_weights(3, type, transposed ? kN : n_embd, transposed ? n_embd : kN)) {
    std::mt19937 rng(6);
    gate_bias = random_normal(rng, kN), up_bias = random_normal(rng, kN);
    y_bias = random_normal(rng, static_cast<size_t>(n_embd));
    y = random_normal(rng, static_cast<size_t>(kFewTokens * n_embd));
    shard.gate = gate.matrix();
    if (gated) shard.up = up.matrix(), shard.up_bias = {up_bias.data(), kN};
    (transposed ? shard.down_t : shard.down) = down.matrix();
    shard.gate_bias = {gate_bias.data(), kN};
    shard.act = Activation::relu;
  }
  // Most neurons fire, or few.
  Ffn& shift_gates(float by) {
    for (float& b : gate_bias) b += by * std::sqrt(static_cast<float>(n_embd));
    return *this;
  }
  Vector bias() const { return {y_bias.data(), n_embd}; }
  Problem problem(const std::string& name, decltype(Problem::run) run) const {
    return {name, n_embd, limits_of(gate.type, kN, n_embd), std::move(run)};
  }
  Problem dense(const std::string& name) const {
    return problem(name, [this](Device& device, const Input& in, const Tokens& tokens) {
      std::vector<float> sums = gather(y, n_embd, tokens);
      device.ffn_dense(shard, in, std::ssize(tokens), bias(), sums.data(), nullptr);
      Rows rows(tokens.size());
      append(rows, sums, n_embd, n_embd);
      return rows;
    });
  }
  // With `sparse(tokens)`; `most_active` gets what the token with the most active neurons has.
  template <typename Sparse>
  Problem sparse(const std::string& name, Sparse sparse, int32_t* most_active) const {
    return problem(name, [=, this](Device& device, const Input& in, const Tokens& tokens) {
      std::vector<float> sums = gather(y, n_embd, tokens);
      std::vector<int32_t> n_active(tokens.size(), -1);
      SparseArgs args = sparse(tokens);
      args.n_active = n_active.data();
      device.sparse_ffn()->ffn_sparse(shard, args, in, std::ssize(tokens), bias(), sums.data(), nullptr);
      *most_active = std::max(*most_active, *std::max_element(n_active.begin(), n_active.end()));
      Rows rows(tokens.size());
      append(rows, sums, n_embd, n_embd), append(rows, n_active, 1, 1);
      return rows;
    });
  }

  int64_t n_embd;
  Weights gate, up, down;
  std::vector<float> gate_bias, up_bias, y_bias, y;
  FfnShard shard;
};

// The lists of kFewTokens tokens, and those of some of them.
class Lists {
 public:
  Lists(const std::vector<int64_t>& sizes, int64_t n) : n_(n) {
    std::mt19937 rng(7);
    std::vector<int32_t> all(static_cast<size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    for (const int64_t size : sizes) {
      std::vector<int32_t> some;
      std::sample(all.begin(), all.end(), std::back_inserter(some), size, rng);
      some.resize(static_cast<size_t>(n), -1);
      all_.insert(all_.end(), some.begin(), some.end());
      counts_.push_back(static_cast<int32_t>(size));
    }
  }
  NeuronLists of(const Tokens& tokens) {
    some_ = gather(all_, n_, tokens), some_counts_ = gather(counts_, 1, tokens);
    return {some_.data(), some_counts_.data(), n_};
  }

 private:
  int64_t n_;
  std::vector<int32_t> all_, counts_, some_, some_counts_;
};

TEST_P(NeighboursFfn, FfnDense) {
  for (const bool transposed : {true, false}) {
    Ffn f(GetParam(), true, transposed);
    check(f.dense("relu"));
    f.shard.act = Activation::silu, f.shard.up_relu = true;
    check(f.dense("silu, dReLU"));
    Ffn ungated(GetParam(), false, transposed);
    ungated.shard.act = Activation::gelu;
    check(ungated.dense("gelu, not gated"));
  }
}

// Every way in which neurons are found, for FFNs of every form.
template <typename Check>
void each_sparse_ffn(DType type, float shift, Check&& check_form) {
  check_form("relu", Ffn(type).shift_gates(shift), 0.0f);
  Ffn drelu(type);
  drelu.shard.up_relu = true;
  check_form("dReLU", drelu.shift_gates(shift), 0.0f);
  Ffn threshold(type);
  threshold.shard.act = Activation::silu;
  check_form("silu with a threshold", threshold.shift_gates(shift), 0.2f);
  Ffn ungated(type, false);
  ungated.shard.act = Activation::relu2;
  check_form("relu2, not gated", ungated.shift_gates(shift), 0.0f);
}

constexpr int32_t kOnePartialSum = 256;  // cpu/tiling.h: more neurons are summed in two parts

TEST_P(NeighboursFfn, FfnSparseByGates) {
  each_sparse_ffn(GetParam(), -0.6f, [](const char* name, const Ffn& f, float threshold) {
    int32_t most_active = 0;
    check(f.sparse(
        name, [=](const Tokens&) { return SparseArgs{.threshold = threshold}; }, &most_active));
    EXPECT_GT(most_active, kOnePartialSum) << name;
  });
}

TEST_P(NeighboursFfn, FfnSparseByLists) {
  each_sparse_ffn(GetParam(), 0.6f, [](const char* name, const Ffn& f, float threshold) {
    Lists lists({0, Ffn::kN, 300, 1, 33, 256, 257, 900}, Ffn::kN);
    int32_t most_active = 0;
    const auto listed = [&](const Tokens& tokens) {
      return SparseArgs{.candidates = lists.of(tokens), .threshold = threshold};
    };
    check(f.sparse(name, listed, &most_active));
    EXPECT_GT(most_active, 2 * kOnePartialSum) << name;  // of dReLU's, half are zero
  });
}

TEST_P(NeighboursFfn, FfnSparseWithEmptyListsAlone) {
  Ffn f(GetParam());
  Lists lists(std::vector<int64_t>(kFewTokens), Ffn::kN);
  int32_t most_active = 0;
  check(f.sparse(
      "none", [&](const Tokens& tokens) { return SparseArgs{.candidates = lists.of(tokens)}; }, &most_active));
  EXPECT_EQ(most_active, 0);
}

TEST_P(NeighboursFfn, FfnSparseWithLinkedNeurons) {
  Ffn f(GetParam()), other(GetParam());
  f.shift_gates(0.6f), other.shift_gates(0.2f);
  Lists lists({0, 500, 300, 1, 33, 256, 257, 900}, Ffn::kN), named({5, 0, 400, 700, 1, 0, 256, 257}, Ffn::kN);
  check(f.problem("linked", [&](Device& device, const Input& in, const Tokens& tokens) {
    std::vector<float> sums = gather(f.y, f.n_embd, tokens);
    std::vector<int32_t> n_active(tokens.size(), -1), n_linked_active(tokens.size(), -1);
    const LinkedNeurons linked{device.cold_rows()->link(other.shard, nullptr), named.of(tokens),
                               n_linked_active.data()};
    SparseArgs args{.candidates = lists.of(tokens), .n_active = n_active.data()};
    args.linked = &linked;
    device.sparse_ffn()->ffn_sparse(f.shard, args, in, std::ssize(tokens), f.bias(), sums.data(), nullptr);
    // The same as one shard's FFN after the other's.
    std::vector<float> want = gather(f.y, f.n_embd, tokens);
    args.linked = nullptr;
    device.sparse_ffn()->ffn_sparse(f.shard, args, in, std::ssize(tokens), f.bias(), want.data(), nullptr);
    args.candidates = named.of(tokens);
    device.sparse_ffn()->ffn_sparse(other.shard, args, in, std::ssize(tokens), {}, want.data(), nullptr);
    EXPECT_TRUE(same_bits(sums, want));
    EXPECT_EQ(n_linked_active, n_active);
    Rows rows(tokens.size());
    append(rows, sums, f.n_embd, f.n_embd), append(rows, n_active, 1, 1);
    return rows;
  }));
}

// The main device's side adds an answer; the CPU's publishes one.
TEST_P(NeighboursFfn, FfnSparseWithAHandOff) {
  Ffn f(GetParam());
  f.shift_gates(0.6f);
  Lists lists({0, Ffn::kN, 300, 1, 33, 256, 257, 900}, Ffn::kN);
  std::mt19937 rng(8);
  const std::vector<float> answers = random_normal(rng, static_cast<size_t>(kFewTokens * f.n_embd));
  check(f.problem("collected", [&](Device& device, const Input& in, const Tokens& tokens) {
    const int64_t size = std::ssize(tokens) * f.n_embd;
    std::vector<float> sums = gather(f.y, f.n_embd, tokens);
    const auto mailbox = device.hand_offs()->open_mailbox(size, 1);
    device.hand_offs()->post(*mailbox, in.act.x, size);
    mailbox->wait_input();
    const std::vector<float> answer = gather(answers, f.n_embd, tokens);
    std::copy(answer.begin(), answer.end(), mailbox->answer_buffer());
    mailbox->publish(0, size);
    mailbox->answer();
    SparseArgs args{.candidates = lists.of(tokens), .collect = mailbox.get()};
    device.sparse_ffn()->ffn_sparse(f.shard, args, in, std::ssize(tokens), f.bias(), sums.data(), nullptr);
    Rows rows(tokens.size());
    append(rows, sums, f.n_embd, f.n_embd);
    return rows;
  }));
  check(f.problem("published", [&](Device& device, const Input& in, const Tokens& tokens) {
    const int64_t size = std::ssize(tokens) * f.n_embd;
    HostMailbox mailbox(size, 1);
    mailbox.post(in.act.x, size);
    mailbox.wait_input();
    std::fill_n(mailbox.answer_buffer(), size, 0.0f);
    SparseArgs args{.candidates = lists.of(tokens)};
    args.answer = &mailbox;
    device.sparse_ffn()->ffn_sparse(f.shard, args, in, std::ssize(tokens), f.bias(), mailbox.answer_buffer(), nullptr);
    std::vector<float> sums(static_cast<size_t>(size));
    mailbox.collect_published(sums.data(), size);
    EXPECT_TRUE(same_bits(sums, {mailbox.answer_buffer(), mailbox.answer_buffer() + size}));
    Rows rows(tokens.size());
    append(rows, sums, f.n_embd, f.n_embd);
    return rows;
  }));
}

}  // namespace
}  // namespace hearth::test
