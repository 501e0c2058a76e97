#pragma once
// Many FFNs in a row on two devices at once, each step with another division, other inputs and other hand-offs, against
// the oracle: what shows when a flag is raised before its data, or a buffer is written again before it has been read.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <future>
#include <random>
#include <vector>

#include "core/device.h"
#include "core/hand_off.h"
#include "core/sparse_ffn.h"
#include "cpu/cpu.h"
#include "support/random.h"

namespace hearth::test {

constexpr int64_t kHybridEmbd = 48, kHybridNeurons = 70, kHybridCapacity = kFewTokens * kHybridEmbd;

// Who finds the CPU's neurons: a predictor on the main device, or the CPU by its gates.
enum class FoundBy { predictor, cpu };

struct HybridStep {
  FoundBy by;
  int64_t n_hot;
  int64_t T;             // one token in three of four steps, then up to kFewTokens
  std::vector<float> x;  // [T][kHybridEmbd]; all zero now and then, so that no neuron is active at all
  explicit HybridStep(int number) {
    std::mt19937 rng(static_cast<unsigned>(number));
    constexpr std::array<int64_t, 5> kHot = {0, 1, 23, kHybridNeurons - 1, kHybridNeurons};  // some lists are empty
    n_hot = kHot[static_cast<size_t>(random_int(rng, 0, kHot.size() - 1))];
    by = static_cast<FoundBy>(random_int(rng, 0, 1));
    T = random_int(rng, 0, 3) == 0 ? random_int(rng, 2, kFewTokens) : 1;
    const auto n = static_cast<size_t>(size());
    x = random_int(rng, 0, 49) == 0 ? std::vector<float>(n, 0.0f) : random_normal(rng, n);
  }
  int64_t size() const { return T * kHybridEmbd; }
};

// One layer, hot neurons first, on one device.
class HybridLayer {
 public:
  HybridLayer(Device& device, std::mt19937 rng)
      : norm_weight_(kHybridEmbd, 1.0f), threshold_(kHybridNeurons, 0.0f), identity_(kHybridEmbd * kHybridEmbd) {
    for (size_t i = 0; i < kHybridEmbd; ++i) identity_[i * kHybridEmbd + i] = 1.0f;
    const auto adopt = [&](std::vector<float>& values, int64_t rows) {
      if (values.empty()) values = random_normal(rng, static_cast<size_t>(rows * kHybridEmbd));
      return device.adopt(Matrix{DType::f32, rows, kHybridEmbd, values.data()});
    };
    shard_.gate = adopt(gate_, kHybridNeurons), shard_.up = adopt(up_, kHybridNeurons);
    shard_.down_t = adopt(down_, kHybridNeurons);
    shard_.act = Activation::relu;
    // The gate itself, behind a first product that changes nothing: it names the active neurons and no others.
    predictor_.fc1 = adopt(identity_, kHybridEmbd), predictor_.fc2 = shard_.gate;
    predictor_.threshold = device.adopt(Vector{threshold_.data(), kHybridNeurons});
    norm_ = {.weight = device.adopt(Vector{norm_weight_.data(), kHybridEmbd}), .n = kHybridEmbd};
  }
  FfnShard shard(int64_t first, int64_t n) const {
    FfnShard s = shard_;
    s.gate = s.gate.slice_rows(first, n), s.up = s.up.slice_rows(first, n), s.down_t = s.down_t.slice_rows(first, n);
    return s;
  }
  const Predictor& predictor() const { return predictor_; }
  const NormArgs& norm() const { return norm_; }

 private:
  std::vector<float> norm_weight_, threshold_, identity_, gate_, up_, down_;
  FfnShard shard_;
  Predictor predictor_;
  NormArgs norm_;
};

// The main device's side: issues all steps one after the other, without waiting for any; or, with wait_every > 0, waits
// after so many. Returns what x became in each.
inline std::vector<float> run_main_side(Device& main, const HybridLayer& layer, Mailbox& box, int first_step,
                                        int n_steps, int wait_every) {
  main.use_from_this_thread();
  std::vector<float> host_x;
  for (int i = 0; i < n_steps; ++i) {
    const HybridStep step(first_step + i);
    host_x.insert(host_x.end(), step.x.begin(), step.x.end());
  }
  const size_t bytes = host_x.size() * sizeof(float);
  const DeviceBuffer all_x = main.allocate(bytes, Purpose::activations);
  const DeviceBuffer normed = main.allocate(kHybridCapacity * sizeof(float), Purpose::activations);
  const DeviceBuffer ids = main.allocate(kFewTokens * (kHybridNeurons + 1) * sizeof(int32_t), Purpose::activations);
  main.upload(all_x.as<float>(), host_x.data(), bytes);
  const NeuronLists listed{ids.as<int32_t>(), ids.as<int32_t>() + kFewTokens * kHybridNeurons, kHybridNeurons};
  const Act h{normed.as<float>(), nullptr};
  float* x = all_x.as<float>();
  for (int i = 0; i < n_steps; ++i) {
    const HybridStep step(first_step + i);
    const FfnShard hot = layer.shard(0, step.n_hot);
    SparseArgs sparse{.collect = &box};
    Input in(layer.norm(), x, h);  // done by the first that reads it
    if (step.by == FoundBy::predictor) {
      main.sparse_ffn()->predict(
          layer.predictor(), in, step.T,
          {.n_own = step.n_hot, .own = listed, .linked = {}, .hand_off = {&box, h.x, kHybridEmbd}});
      in = h, sparse.candidates = listed;
    } else {
      main.hand_offs()->post(box, x, step.size());
    }
    if (hot.n() > 0) {
      main.sparse_ffn()->ffn_sparse(hot, sparse, in, step.T, {}, x, nullptr);
    } else {
      main.hand_offs()->collect(box, x, step.size());
    }
    x += step.size();
    if (wait_every > 0 && i % wait_every == wait_every - 1) main.synchronize();
  }
  main.download(host_x.data(), all_x.as<float>(), bytes);
  return host_x;
}

// The CPU's side.
inline void run_cpu_side(Device& host, const HybridLayer& layer, Mailbox& box, int first_step, int n_steps) {
  std::vector<float> h(kHybridCapacity);
  const Act act{h.data(), nullptr};
  for (int i = 0; i < n_steps; ++i) {
    const HybridStep step(first_step + i);
    const float* brought = box.wait_input();
    std::fill_n(box.answer_buffer(), step.size(), 0.0f);
    SparseArgs sparse{.answer = &box};
    Input in(layer.norm(), brought, act);
    if (step.by == FoundBy::predictor) {
      std::copy_n(brought, step.size(), h.begin());
      in = act, sparse.candidates = box.wait_neurons(step.T);
    }
    const FfnShard cold = layer.shard(step.n_hot, kHybridNeurons - step.n_hot);
    if (cold.n() > 0) {
      host.sparse_ffn()->ffn_sparse(cold, sparse, in, step.T, {}, box.answer_buffer(), nullptr);
    } else {
      box.publish(0, step.size());
    }
    box.answer();
  }
}

// Steps [first_step, first_step + n_steps) on `main` and the SIMD CPU device, each in a thread of its own; every result
// against the oracle's.
inline void expect_hybrid_steps(Device& main, int first_step, int n_steps, int wait_every = 0) {
  std::mt19937 rng(5);
  ThreadTeam team(3);
  const auto host = cpu::make_device(team), oracle = cpu::make_reference_device();
  Limits limits;
  limits.max_tokens = kFewTokens;
  limits.max_cols = limits.max_rows = limits.n_ff = kHybridNeurons;
  limits.n_vocab = 8, limits.n_embd = kHybridEmbd, limits.head_dim = 8;
  main.reserve(limits), host->reserve(limits), oracle->reserve(limits);
  const HybridLayer main_layer(main, rng), host_layer(*host, rng), oracle_layer(*oracle, rng);
  const auto box = main.hand_offs()->open_mailbox(kHybridCapacity, kHybridNeurons);

  auto main_side = std::async(std::launch::async,
                              [&] { return run_main_side(main, main_layer, *box, first_step, n_steps, wait_every); });
  run_cpu_side(*host, host_layer, *box, first_step, n_steps);
  const std::vector<float> got = main_side.get();

  // 70 float additions of terms of up to about 8 x 48 (two products of 48 normals, and a normal), and a factor 4 for
  // the errors of the products and of the norm. A neuron left out is worth some tens, a stale input more.
  constexpr double kBound = 4 * kHybridNeurons * kHybridEmbd * 0x1p-24 * 8;
  double worst = 0;
  const float* x = got.data();
  for (int i = 0; i < n_steps; ++i) {
    HybridStep step(first_step + i);
    std::vector<float> h(step.x.size());
    const Input in(oracle_layer.norm(), step.x.data(), {h.data(), nullptr});
    oracle->sparse_ffn()->ffn_sparse(oracle_layer.shard(0, kHybridNeurons), {}, in, step.T, {}, step.x.data(), nullptr);
    for (const float expected : step.x) {
      const double error = std::abs(static_cast<double>(*x) - expected);
      ASSERT_LE(error, kBound) << "step " << i << " of " << step.T << " tokens, element " << x - got.data();
      worst = std::max(worst, error);
      ++x;
    }
  }
  std::printf("    %d steps, worst error %.2g of %.2g\n", n_steps, worst, kBound);
}

}  // namespace hearth::test
