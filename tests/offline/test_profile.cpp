// The profiler: what it counts equals a computation from first principles, can be interrupted and continued, and does
// not depend on how it is cut into batches or threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "cpu/cpu.h"
#include "engine/engine.h"
#include "offline/profile/activation_counter.h"
#include "offline/profile/counting_device.h"
#include "offline/profile/profile.h"
#include "offline/profile/summary.h"
#include "support/paths.h"
#include "support/tiny_gguf.h"

namespace hearth::offline {
namespace {

// Gates and ups of a text, and the statistics computed the obvious way: sets of active neurons, one token after
// another.
struct Text {
  int64_t T, n_ff;
  std::vector<float> gate, up;
};
Text random_text(std::mt19937& rng, int64_t T, int64_t n_ff) {
  const auto n = static_cast<size_t>(T * n_ff);
  return {T, n_ff, test::random_normal(rng, n, 1.0f, -0.8f), test::random_normal(rng, n)};
}

model::LayerStatistics straightforward(const std::vector<Text>& texts, const NeuronRule& rule,
                                       const std::vector<float>& norms) {
  model::LayerStatistics s;
  s.active.resize(norms.size());
  s.impact.resize(norms.size());
  for (const Text& text : texts) {
    std::vector<std::vector<bool>> sets;
    for (int64_t t = 0; t < text.T; ++t) {
      std::vector<bool> set(norms.size());
      double size = 0, previous = 0, recent = 0;
      for (size_t i = 0; i < norms.size(); ++i) {
        const size_t at = static_cast<size_t>(t * text.n_ff) + i;
        const float a = rule.activate(text.gate[at]);
        set[i] = std::fabs(a) > rule.threshold;
        if (!set[i]) continue;
        const float u = rule.up_relu ? std::max(0.0f, text.up[at]) : text.up[at];
        ++s.active[i];
        s.impact[i] += static_cast<double>(std::fabs(a * u)) * norms[i];
        ++size;
        previous += t >= 1 && sets.back()[i] ? 1 : 0;
        bool seen = false;
        for (int64_t b = std::max<int64_t>(0, t - 64); b < t; ++b) seen |= sets[static_cast<size_t>(b)][i];
        recent += seen ? 1 : 0;
      }
      sets.push_back(set);
      for (size_t k = 0; k < s.unions.size(); ++k) {
        const int64_t n = model::kUnionTokens[k];
        if (t + 1 < n) continue;
        ++s.unions[k].windows;
        for (size_t i = 0; i < norms.size(); ++i) {
          s.unions[k].neurons += std::any_of(sets.end() - n, sets.end(), [i](auto& one) { return one[i]; }) ? 1 : 0;
        }
      }
      if (size == 0) continue;
      if (t >= 1) s.previous.sum += previous / size, ++s.previous.tokens;
      if (t >= 64) s.recent.sum += recent / size, ++s.recent.tokens;
    }
  }
  return s;
}

TEST(Profile, CountsEqualAStraightforwardComputation) {
  std::mt19937 rng(2);
  for (const int threads : {1, 3}) {
    ThreadTeam team(threads);
    for (const NeuronRule& rule :
         {NeuronRule{.act = Activation::relu}, NeuronRule{.act = Activation::relu, .up_relu = true},
          NeuronRule{.act = Activation::fat_relu, .act_threshold = 0.3f},
          NeuronRule{.act = Activation::silu, .threshold = 0.1f}}) {
      const int64_t n_ff = 1100;  // three pieces
      std::vector<float> norms = test::random_normal(rng, static_cast<size_t>(n_ff), 0.1f, 1.0f);
      const std::vector<Text> texts = {random_text(rng, 90, n_ff), random_text(rng, 1, n_ff),
                                       random_text(rng, 70, n_ff)};
      model::LayerStatistics stats;
      stats.active.resize(static_cast<size_t>(n_ff));
      ActivationCounter counter(team, rule, norms);
      for (const Text& text : texts) {
        counter.begin_sequence();
        for (int64_t first = 0; first < text.T; first += 32) {  // in batches
          const int64_t count = std::min<int64_t>(32, text.T - first);
          counter.add(text.gate.data() + first * n_ff, text.up.data() + first * n_ff, count, false, stats);
        }
      }
      const model::LayerStatistics expected = straightforward(texts, rule, norms);
      EXPECT_EQ(stats.active, expected.active);
      EXPECT_EQ(stats.impact, expected.impact);  // the same additions in the same order
      EXPECT_EQ(stats.previous.tokens, expected.previous.tokens);
      EXPECT_NEAR(stats.previous.sum, expected.previous.sum, 1e-9);
      EXPECT_EQ(stats.recent.tokens, expected.recent.tokens);
      EXPECT_NEAR(stats.recent.sum, expected.recent.sum, 1e-9);
      EXPECT_EQ(stats.unions, expected.unions);
    }
  }
}

// Nine tokens and five neurons, counted by hand; then a text that is too short for any window.
TEST(Profile, UnionsOfConsecutiveTokens) {
  //                                    t = 0  1  2  3  4  5  6  7  8
  const std::vector<std::vector<int>> active = {{1, 0, 0, 0, 0, 0, 0, 0, 1},   // the ends alone
                                                {1, 1, 1, 1, 1, 1, 1, 1, 1},   // always
                                                {0, 0, 0, 0, 0, 0, 0, 0, 0},   // never
                                                {0, 1, 0, 1, 0, 1, 0, 1, 0},   // every other token
                                                {0, 0, 0, 0, 1, 0, 0, 0, 0}};  // once
  std::vector<float> gates;
  for (size_t t = 0; t < 9; ++t) {
    for (const std::vector<int>& neuron : active) gates.push_back(neuron[t] != 0 ? 1.0f : -1.0f);
  }
  for (const int64_t batch : {9, 1, 4}) {
    ThreadTeam team(2);
    model::LayerStatistics stats;
    stats.active.resize(5);
    ActivationCounter counter(team, {}, std::vector<float>(5, 1.0f));
    counter.begin_sequence();
    for (int64_t t = 0; t < 9; t += batch) {
      counter.add(gates.data() + t * 5, nullptr, std::min(batch, 9 - t), false, stats);
    }
    counter.begin_sequence();
    counter.add(gates.data(), nullptr, 1, false, stats);
    // Windows of 2: 8. The neurons are in 2, 8, 0, 8 and 2 of them. Of 4: 6 windows, in 2, 6, 0, 6 and 4. Of 8: 2
    // windows, in 2, 2, 0, 2 and 2.
    EXPECT_EQ(stats.unions, (decltype(stats.unions){{{20, 8}, {18, 6}, {8, 2}}}));
    EXPECT_DOUBLE_EQ(*stats.unions[0].share(5), 0.5);
    EXPECT_DOUBLE_EQ(*stats.unions[1].share(5), 0.6);
    EXPECT_DOUBLE_EQ(*stats.unions[2].share(5), 0.8);
  }
}

class ProfileModel : public testing::Test {
 protected:
  void SetUp() override { load({}); }
  void load(const test::TinyGguf& shape) {
    test::write_tiny_gguf(path_, shape);
    model_ = model::Model::load(path_);
  }
  Corpus corpus(int64_t documents, CorpusOptions options = {.window = 40, .heldout_every = 4}) const {
    std::mt19937 rng(7);
    Corpus c;
    std::vector<std::vector<int32_t>> ids(static_cast<size_t>(documents));
    for (auto& d : ids) {
      d.resize(static_cast<size_t>(test::random_int(rng, 1, 100)));
      for (int32_t& id : d) id = static_cast<int32_t>(test::random_int(rng, 0, 63));
    }
    c.sequences = make_sequences(std::move(ids), options);
    c.texts = {{"made.txt", "abc", 3}};
    return c;
  }
  ProfileOptions options() const {
    ProfileOptions o;
    o.corpus = {.window = 40, .heldout_every = 4};
    return o;
  }
  model::Sidecar run(const Corpus& c, const ProfileOptions& o, int threads = 2) {
    model::Sidecar s = model::Sidecar::empty_for(model_->file(), model_->config());
    go_on(
        s, c, o, [](const ProfileProgress&) { return true; }, threads);
    return s;
  }
  template <typename F>
  void go_on(model::Sidecar& s, const Corpus& c, const ProfileOptions& o, F&& keep_going, int threads = 2) {
    ThreadTeam team(threads);
    const auto device = cpu::make_reference_device(), host = cpu::make_reference_device();
    profile(*model_, *device, *host, team, c, o, s, keep_going);
  }
  static void expect_equal(const model::Sidecar& a, const model::Sidecar& b) {
    EXPECT_EQ(a.statistics.tokens, b.statistics.tokens);
    EXPECT_EQ(a.statistics.tokens_heldout, b.statistics.tokens_heldout);
    EXPECT_EQ(a.statistics.complete, b.statistics.complete);
    for (size_t l = 0; l < a.statistics.layers.size(); ++l) {
      const auto &x = a.statistics.layers[l], &y = b.statistics.layers[l];
      EXPECT_EQ(x.active, y.active);
      EXPECT_EQ(x.active_heldout, y.active_heldout);
      EXPECT_EQ(x.impact, y.impact);
      EXPECT_EQ(x.moments, y.moments);
      EXPECT_EQ(x.previous.sum, y.previous.sum);
      EXPECT_EQ(x.recent.tokens, y.recent.tokens);
      EXPECT_EQ(x.unions, y.unions);
      EXPECT_GT(x.unions[2].windows, 0u);
    }
  }

  test::TempDir dir_;
  std::filesystem::path path_ = dir_ / "tiny.gguf";
  std::optional<model::Model> model_;
};

// Decoding token by token in the exact sparse mode reports the active neurons of every step: their number must be what
// the profiler counted.
TEST_F(ProfileModel, DensityEqualsThatOfSparseDecoding) {
  const Corpus c = corpus(3, {.window = 40, .heldout_every = 0});
  ProfileOptions o = options();
  o.corpus.heldout_every = 0;
  const model::Sidecar s = run(c, o);
  const auto device = cpu::make_reference_device();
  engine::EngineOptions e;
  e.n_ctx = 40, e.sparsity = engine::Sparsity::exact;
  engine::Engine engine(*model_, *device, e);
  for (const Sequence& sequence : c.sequences) {
    engine::Sequence text = engine.sequence();
    for (const int32_t id : sequence.ids) engine.eval(text, {&id, 1});
  }
  for (size_t l = 0; l < s.n_ff.size(); ++l) {
    double counted = 0;
    for (const uint64_t a : s.statistics.layers[l].active) counted += static_cast<double>(a);
    EXPECT_GT(counted, 0);
    // A pre-activation within rounding of zero may fall on either side in a batch and alone.
    EXPECT_NEAR(counted, engine.density().active[l], 1e-4 * counted) << "layer " << l;
  }
}

TEST_F(ProfileModel, InterruptedAndResumedItIsTheSame) {
  const Corpus c = corpus(12);
  ProfileOptions o = options();
  o.moments = true;
  const model::Sidecar whole = run(c, o);
  EXPECT_TRUE(whole.statistics.complete);
  EXPECT_GT(whole.statistics.tokens_heldout, 0u);
  EXPECT_EQ(whole.statistics.tokens + whole.statistics.tokens_heldout, c.tokens());

  model::Sidecar parts = model::Sidecar::empty_for(model_->file(), model_->config());
  int rounds = 0;
  while (!parts.statistics.complete) {
    int sequences = 0;
    go_on(parts, c, o, [&](const ProfileProgress&) { return ++sequences < 3; });
    parts.write(dir_ / "parts.sparse.gguf");
    parts = model::Sidecar::read(dir_ / "parts.sparse.gguf");
    ASSERT_LT(++rounds, 50);
  }
  EXPECT_GT(rounds, 2);
  expect_equal(parts, whole);
}

// Neurons whose scores exceed their thresholds, by the definition.
uint64_t named_by(const Predictor& p, const float* x) {
  const auto product = [](const Matrix& w, int64_t row, const std::vector<float>& v) {
    std::vector<float> weights(v.size());
    traits(w.type).to_float(w.row(row), weights.data(), w.cols);
    double sum = 0;
    for (size_t i = 0; i < v.size(); ++i) sum += static_cast<double>(weights[i]) * v[i];
    return static_cast<float>(sum);
  };
  const std::vector<float> in(x, x + p.fc1.cols);
  std::vector<float> hidden;
  for (int64_t r = 0; r < p.fc1.rows; ++r) {
    const float h = product(p.fc1, r, in);
    hidden.push_back(p.relu ? std::max(0.0f, h) : h);
  }
  uint64_t n = 0;
  for (int64_t k = 0; k < p.n(); ++k) n += product(p.fc2, k, hidden) > p.threshold.data[k] ? 1 : 0;
  return n;
}

TEST_F(ProfileModel, APredictorIsTriedOnAFewTokens) {
  load({.predictor_rank = 12});
  model::Statistics s = model::Sidecar::empty_for(model_->file(), model_->config()).statistics;
  s.layers[0].named = {7, 5};
  PredictorTrial trial(*model_, 0.25f, s);
  EXPECT_EQ(trial.wanted(0), 0) << "known already";
  const Predictor& p = model_->weights().layers[1].predictor.weights;
  const int64_t n_embd = model_->config().n_embd, n_ff = model_->config().n_ff;
  std::mt19937 rng(5);
  uint64_t named = 0, active = 0;
  for (const int64_t T : {1, 4}) {
    const auto inputs = test::random_normal(rng, static_cast<size_t>(T * n_embd));
    const auto gates = test::random_normal(rng, static_cast<size_t>(T * n_ff));
    EXPECT_GE(trial.wanted(1), T);
    trial.add(1, inputs.data(), gates.data(), T);
    for (int64_t t = 0; t < T; ++t) named += named_by(p, inputs.data() + t * n_embd);
    for (const float z : gates) active += z > 0.25f ? 1 : 0;
  }
  EXPECT_EQ(trial.wanted(1), PredictorTrial::kTokens - 5);
  trial.finish(*cpu::make_reference_device(), s);
  EXPECT_EQ(s.layers[0].named.named, 7u);
  EXPECT_EQ(s.layers[1].named.named, named);
  EXPECT_EQ(s.layers[1].named.active, active);
  EXPECT_GT(named, 0u);
}

TEST_F(ProfileModel, TriesThePredictorsOfTheFile) {
  EXPECT_FALSE(run(corpus(3), options()).statistics.layers[0].named.per_active());
  load({.predictor_rank = 12});
  const Corpus c = corpus(6);
  model::Sidecar s = run(c, options());
  const auto first = s.statistics.layers[1].named;
  EXPECT_GT(first.named, 0u);
  EXPECT_GT(first.active, 0u);
  EXPECT_LT(first.active, static_cast<uint64_t>(PredictorTrial::kTokens * s.n_ff[1]));
  s.statistics.complete = false, s.statistics.sequences_done -= 1;
  go_on(s, c, options(), [](const ProfileProgress&) { return true; });
  EXPECT_EQ(s.statistics.layers[1].named.named, first.named) << "once is enough";
}

TEST_F(ProfileModel, ThreadsDoNotMatter) {
  const Corpus c = corpus(6);
  expect_equal(run(c, options(), 1), run(c, options(), 4));
}

TEST_F(ProfileModel, StopsAtTheTokensAskedFor) {
  const Corpus c = corpus(12);
  ProfileOptions o = options();
  o.max_tokens = 100;
  model::Sidecar s = run(c, o);
  const uint64_t done = s.statistics.tokens + s.statistics.tokens_heldout;
  EXPECT_GE(done, 100u);
  EXPECT_LT(done, 140u);  // less than a window more
  EXPECT_FALSE(s.statistics.complete);
  o.max_tokens = 0;
  go_on(s, c, o, [](const ProfileProgress& p) { return p.tokens_done <= p.tokens_total; });
  expect_equal(s, run(c, o));
}

TEST_F(ProfileModel, RefusesToAddWhatDoesNotBelongTogether) {
  const Corpus c = corpus(6);
  model::Sidecar s = run(c, options());
  const auto message = [&](const Corpus& other, const ProfileOptions& o) -> std::string {
    model::Sidecar copy = s;
    try {
      go_on(copy, other, o, [](const ProfileProgress&) { return true; });
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message(c, options()), "no error");
  Corpus other = c;
  other.texts[0].hash = "abd";
  EXPECT_NE(message(other, options()).find("other texts"), std::string::npos);
  ProfileOptions o = options();
  o.corpus.window = 41;
  EXPECT_NE(message(c, o).find("windows of 40"), std::string::npos);
  o = options(), o.corpus.heldout_every = 5;
  EXPECT_NE(message(c, o).find("--heldout-every 4"), std::string::npos);
  o = options(), o.threshold = 0.5f;
  EXPECT_NE(message(c, o).find("--sparse-threshold"), std::string::npos);
  o = options(), o.moments = true;
  EXPECT_NE(message(c, o).find("moments"), std::string::npos);
}

TEST_F(ProfileModel, MomentsAreThoseOfTheFfnInput) {
  load({.n_layer = 1});
  ProfileOptions o = options();
  o.moments = true;
  const model::Sidecar s = run(corpus(4), o);
  const std::vector<float>& m = s.statistics.layers[0].moments;
  const auto n = static_cast<size_t>(model_->config().n_embd);
  ASSERT_EQ(m.size(), n * n);
  double trace = 0;
  for (size_t i = 0; i < n; ++i) {
    trace += m[i * n + i];
    for (size_t j = 0; j < n; ++j) EXPECT_FLOAT_EQ(m[i * n + j], m[j * n + i]);
  }
  // Every input is RMS-normalised and then multiplied by the norm's weights, which are near 1 (standard deviation 0.1).
  const double per_token = trace / static_cast<double>(s.statistics.tokens);
  EXPECT_NEAR(per_token, static_cast<double>(n), 0.2 * static_cast<double>(n));
}

// The norms are the same whichever way `down` lies in the file.
TEST_F(ProfileModel, DownRowNorms) {
  const FfnShard& t = model_->weights().layers[0].ffn;
  const std::vector<float> expected = down_row_norms(t);
  const auto* rows = static_cast<const float*>(t.down_t.data);
  const int64_t n = t.down_t.cols;
  for (size_t i = 0; i < expected.size(); ++i) {
    double square = 0;
    for (int64_t c = 0; c < n; ++c) square += std::pow(rows[static_cast<int64_t>(i) * n + c], 2);
    EXPECT_NEAR(expected[i], std::sqrt(square), 1e-5);
  }
  std::vector<float> standard(static_cast<size_t>(t.down_t.rows * n));
  for (int64_t r = 0; r < t.down_t.rows; ++r) {
    for (int64_t c = 0; c < n; ++c) standard[static_cast<size_t>(c * t.down_t.rows + r)] = rows[r * n + c];
  }
  FfnShard other = t;
  other.down_t = {};
  other.down = {DType::f32, n, t.down_t.rows, standard.data()};
  EXPECT_EQ(down_row_norms(other), expected);
}

TEST(ProfileCorpus, SplitsDocuments) {
  EXPECT_EQ(split_documents("one<|endoftext|>two"), (std::vector<std::string_view>{"one", "two"}));
  EXPECT_EQ(split_documents("<|endoftext|>\n<|endoftext|>a<|endoftext|>"), (std::vector<std::string_view>{"a"}));
  EXPECT_TRUE(split_documents(" \n").empty());
}

TEST(ProfileCorpus, HoldsOutDocumentsOrWindows) {
  const std::vector<int32_t> ten(10);
  auto s = make_sequences(std::vector(4, ten), {.window = 6, .heldout_every = 4});
  ASSERT_EQ(s.size(), 8u);  // two windows a document, the last document held out
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(s[i].heldout, i >= 6) << i;
  EXPECT_EQ(s[0].ids.size(), 6u);
  EXPECT_EQ(s[1].ids.size(), 4u);
  s = make_sequences({std::vector<int32_t>(48)}, {.window = 6, .heldout_every = 4});  // too few documents: windows
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(s[i].heldout, i % 4 == 3) << i;
}

TEST(ProfileSummary, OfKnownCounts) {
  model::Sidecar s("f", "m", 4, {4});
  s.statistics.tokens = 100, s.statistics.tokens_heldout = 10;
  s.statistics.layers[0].active = {5, 80, 10, 5};
  s.statistics.layers[0].active_heldout = {1, 2, 6, 1};
  const LayerSummary l = summarize(s.statistics).at(0);
  EXPECT_DOUBLE_EQ(l.density, 0.25);
  EXPECT_DOUBLE_EQ(l.hot_share, 0.25);    // one neuron makes 80 of 100
  EXPECT_DOUBLE_EQ(l.hit, 0.8);           // the hottest 26 % of 4 are one
  EXPECT_DOUBLE_EQ(*l.hit_heldout, 0.2);  // it makes 2 of 10 there
  EXPECT_DOUBLE_EQ(*l.hit_heldout_possible, 0.6);
  EXPECT_FALSE(l.previous.has_value());
  EXPECT_NE(summary_table(s).find("80.0 %"), std::string::npos);
  EXPECT_EQ(summary_json(s)["layers"][0]["hit_rate_heldout"], 0.2);
  EXPECT_TRUE(summary_json(s)["mean"]["coactive_previous"].is_null());
  EXPECT_FALSE(l.unions[0].has_value());
  EXPECT_TRUE(summary_json(s)["mean"]["union"]["8"].is_null());
  EXPECT_NE(summary_table(s).find("`hearth profile -f TEXT` without --resume counts them"), std::string::npos);
}

TEST(ProfileSummary, UnionsRelativeToOneToken) {
  model::Sidecar s("f", "m", 4, {4, 4});
  s.statistics.tokens = 100;
  s.statistics.layers[0].active = {20, 40, 20, 20};                     // density 0.25
  s.statistics.layers[1].active = {10, 20, 10, 20};                     // 0.15
  s.statistics.layers[0].unions = {{{160, 100}, {200, 80}, {60, 20}}};  // 0.4, 0.625, 0.75 of 4 neurons
  s.statistics.layers[1].unions = {{{80, 100}, {100, 80}, {36, 20}}};   // 0.2, 0.3125, 0.45
  const std::vector<LayerSummary> layers = summarize(s.statistics);
  EXPECT_DOUBLE_EQ(*layers[0].unions[1], 0.625);
  EXPECT_DOUBLE_EQ(*layers[0].growth(0), 1.6);
  EXPECT_DOUBLE_EQ(*layers[1].growth(2), 3);
  const LayerSummary mean = mean_of(layers);
  EXPECT_DOUBLE_EQ(mean.density, 0.2);
  EXPECT_DOUBLE_EQ(*mean.unions[2], 0.6);
  EXPECT_DOUBLE_EQ(*mean.growth(2), 3);  // neurons of all layers, not a mean of ratios
  const nlohmann::json j = summary_json(s);
  EXPECT_DOUBLE_EQ(j["layers"][0]["union"]["2"].get<double>(), 0.4);
  EXPECT_DOUBLE_EQ(j["mean"]["union_per_density"]["2"].get<double>(), 1.5);
  const std::string table = summary_table(s);
  EXPECT_NE(table.find("    0    25.0 %    40.0 %   1.60 ×    62.5 %   2.50 ×    75.0 %   3.00 ×\n"), std::string::npos)
      << table;
}

}  // namespace
}  // namespace hearth::offline
