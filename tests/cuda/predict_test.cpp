// The GPU device's predictors against the reference: the same neurons, in the same lists.
#include <fmt/format.h>

#include "twin_predictor.h"

namespace hearth::test {
namespace {

class GpuPredictTest : public GpuFfnTest {
 protected:
  // Both devices must list `first` and `rest`, those of the rest below n_linked apart, and leave the rest of the lists'
  // memory alone.
  static void expect_lists(const std::function<Predictor(int)>& predictor, const Input& in, int64_t n, int64_t n_first,
                           int64_t n_linked, const std::vector<int32_t>& first, std::vector<int32_t> rest) {
    const auto linked_end = std::lower_bound(rest.begin(), rest.end(), static_cast<int32_t>(n_linked));
    const std::vector<int32_t> linked(rest.begin(), linked_end);
    rest.erase(rest.begin(), linked_end);
    const auto room = [&](int64_t size) {
      return Twin<int32_t>(*ref_, *gpu_, std::vector<int32_t>(static_cast<size_t>(size), -7));
    };
    Twin<int32_t> first_ids = room(n_first), rest_ids = room(n - n_first), linked_ids = room(n_linked),
                  counts = room(3);
    run_twins<int32_t>(*ref_, *gpu_, {&first_ids, &rest_ids, &linked_ids, &counts}, [&](int s, Device& d) {
      d.predict(predictor(s), in.on(s),
                {.n_first = n_first,
                 .first = {first_ids.on(s), counts.on(s)},
                 .rest = {rest_ids.on(s), counts.on(s) + 1},
                 .hand_off = {},
                 .n_linked = n_linked,
                 .linked = {linked_ids.on(s), counts.on(s) + 2}});
    });
    const auto padded = [](std::vector<int32_t> v, int64_t size) {
      v.resize(static_cast<size_t>(size), -7);
      return v;
    };
    for (const int s : {kRef, kGpu}) {
      SCOPED_TRACE(s == kRef ? "reference" : "GPU");
      const std::vector<int32_t> count = counts.read(s);
      EXPECT_EQ(count[0], n_first > 0 ? static_cast<int32_t>(first.size()) : -7);
      EXPECT_EQ(count[1], n_first + n_linked < n ? static_cast<int32_t>(rest.size()) : -7);
      EXPECT_EQ(count[2], n_linked > 0 ? static_cast<int32_t>(linked.size()) : -7);
      EXPECT_EQ(linked_ids.read(s), padded(linked, n_linked));
      EXPECT_EQ(first_ids.read(s), padded(first, n_first));
      EXPECT_EQ(rest_ids.read(s), padded(rest, n - n_first));
    }
  }
  static void expect_predicted(std::mt19937& rng, const PredictorShape& shape, double density) {
    const Input in = make_input(rng, 1, shape.n_embd);
    const TwinPredictor p(*ref_, *gpu_, rng, shape, in.on(kRef), density);
    for (const int64_t n_first : {int64_t{0}, shape.n / 3, shape.n}) {
      for (const int64_t n_linked : {int64_t{0}, (shape.n - n_first + 1) / 2, shape.n - n_first}) {
        SCOPED_TRACE(fmt::format("n {} n_embd {} rank {} fc1 {} fc2 {} n_first {} n_linked {} density {}", shape.n,
                                 shape.n_embd, shape.rank, traits(shape.fc1).name, traits(shape.fc2).name, n_first,
                                 n_linked, density));
        expect_lists([&](int s) { return p.on(s); }, in, shape.n, n_first, n_linked, p.named(0, n_first),
                     p.named(n_first, shape.n));
      }
    }
  }
};

TEST_F(GpuPredictTest, EveryTypeAndShape) {
  std::mt19937 rng(20);
  for (const DType fc1 : kAllTypes) {
    for (const DType fc2 : kAllTypes) {
      expect_predicted(rng, {1003, 288, 96, fc1, fc2, true, true}, 0.1);
      expect_predicted(rng, {33, 96, 1056, fc1, fc2, false, false}, 0.3);
    }
  }
}

// Both products in one kernel up to 8 rows of fc1 a multiprocessor, in two beyond.
TEST_F(GpuPredictTest, LargePredictors) {
  std::mt19937 rng(26);
  for (const DType type : kAllTypes) {
    expect_predicted(rng, {9001, 1120, 1024, type, type, true, true}, 0.1);
    expect_predicted(rng, {70, 96, 1344, type, type}, 0.2);
  }
  expect_predicted(rng, {8000, 4096, 1024, DType::f16, DType::f16}, 0.1);
}

TEST_F(GpuPredictTest, ReluAndBias) {
  std::mt19937 rng(21);
  for (const bool relu : {false, true}) {
    for (const bool biased : {false, true}) {
      expect_predicted(rng, {500, 160, 64, DType::f16, DType::q8_0, relu, biased}, 0.2);
    }
  }
}

TEST_F(GpuPredictTest, NoneAllAndOneNeuron) {
  std::mt19937 rng(22);
  for (const double density : {0.0, 0.02, 1.0}) {
    expect_predicted(rng, {9001, 64, 32}, density);
    expect_predicted(rng, {1, 64, 32}, density);
  }
}

TEST_F(GpuPredictTest, CopyOfTheGate) {
  std::mt19937 rng(23);
  for (const DType type : kAllTypes) {
    expect_predicted(rng, {777, 288, 0, type, type}, 0.1);
    expect_predicted(rng, {777, 4128, 0, type, type}, 0.1);
  }
}

// Rows that 16-byte loads cannot be aligned to, or too long for a block's registers.
TEST_F(GpuPredictTest, ShapesWithoutTheirOwnKernel) {
  std::mt19937 rng(24);
  expect_predicted(rng, {300, 96, 33}, 0.2);
  expect_predicted(rng, {300, 99, 40, DType::bf16, DType::f32, true, true}, 0.2);
  expect_predicted(rng, {70, 9000, 0, DType::f32, DType::f32}, 0.2);
}

TEST_F(GpuPredictTest, Signs) {
  std::mt19937 rng(25);
  for (const auto& [n, n_embd] : {std::pair<int64_t, int64_t>{1, 32}, {700, 288}, {1003, 4100}}) {
    const Input in = make_input(rng, 1, n_embd);
    const auto words = static_cast<size_t>((n_embd + 31) / 32);
    std::vector<uint32_t> bits(static_cast<size_t>(n) * words);
    for (uint32_t& b : bits) b = static_cast<uint32_t>(rng());
    if (n_embd % 32 != 0) {  // no bits beyond the row
      for (size_t k = 1; k <= static_cast<size_t>(n); ++k) bits[k * words - 1] &= (1u << (n_embd % 32)) - 1;
    }
    const Twin<uint32_t> signs(*ref_, *gpu_, bits);
    const std::vector<float> x = in.x.read(kRef);
    std::vector<float> limit;
    std::vector<std::vector<int32_t>> named(2);
    const int64_t n_first = n / 2;
    for (int64_t k = 0; k < n; ++k) {
      int score = 0;
      for (int64_t c = 0; c < n_embd; ++c) {
        const bool negative = (bits[static_cast<size_t>(k) * words + static_cast<size_t>(c / 32)] >> (c % 32) & 1) != 0;
        score += negative == (x[static_cast<size_t>(c)] < 0) ? 1 : -1;
      }
      const bool yes = rng() % 5 == 0;  // equal to the threshold is not above it
      limit.push_back(static_cast<float>(yes ? score - 1 : score));
      if (yes) named[k < n_first ? 0 : 1].push_back(static_cast<int32_t>(k < n_first ? k : k - n_first));
    }
    const Twin<float> threshold(*ref_, *gpu_, limit);
    SCOPED_TRACE(n);
    expect_lists(
        [&](int s) {
          Predictor p;
          p.signs = signs.on(s), p.n_signs = n_embd, p.threshold = {threshold.on(s), n};
          return p;
        },
        in, n, n_first, n / 5, named[0], named[1]);
  }
}

}  // namespace
}  // namespace hearth::test
