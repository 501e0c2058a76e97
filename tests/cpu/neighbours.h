#pragma once
// Shared by the tests of up to kFewTokens tokens: every operation gives a token the same bits alone and among others,
// on the oracle and on every instruction set of this machine; and a norm that an operation does itself is the norm done
// before it. These devices' memory is the host's.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/sparse_ffn.h"
#include "cpu/cpu.h"
#include "cpu/device_case.h"
#include "cpu/device_case_error.h"
#include "support/random.h"

namespace hearth::test {

using Tokens = std::vector<size_t>;
using Rows = std::vector<std::vector<float>>;

// Rows of n elements, one for each of kFewTokens tokens; `all` has them one behind the other.
template <typename T>
std::vector<T> gather(const std::vector<T>& all, int64_t n, const Tokens& tokens) {
  std::vector<T> some;
  for (const size_t t : tokens) {
    const auto begin = all.begin() + static_cast<int64_t>(t) * n;
    some.insert(some.end(), begin, begin + n);
  }
  return some;
}
// Appends row t of `all`, the first n of whose `stride` elements count, to rows[t].
template <typename T>
void append(Rows& rows, const std::vector<T>& all, int64_t n, int64_t stride) {
  for (size_t t = 0; t < rows.size(); ++t) {
    const auto begin = all.begin() + static_cast<int64_t>(t) * stride;
    std::transform(begin, begin + n, std::back_inserter(rows[t]), [](T v) { return static_cast<float>(v); });
  }
}
// Appends each token's list, and its length.
inline void append(Rows& rows, const NeuronLists& lists) {
  for (size_t t = 0; t < rows.size(); ++t) {
    const int32_t* ids = lists.ids + static_cast<int64_t>(t) * lists.stride;
    std::copy_n(ids, lists.count[t], std::back_inserter(rows[t]));
    rows[t].push_back(static_cast<float>(lists.count[t]));
  }
}

inline testing::AssertionResult same_bits(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size()) return testing::AssertionFailure() << got.size() << " elements, not " << want.size();
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(float)) != 0) {
      return testing::AssertionFailure() << fmt::format("element {} is {:.9g}, not {:.9g}", i, got[i], want[i]);
    }
  }
  return testing::AssertionSuccess();
}

// The oracle, and SIMD devices with teams of two sizes.
inline std::vector<std::unique_ptr<Device>> devices(const Limits& limits) {
  static ThreadTeam one(1), three(3);
  std::vector<std::unique_ptr<Device>> all;
  all.push_back(cpu::make_reference_device());
  for (const cpu::Isa isa : cpu::available_isas()) {
    for (ThreadTeam* team : {&one, &three}) all.push_back(cpu::make_device(*team, isa));
  }
  for (const auto& device : all) device->reserve(limits);
  return all;
}

// Calls run(tokens), for some of kFewTokens tokens in any order, for each alone and for 2 to 8 of them.
template <typename Run>
void expect_no_neighbours(const std::string& what, Run&& run) {
  Rows alone;
  for (size_t t = 0; t < kFewTokens; ++t) alone.push_back(run(Tokens{t})[0]);
  std::mt19937 rng(9);
  Tokens all(kFewTokens);
  std::iota(all.begin(), all.end(), 0);
  for (size_t T = 2; T <= all.size(); ++T) {
    const Tokens tokens(all.begin(), all.begin() + static_cast<int64_t>(T));
    const Rows together = run(tokens);
    for (size_t i = 0; i < T; ++i) {
      ASSERT_TRUE(same_bits(together[i], alone[tokens[i]])) << what << ": token " << tokens[i] << " among " << T;
    }
    std::shuffle(all.begin(), all.end(), rng);
  }
}

// An operation that reads rows of n activations.
struct Problem {
  std::string name;
  int64_t n = 0;
  Limits limits;
  // Runs it for these tokens, whose inputs `in` has; each token's results.
  std::function<Rows(Device&, const Input& in, const Tokens& tokens)> run;
};

// Inputs of different sizes. Where a gate has a bias of 0.6 sqrt(n), 55 to 100 % of the neurons fire, or 0 to 45 %.
inline std::vector<float> inputs(int64_t n) {
  constexpr float kScales[kFewTokens] = {1, 5, 1, 2, 0.5f, 0.05f, 0.05f, 3};
  std::mt19937 rng(3);
  std::vector<float> x = random_normal(rng, static_cast<size_t>(kFewTokens * n));
  for (size_t i = 0; i < x.size(); ++i) x[i] *= kScales[static_cast<int64_t>(i) / n];
  return x;
}

// Some tokens' activations in both forms.
struct Activations {
  Activations(Device& device, std::vector<float> rows, int64_t n)
      : x(std::move(rows)), q8(x.size() / static_cast<size_t>(n) * device.q8_bytes(n)) {}
  Act act() { return {x.data(), q8.data()}; }
  std::vector<float> x;
  std::vector<std::byte> q8;
};

inline void check(const Problem& p) {
  SCOPED_TRACE(p.name);
  const std::vector<float> x = inputs(p.n);
  std::mt19937 rng(4);
  const std::vector<float> weight = random_normal(rng, static_cast<size_t>(p.n), 0.1f, 1.0f);
  const NormArgs norm{.weight = {weight.data(), p.n}, .n = p.n};
  for (const auto& device : devices(p.limits)) {
    expect_no_neighbours(device->name(), [&](const Tokens& tokens) {
      Activations in(*device, gather(x, p.n, tokens), p.n);
      device->quantize(in.act(), std::ssize(tokens), p.n);
      return p.run(*device, in.act(), tokens);
    });
    for (const Tokens& tokens : {Tokens{3}, Tokens{2, 0, 7}}) {
      const std::vector<float> some = gather(x, p.n, tokens);
      Activations before(*device, some, p.n), on_the_way(*device, std::vector<float>(some.size(), std::nanf("")), p.n);
      device->norm(norm, some.data(), std::ssize(tokens), before.act());
      const Rows want = p.run(*device, before.act(), tokens);
      const Rows got = p.run(*device, Input(norm, some.data(), on_the_way.act()), tokens);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_TRUE(same_bits(got[i], want[i])) << device->name() << ": a norm on the way";
      }
      EXPECT_TRUE(same_bits(on_the_way.x, before.x)) << device->name() << ": the norm is there for others";
      EXPECT_EQ(on_the_way.q8, before.q8) << device->name();
    }
  }
}

inline Limits limits_of(DType type, int64_t n, int64_t n_embd) {
  Limits l = limits_for(kFewTokens, std::max(n, n_embd), std::max(n, n_embd));
  l.n_embd = n_embd, l.n_ff = n, l.quantized_weights = is_quantized(type);
  return l;
}

inline constexpr DType kEveryType[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0};

}  // namespace hearth::test
