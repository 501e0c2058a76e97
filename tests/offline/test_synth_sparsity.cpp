// Runs synthetic models and compares their activations with what was asked for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/error.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "model/model.h"
#include "offline/recording_device.h"
#include "offline/synth.h"
#include "offline/synth_sparsity.h"
#include "support/paths.h"

namespace hearth::offline {
namespace {

using test::RecordingDevice;
using test::TempDir;

SynthOptions tiny_options() {
  SynthOptions o;
  o.shape = find_synth_shape("tiny");
  o.type = o.predictor_type = DType::f32;
  return o;
}

// What the neurons of a model did over a text, token by token.
struct Activity {
  int64_t n_layer = 0, n_ff = 0, n_tokens = 0;
  std::vector<RecordingDevice::Step> steps;  // [token][layer]

  const RecordingDevice::Step& at(int64_t token, int64_t layer) const {
    return steps[static_cast<size_t>(token * n_layer + layer)];
  }
  double density(int64_t layer) const {
    double sum = 0;
    for (int64_t t = 0; t < n_tokens; ++t) sum += static_cast<double>(at(t, layer).active.size());
    return sum / static_cast<double>(n_tokens * n_ff);
  }
  // Over all layers and tokens: the share of activations whose neuron has a rank among the hottest 26 %.
  double hot_share(uint64_t seed) const {
    double hot = 0, all = 0;
    for (int64_t l = 0; l < n_layer; ++l) {
      const std::vector<int32_t> ranks = neuron_ranks(seed, l, n_ff);
      for (int64_t t = 0; t < n_tokens; ++t) {
        for (const int32_t i : at(t, l).active)
          hot += ranks[static_cast<size_t>(i)] < static_cast<int>(kHotFraction * n_ff);
        all += static_cast<double>(at(t, l).active.size());
      }
    }
    return hot / all;
  }
};

Activity run(const std::filesystem::path& path, const std::vector<int32_t>& ids) {
  model::Model model = model::Model::load(path);
  ThreadTeam team(1);
  const auto cpu = cpu::make_device(team);
  RecordingDevice device(*cpu);
  engine::EngineOptions options;
  options.sparsity = engine::Sparsity::exact;
  engine::Engine engine(model, device, options);
  engine::Sequence text = engine.sequence();
  for (const int32_t id : ids) engine.eval_greedy(text, id);
  const model::Config& c = model.config();
  return {c.n_layer, c.n_ff, static_cast<int64_t>(ids.size()), std::move(device.steps())};
}

Activity run(const SynthOptions& options, const std::vector<int32_t>& ids) {
  const TempDir dir;
  ThreadTeam team(2);
  write_synthetic(dir / "m.gguf", options, team);
  return run(dir / "m.gguf", ids);
}

// The measured density of a layer over T tokens scatters by sqrt(v / T), where v is the variance of one token's
// density. Pre-activations of two neurons are correlated by rho = v_i . v_j, so v = E[cov] with cov about (phi(b) b
// rho)^2 / 2 by the second Hermite term (the first averages out over signs), E[rho^2] = 1 / rank; phi(b) b < 0.25 for
// all b. Four deviations, and one per cent for what calibrate() leaves out: attention over a short text, and
// correlations of layers.
double tolerance(double density, int64_t rank, int64_t tokens) {
  const double variance = 0.25 * 0.25 / 2 / static_cast<double>(rank) + density / 1024;
  return 4 * std::sqrt(variance / static_cast<double>(tokens)) + 0.01 * density;
}

TEST(SynthLaw, HasTheMeanAndTheShareAskedFor) {
  for (const double density : {0.03, 0.11, 0.2}) {
    for (const double share : {0.6, 0.8, 0.9}) {
      const std::vector<double> p = activation_law(11008, density, share);
      EXPECT_NEAR(mean_of(p), density, 1e-9);
      EXPECT_NEAR(hot_share_of(p), share, 1e-3);
      EXPECT_TRUE(std::is_sorted(p.rbegin(), p.rend()));
      EXPECT_LE(p.front(), 0.98);
      EXPECT_GT(p.back(), 0.0);
    }
  }
}

TEST(SynthLaw, RefusesWhatCannotBe) {
  // 26 % of the neurons at 0.98 are half of the activations at a density of 0.5, never 90 %.
  EXPECT_THROW(activation_law(1024, 0.5, 0.9), Error);
  EXPECT_THROW(activation_law(1024, 0.11, 0.2), Error);  // less than the share of an even law
  EXPECT_THROW(activation_law(1024, 0.0, 0.9), Error);
  EXPECT_THROW(activation_law(1024, 0.99, 0.3), Error);
  EXPECT_THROW(activation_law(1024, NAN, 0.9), Error);
}

TEST(SynthLaw, NormalDistribution) {
  EXPECT_NEAR(normal_cdf(1.959963984540054), 0.975, 1e-15);
  for (const double p : {1e-6, 0.002, 0.11, 0.5, 0.98}) EXPECT_NEAR(normal_cdf(normal_quantile(p)), p, 1e-14);
}

struct DensityCase {
  const char* arch;
  double density, hot_share;
  int64_t predictor_rank;
  DType type;
};

class SynthDensity : public ::testing::TestWithParam<DensityCase> {};

TEST_P(SynthDensity, MeasuredMatchesAsked) {
  const DensityCase& c = GetParam();
  SynthOptions o = tiny_options();
  o.shape.arch = c.arch;
  o.shape.n_layer = 6;
  o.density = c.density;
  o.hot_share = c.hot_share;
  o.predictor_rank = c.predictor_rank;
  o.type = c.type;
  const int64_t n = 300, rank = c.predictor_rank > 0 ? (c.predictor_rank - 2) / 2 : o.shape.n_embd;
  const Activity a = run(o, synthetic_text(o.shape.n_vocab, n, 8, 5));
  for (int64_t l = 0; l < a.n_layer; ++l) {
    RecordProperty("density_layer_" + std::to_string(l), std::to_string(a.density(l)));
    EXPECT_NEAR(a.density(l), c.density, tolerance(c.density, rank, n)) << "layer " << l;
  }
  EXPECT_NEAR(a.hot_share(o.seed), c.hot_share, 0.02);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, SynthDensity,
    ::testing::Values(DensityCase{"llama", 0.11, 0.9, 0, DType::f32}, DensityCase{"llama", 0.11, 0.9, 128, DType::f32},
                      DensityCase{"llama", 0.04, 0.8, 0, DType::f16}, DensityCase{"llama", 0.25, 0.7, 256, DType::q8_0},
                      DensityCase{"opt", 0.05, 0.9, 128, DType::f32}, DensityCase{"opt", 0.11, 0.9, 0, DType::f16},
                      DensityCase{"falcon", 0.05, 0.9, 128, DType::f32},
                      DensityCase{"falcon", 0.2, 0.8, 0, DType::bf16}));

// score = fc2 . relu(fc1 . h), in double precision.
std::vector<double> scores(const gguf::File& file, int64_t layer, const std::vector<float>& h) {
  const auto multiply = [&](const std::string& name, const std::vector<double>& x) {
    const gguf::TensorInfo& t = *file.find_tensor(name);
    const auto* w = reinterpret_cast<const float*>(file.data(t).data());
    std::vector<double> y(static_cast<size_t>(t.rows()));
    for (size_t r = 0; r < y.size(); ++r) {
      for (size_t c = 0; c < x.size(); ++c) y[r] += static_cast<double>(w[r * x.size() + c]) * x[c];
    }
    return y;
  };
  std::vector<double> hidden = multiply(fmt::format("blk.{}.fc1.weight", layer), {h.begin(), h.end()});
  for (double& x : hidden) x = std::max(x, 0.0);
  return multiply(fmt::format("blk.{}.fc2.weight", layer), hidden);
}

TEST(SynthPredictor, PredictsExactlyTheActiveNeurons) {
  for (const char* arch : {"llama", "opt", "falcon"}) {
    SCOPED_TRACE(arch);
    const TempDir dir;
    ThreadTeam team(2);
    SynthOptions o = tiny_options();
    o.shape.arch = arch;
    o.predictor_rank = 96;
    write_synthetic(dir / "m.gguf", o, team);
    const Activity a = run(dir / "m.gguf", synthetic_text(o.shape.n_vocab, 12, 8, 5));
    const gguf::File file = gguf::File::open(dir / "m.gguf");
    // Weights and sums are f32 (the engine's) against f64 here: |z| errs by less than n_embd eps |h| |w| ~ 256 * 6e-8 *
    // 16, and a neuron that close to 0 may be on either side.
    const double rounding = 2.5e-4;
    size_t active = 0, undecided = 0;
    for (int64_t t = 0; t < a.n_tokens; ++t) {
      for (int64_t l = 0; l < a.n_layer; ++l) {
        const std::vector<double> z = scores(file, l, a.at(t, l).input);
        const std::set<int32_t> ids(a.at(t, l).active.begin(), a.at(t, l).active.end());
        active += ids.size();
        for (size_t i = 0; i < z.size(); ++i) {
          if (std::fabs(z[i]) < rounding) {
            ++undecided;
          } else {
            ASSERT_EQ(z[i] > 0, ids.contains(static_cast<int32_t>(i)))
                << "token " << t << " layer " << l << " neuron " << i;
          }
        }
      }
    }
    EXPECT_GT(active, static_cast<size_t>(a.n_tokens * a.n_layer * a.n_ff / 20));
    EXPECT_LT(undecided, active / 50);  // the exemption must not hide a wrong predictor
  }
}

// Overlap of the active sets of two windows: the neurons active in at least half of a window's tokens, compared as
// |A and B| / min(|A|, |B|), without the 26 % hottest, which are in every set.
double overlap(const Activity& a, uint64_t seed, int64_t window, int64_t first, int64_t second) {
  double sum = 0;
  for (int64_t l = 0; l < a.n_layer; ++l) {
    const std::vector<int32_t> ranks = neuron_ranks(seed, l, a.n_ff);
    std::array<std::set<int32_t>, 2> sets;
    for (size_t s = 0; s < 2; ++s) {
      std::map<int32_t, int64_t> count;
      for (int64_t t = 0; t < window; ++t) {
        for (const int32_t i : a.at((s == 0 ? first : second) * window + t, l).active) ++count[i];
      }
      for (const auto& [i, n] : count) {
        if (2 * n >= window && ranks[static_cast<size_t>(i)] >= static_cast<int>(kHotFraction * a.n_ff))
          sets[s].insert(i);
      }
    }
    size_t common = 0;
    for (const int32_t i : sets[0]) common += sets[1].count(i);
    const size_t least = std::min(sets[0].size(), sets[1].size());
    sum += least > 0 ? static_cast<double>(common) / static_cast<double>(least) : 0.0;
  }
  return sum / static_cast<double>(a.n_layer);
}

TEST(SynthDrift, ActiveSetStaysInATopicAndMovesOn) {
  SynthOptions o = tiny_options();
  o.shape.n_vocab = 4096;
  o.density = 0.2;
  o.hot_share = 0.6;
  o.drift = 0.5;
  const int64_t window = 16, windows = 24;
  // Two windows a topic.
  const Activity a = run(o, synthetic_text(o.shape.n_vocab, window * windows, 2 * window, 5));
  double same = 0, next = 0, far = 0;
  for (int64_t w = 0; w + 13 < windows; w += 2) {
    same += overlap(a, o.seed, window, w, w + 1) / 6;
    next += overlap(a, o.seed, window, w + 1, w + 2) / 6;
    far += overlap(a, o.seed, window, w, w + 12) / 6;
  }
  RecordProperty("overlap_same_topic", std::to_string(same));
  RecordProperty("overlap_next_topic", std::to_string(next));
  RecordProperty("overlap_far_topic", std::to_string(far));
  EXPECT_GT(same, next + 0.1);
  EXPECT_GT(next, far + 0.1);
  double density = 0;
  for (int64_t l = 0; l < a.n_layer; ++l) density += a.density(l) / static_cast<double>(a.n_layer);
  EXPECT_NEAR(density, o.density, 0.02);  // 12 topics instead of many tokens: a few times the tolerance without drift
}

}  // namespace
}  // namespace hearth::offline
