// Many FFNs in a row on two devices at once, each step with other neurons, hand-offs and inputs: what a thread
// sanitizer looks at for races, and what shows when a flag is raised before its data. Built for it: cmake --preset
// tsan.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <thread>
#include <vector>

#include "core/mailbox.h"
#include "cpu/cpu.h"
#include "support/random.h"

namespace hearth {
namespace {

constexpr int64_t kEmbd = 48, kNeurons = 70;
constexpr int kSteps = 10'000;
constexpr std::array<int64_t, 4> kHot = {0, 1, 23, 70};  // hot neurons, by step

Matrix rows(const std::vector<float>& data, int64_t first, int64_t n) {
  return {DType::f32, n, kEmbd, data.data() + first * kEmbd, nullptr};
}

struct Layer {
  std::vector<float> gate, up, down;
  std::vector<float> no_bias = std::vector<float>(kNeurons, 0.0f);
  explicit Layer(std::mt19937& rng)
      : gate(test::random_normal(rng, kNeurons * kEmbd)),
        up(test::random_normal(rng, kNeurons * kEmbd)),
        down(test::random_normal(rng, kNeurons * kEmbd)) {}
  FfnShard shard(int64_t first, int64_t n) const {
    FfnShard s;
    s.gate = rows(gate, first, n), s.up = rows(up, first, n), s.down_t = rows(down, first, n);
    s.act = Activation::relu;
    return s;
  }
  Predictor predictor() const {  // the gate itself: it names the active neurons and no others
    Predictor p;
    p.fc2 = rows(gate, 0, kNeurons);
    p.threshold = {no_bias.data(), kNeurons};
    return p;
  }
};

Limits limits() {
  Limits l;
  l.max_cols = l.max_rows = kNeurons;
  l.n_vocab = 8, l.n_ff = kNeurons, l.n_embd = kEmbd;
  l.head_dim = 8;
  return l;
}

// Step i's input; all zero now and then, so that no neuron is active at all.
std::vector<float> input(int step) {
  std::mt19937 rng(static_cast<unsigned>(step));
  return step % 97 == 0 ? std::vector<float>(kEmbd, 0.0f) : test::random_normal(rng, kEmbd);
}

TEST(HybridSteps, TenThousandInARow) {
  std::mt19937 rng(5);
  const Layer layer(rng);
  ThreadTeam team(3);
  const auto main = cpu::make_reference_device();
  const auto host = cpu::make_device(team);
  main->reserve(limits()), host->reserve(limits());
  const auto box = main->open_mailbox(kEmbd, kNeurons);

  std::vector<std::vector<float>> got(kSteps);
  std::thread device([&] {
    std::vector<int32_t> ids(kNeurons);
    int32_t count = 0;
    for (int i = 0; i < kSteps; ++i) {
      const int64_t n_hot = kHot[static_cast<size_t>(i) % kHot.size()];
      std::vector<float> x = input(i), y(kEmbd, 1.0f);
      main->predict(
          layer.predictor(), {x.data(), nullptr},
          {.n_first = n_hot, .first = {ids.data(), &count}, .rest = {}, .hand_off = {box.get(), x.data(), kEmbd}});
      if (n_hot > 0) {
        const SparseArgs sparse{.predicted = ids.data(), .n_predicted = &count, .collect = box.get()};
        main->ffn_sparse(layer.shard(0, n_hot), sparse, {x.data(), nullptr}, {}, y.data());
      } else {
        main->collect(*box, y.data(), kEmbd);
      }
      got[static_cast<size_t>(i)] = std::move(y);
    }
  });
  std::vector<float> x(kEmbd);
  for (int i = 0; i < kSteps; ++i) {
    const int64_t n_hot = kHot[static_cast<size_t>(i) % kHot.size()];
    const MailboxRequest request = box->wait_request();
    std::copy_n(request.x, kEmbd, x.begin());
    std::fill_n(box->answer_buffer(), kEmbd, 0.0f);
    if (n_hot < kNeurons) {
      const SparseArgs sparse{.predicted = request.ids, .n_predicted = request.n_ids};
      host->ffn_sparse(layer.shard(n_hot, kNeurons - n_hot), sparse, {x.data(), nullptr}, {}, box->answer_buffer());
    }
    box->answer();
  }
  device.join();

  const auto oracle = cpu::make_reference_device();
  for (int i = 0; i < kSteps; ++i) {
    std::vector<float> h = input(i), y(kEmbd, 1.0f);
    oracle->ffn_sparse(layer.shard(0, kNeurons), {}, {h.data(), nullptr}, {}, y.data());
    for (size_t c = 0; c < kEmbd; ++c) {
      // 70 float additions of terms of up to about 8 x 48 (two products of 48 normals, and a normal), and a factor 4
      // for the errors of the products themselves.
      ASSERT_NEAR(got[static_cast<size_t>(i)][c], y[c], 4 * 70 * 48 * 0x1p-24 * 8) << "step " << i << " column " << c;
    }
  }
}

}  // namespace
}  // namespace hearth
