#pragma once
// How far a correct run of a model may end from exact arithmetic, measured by the oracle under random roundings
// (noisy_device.h), for one sequence of calls.
//
// A run under test differs from exact arithmetic by one draw of its roundings; kDraws seeded draws of roundings of the
// same sizes show how far such draws go. Three statistics are compared with the largest among the draws:
//   worst   the largest error of any logit, at each step: 3 times the largest draw. Were the error a single normal
//           variable (the hardest case: a maximum over hundreds of logits is steadier), one more draw would be beyond
//           with a probability of 3.2e-5, by the distribution of the largest of 16.
//   rms     of the errors over all logits and steps: twice the largest draw. The errors of tens of steps average out
//           (draws differ by a tenth to a third), and a small systematic defect shows here first.
//   median  over short sequences, of their worst error under the same roundings done exactly as the device does them
//           and float noise alone: 3 times the largest draw. Where a value crosses a rounding boundary, a sequence's
//           error is as large as the rounding; as long as most sequences have no such value the median is float noise.
// A family whose activation jumps (FATReLU) has rare, large errors that 16 draws may or may not contain: there the
// limits of the steps hold for three quarters of them, and the rms is replaced by the median over the steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "support/noisy_device.h"
#include "support/random.h"
#include "support/zoo.h"

namespace hearth::test {

constexpr int kDraws = 16;
constexpr double kWorstFactor = 3, kRmsFactor = 2;

// Tokens and how they are given to eval(): the sequence of a test.
struct Script {
  std::vector<int32_t> ids;
  std::vector<int64_t> calls;  // tokens of each call; their sum is ids.size()
};
using Logits = std::vector<std::vector<float>>;  // of the last token of each call

// A prompt, then token by token.
inline Script prompt_then_decode(std::vector<int32_t> ids, size_t prompt) {
  Script s{std::move(ids), {static_cast<int64_t>(prompt)}};
  s.calls.insert(s.calls.end(), s.ids.size() - prompt, 1);
  return s;
}
inline std::vector<float> copy_of(std::span<const float> values) {
  return {values.begin(), values.end()};
}
inline std::vector<int32_t> random_ids(const model::Config& c, size_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<int32_t> ids(n);
  for (int32_t& id : ids) id = static_cast<int32_t>(random_int(rng, 0, c.n_vocab - 1));
  return ids;
}

// In a sequence of its own.
inline Logits run(engine::Engine& e, const Script& script) {
  engine::Sequence text = e.sequence();
  Logits all;
  size_t at = 0;
  for (const int64_t n : script.calls) {
    const auto logits = e.eval(text, std::span(script.ids).subspan(at, static_cast<size_t>(n)));
    all.emplace_back(logits.begin(), logits.end());
    at += static_cast<size_t>(n);
  }
  return all;
}

inline double rms(const Logits& all) {
  double sum = 0;
  for (const auto& x : all) sum += rms(x) * rms(x);
  return std::sqrt(sum / static_cast<double>(all.size()));
}
inline double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

// Of one run from another, relative to the rms of the other's logits.
struct Deviation {
  std::vector<double> worst;  // of each step
  double rms = 0;             // over all steps
};
inline Deviation deviation(const Logits& got, const Logits& expected) {
  EXPECT_EQ(got.size(), expected.size());
  const double scale = rms(expected);
  Deviation d;
  Logits difference = got;
  for (size_t s = 0; s < got.size(); ++s) {
    d.worst.push_back(worst_difference(got[s], expected[s]) / scale);
    for (size_t i = 0; i < got[s].size(); ++i) difference[s][i] -= expected[s][i];
  }
  d.rms = rms(difference) / scale;
  return d;
}

// A model on the oracle with some device's roundings.
class NoisyModel {
 public:
  NoisyModel(const std::filesystem::path& path, const Arithmetic& arithmetic, const engine::EngineOptions& options)
      : model_(model::Model::load(path)), device_(arithmetic, {}), engine_(model_, device_, options) {}
  Logits run(const Script& script, const Noise& noise, uint32_t seed) {
    device_.set_noise(noise, seed);
    return test::run(engine_, script);
  }
  const model::Config& config() const { return model_.config(); }

 private:
  model::Model model_;
  NoisyDevice device_;
  engine::Engine engine_;
};

// What float rounding does to the input of a product, at most: sums of up to 2^10 terms.
constexpr double kFloatNoise = 0x1p-21;
// The same 32 times larger, so that every draw, and not one in thirty, has keys and values that its noise moves to the
// next number of f16: with weights that need no other rounding that is what correct runs differ by.
constexpr double kFlippingNoise = 0x1p-16;

class ErrorLimits {
 public:
  // For runs of `script` on a device with this arithmetic. `kv_noise` as in Noise: for comparisons with results that
  // had an unrounded KV cache.
  ErrorLimits(const std::filesystem::path& path, const Script& script, const Arithmetic& arithmetic,
              const engine::EngineOptions& options, double kv_noise = 0) {
    NoisyModel model(path, arithmetic, options);
    jumps_ = model.config().ffn.act == Activation::fat_relu;
    expected_ = model.run(script, {}, 0);
    worst_.assign(script.calls.size(), 0.0);
    for (uint32_t k = 0; k < kDraws; ++k) {
      const Deviation d =
          deviation(model.run(script, {Rounding::random, kFlippingNoise, kv_noise}, 1000 + k), expected_);
      for (size_t s = 0; s < worst_.size(); ++s) worst_[s] = std::max(worst_[s], kWorstFactor * d.worst[s]);
      rms_ = std::max(rms_, kRmsFactor * d.rms);
    }
  }

  const Logits& expected() const { return expected_; }
  double worst(size_t step) const { return worst_[step] * test::rms(expected_); }  // in logits

  // A run's largest shares of the limits.
  struct Shares {
    double worst = 0, rms = 0;
    bool within() const { return worst <= 1 && rms <= 1; }
  };
  Shares shares(const Logits& got) const { return shares_of(deviation(got, expected_)); }

  // Limits that a wrong model could meet would be no limits: the logits of unrelated inputs are sqrt(2) rms apart, the
  // largest of them 3 rms and more. Where an activation jumps, single steps do go that far; TightLimit is the check
  // there.
  void expect_not_vacuous() const {
    if (jumps_) return;
    EXPECT_LT(rms_, 0.15) << "the bound of the rms is vacuous";
    EXPECT_LT(median(worst_), 1.0) << "the bound of a step is vacuous";
  }
  void expect_within(const Logits& got, std::string_view what) {
    const Shares s = shares(got);
    EXPECT_LE(s.worst, 1) << what << ": a step's worst logit, as a share of its limit";
    EXPECT_LE(s.rms, 1) << what << ": the rms over all steps, as a share of its limit";
    largest_.worst = std::max(largest_.worst, s.worst);
    largest_.rms = std::max(largest_.rms, s.rms);
  }
  // Two runs of the same arithmetic, which share most of their roundings: no further apart than one run may be from
  // exact arithmetic.
  void expect_apart(const Logits& got, const Logits& other, std::string_view what) {
    const Shares s = shares_of(deviation(got, other));
    EXPECT_LE(s.worst, 1) << what << ": a step's worst difference, as a share of its limit";
    EXPECT_LE(s.rms, 1) << what << ": the rms of the differences over all steps, as a share of its limit";
  }
  // The worst of all runs so far.
  void print() const {
    std::printf("    limit of the rms %.2g of the logits' rms; largest shares of the limits: step %.2f, rms %.2f\n",
                rms_, largest_.worst, largest_.rms);
  }

 private:
  Shares shares_of(const Deviation& d) const {
    std::vector<double> steps;
    for (size_t s = 0; s < worst_.size(); ++s) steps.push_back(d.worst[s] / worst_[s]);
    if (!jumps_) return {*std::max_element(steps.begin(), steps.end()), d.rms / rms_};
    std::sort(steps.begin(), steps.end());
    return {steps[(steps.size() - 1) * 3 / 4], median(steps)};
  }

  bool jumps_ = false;
  Logits expected_;
  std::vector<double> worst_;  // of each step
  double rms_ = 0;             // over all steps
  Shares largest_;
};

// Short sequences against the oracle with the device's very roundings: the median error, as a share of its limit.
class TightLimit {
 public:
  // `calls` of each sequence.
  TightLimit(const std::filesystem::path& path, const Arithmetic& arithmetic, const engine::EngineOptions& options,
             const std::vector<int64_t>& calls, double float_noise = kFloatNoise, size_t n_sequences = 15) {
    NoisyModel model(path, arithmetic, options);
    size_t n = 0;
    for (const int64_t c : calls) n += static_cast<size_t>(c);
    for (uint32_t s = 0; s < n_sequences; ++s) {
      scripts_.push_back({random_ids(model.config(), n, 50 + s), calls});
      expected_.push_back(model.run(scripts_.back(), {Rounding::nearest}, 0));
    }
    for (uint32_t k = 0; k < 4; ++k) {
      const auto draw = [&](const Script& s) { return model.run(s, {Rounding::nearest, float_noise}, 2000 + k); };
      limit_ = std::max(limit_, kWorstFactor * median_error(draw));
    }
  }
  // The share of the limit that a run takes.
  double share(const std::function<Logits(const Script&)>& run_script) const {
    return median_error(run_script) / limit_;
  }
  double limit() const { return limit_; }

 private:
  double median_error(const std::function<Logits(const Script&)>& run_script) const {
    std::vector<double> errors;
    for (size_t s = 0; s < scripts_.size(); ++s) {
      const Deviation d = deviation(run_script(scripts_[s]), expected_[s]);
      errors.push_back(*std::max_element(d.worst.begin(), d.worst.end()));
    }
    return median(errors);
  }
  std::vector<Script> scripts_;
  std::vector<Logits> expected_;
  double limit_ = 0;
};

}  // namespace hearth::test
