// Rows that are fetched before their neurons are listed, on the SIMD device.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <random>

#include "core/hand_off.h"
#include "cpu/cpu.h"
#include "cpu/device_case.h"
#include "cpu/device_case_error.h"

namespace hearth::test {
namespace {

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
      const int32_t n = 700, n_embd = 320;
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
        std::vector<int32_t> listed = random_subset(rng, n, n_listed);
        listed.reserve(1);  // an empty list is one, too
        auto n_predicted = static_cast<int32_t>(listed.size());
        // `too_late`: the hand-off is there before fetch() has brought any row, its list after fetch_input() has gone
        // on.
        const auto sum_of = [&](const std::vector<int32_t>* hinted, bool too_late) {
          HostMailbox box(1, n);
          const float x = 0;
          if (too_late) box.post_input(&x, 1, MailboxMarks::of(n, 0, 0));
          if (hinted != nullptr) device->row_prefetch()->fetch(s, *hinted, box);
          if (too_late) box.wait_input();
          if (hinted != nullptr) device->row_prefetch()->fetch_input(s, in, box);
          std::vector<float> y(static_cast<size_t>(n_embd), 0.5f);
          SparseArgs sparse;
          sparse.candidates = NeuronLists{listed.data(), &n_predicted, n};
          device->sparse_ffn()->ffn_sparse(s, sparse, in, 1, {}, y.data(), nullptr);
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

// Experts that are fetched early, the chosen ones or others, and whether the hand-off is there already or not.
TEST(Device, FetchedExpertsGiveTheSameBits) {
  for (const int n_threads : {1, 3}) {
    ThreadTeam team(n_threads);
    const auto device = cpu::make_device(team);
    for (const DType type : {DType::f16, DType::q8_0, DType::q4_0}) {
      const int64_t n = 96, n_embd = 160, n_experts = 5;
      std::vector<Weights> weights;
      std::vector<Expert> experts(n_experts);
      for (unsigned e = 0; e < n_experts; ++e) {
        weights.push_back(random_weights(3 * e + 1, type, n, n_embd));
        weights.push_back(random_weights(3 * e + 2, type, n, n_embd));
        weights.push_back(random_weights(3 * e + 3, type, n_embd, n));
      }
      for (size_t e = 0; e < experts.size(); ++e) {
        if (e == 2) continue;  // it is not here
        FfnShard& s = experts[e].ffn;
        s.act = Activation::silu;
        s.gate = device->adopt(weights[3 * e].matrix()), s.up = device->adopt(weights[3 * e + 1].matrix());
        s.down = device->adopt(weights[3 * e + 2].matrix());
      }
      Limits limits = limits_for(1, n, n_embd);
      limits.n_ff = limits.n_ff_expert = n, limits.n_experts = n_experts, limits.n_named = 3;
      limits.quantized_weights = true;
      device->reserve(limits);
      Bound b(*device);
      const Act in = b.activations(random_activations(4, static_cast<size_t>(n_embd)), 1, n_embd);
      std::vector<int32_t> chosen = {0, 2, 4}, others = {1, 2, 3}, absent = {2};
      std::vector<float> of_each = {0.5f, 0.25f, 0.25f};
      const ExpertSet set{experts};
      const auto sum_of = [&](std::vector<int32_t>* foreseen, bool too_late) {
        HostMailbox box(1, n);
        const float x = 0;
        if (too_late) box.post_input(&x, 1, {});
        if (foreseen != nullptr) {
          device->row_prefetch()->fetch_experts(
              set, {foreseen->data(), of_each.data(), static_cast<int64_t>(foreseen->size())}, box);
        }
        std::vector<float> y(static_cast<size_t>(n_embd), 0.5f);
        device->expert_ffn()->ffn_experts(set, {chosen.data(), of_each.data(), 3}, in, 1, y.data());
        return y;
      };
      const std::vector<float> expected = sum_of(nullptr, false);
      for (std::vector<int32_t>* foreseen : {&chosen, &others, &absent}) {
        ASSERT_EQ(sum_of(foreseen, false), expected) << n_threads << " threads";
        ASSERT_EQ(sum_of(foreseen, true), expected) << n_threads << " threads";
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
  auto count = static_cast<int32_t>(n);
  const auto sum_of = [&](bool fetched) {
    const HostMailbox nothing_comes(1, 1);
    if (fetched) device->row_prefetch()->fetch(s, all, nothing_comes);
    std::vector<float> y(static_cast<size_t>(n_embd), 0.5f);
    SparseArgs sparse;
    sparse.candidates = NeuronLists{all.data(), &count, n};
    device->sparse_ffn()->ffn_sparse(s, sparse, in, 1, {}, y.data(), nullptr);
    return y;
  };
  EXPECT_EQ(sum_of(true), sum_of(false));
}

}  // namespace
}  // namespace hearth::test
