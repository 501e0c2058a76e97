// A model divided between a main device and the CPU gives the results of the undivided one, however it is divided. The
// oracle device stands in for the GPU, in a thread of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <variant>

#include "core/error.h"
#include "core/forwarding_device.h"
#include "engine/engine.h"
#include "offline/synth.h"
#include "support/conditioning.h"
#include "support/divisions.h"
#include "support/paths.h"
#include "support/predictors.h"
#include "support/random.h"
#include "support/zoo.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::Placement;
using engine::Sparsity;
using engine::Where;
using test::Division;
using test::placement_of;

// Both continue alike, token by token, wherever the choice is not within the tolerance.
void expect_same_greedy(Engine& two, Engine& whole, int32_t id, double tolerance) {
  engine::Sequence text = two.sequence(), other = whole.sequence();
  for (int step = 0; step < 6; ++step) {
    const int32_t got = two.eval_greedy(text, id);
    const auto logits = whole.eval(other, {&id, 1});
    const auto best = std::max_element(logits.begin(), logits.end());
    id = static_cast<int32_t>(best - logits.begin());
    if (got != id) {
      EXPECT_LE(*best - logits[static_cast<size_t>(got)], tolerance) << "step " << step;
    }
  }
}

struct Case {
  test::ZooModel model;
  DType type;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.model.name << "/" << traits(c.type).name; }
};

class Divided : public testing::TestWithParam<Case> {};

TEST_P(Divided, EqualsTheUndividedModel) {
  if (const auto& from = GetParam().model.directory; !from.empty() && !std::filesystem::exists(from)) {
    GTEST_SKIP() << "needs " << from << ", which is absent";
  }
  const auto path = test::gguf_of(GetParam().model, GetParam().type);
  auto plain = model::Model::load(path);
  auto divided = model::Model::load(path);
  for (model::Model* m : {&plain, &divided}) ASSERT_FALSE(m->prepare_sparse().has_value());
  const model::Config& c = plain.config();
  std::mt19937 rng(7);
  std::vector<int32_t> ids(23);
  for (int32_t& id : ids) id = static_cast<int32_t>(test::random_int(rng, 0, c.n_vocab - 1));
  ThreadTeam team(2);
  const auto script = test::prompt_then_decode(ids, 18);  // a prompt, in two batches, then token by token
  // Measured on the whole model, every neuron computed; what a predictor leaves out changes the model and not how far
  // it carries a rounding.
  test::ErrorLimits limits(path, script, test::kCpuArithmetic, {.n_batch = 16});
  limits.expect_not_vacuous();
  const test::TightLimit tight(path, test::kCpuArithmetic, {.n_batch = 16}, {2, 1}, test::kFloatNoise, 5);

  struct Mode {
    const char* name;
    Sparsity sparsity;
    std::optional<model::PredictorInput> predictor = std::nullopt;
    int64_t stream_tokens = 0;
  };
  std::vector<Mode> modes = {
      {"dense", Sparsity::off}, {"auto", Sparsity::auto_}, {"streamed prompts", Sparsity::auto_, std::nullopt, 7}};
  if (c.ffn.sparse()) {
    modes.push_back({"predict", Sparsity::predict, model::PredictorInput::ffn_input});
    modes.push_back({"predict from x", Sparsity::predict, model::PredictorInput::residual});
  }
  for (const Mode& mode : modes) {
    const EngineOptions options{.n_batch = 16,
                                .sparsity = mode.sparsity,
                                .stream_tokens = mode.stream_tokens,
                                .copy_weights = mode.predictor.has_value()};
    for (model::Model* m : {&plain, &divided}) {
      if (mode.predictor) test::add_predictors(*m, *mode.predictor);
    }
    for (const Division& d : test::divisions()) {
      SCOPED_TRACE(d.name + ", " + mode.name);
      const Placement placement = placement_of(d, divided, mode.predictor.has_value(), rng);
      const auto whole_device = cpu::make_device(team);
      Engine whole(plain, *whole_device, options);
      const auto main = cpu::make_reference_device();
      const auto host = cpu::make_device(team);
      Engine two(divided, *main, options, {*host, placement, team});
      limits.expect_apart(test::run(two, script), test::run(whole, script), "divided");
      expect_same_greedy(two, whole, ids[0], 2 * limits.worst(script.calls.size() - 1));
      if (two.sparsity() != Sparsity::off) {
        EXPECT_NEAR(two.density().density(), whole.density().density(), 0.01);
        if (d.name == "nothing_hot") {
          EXPECT_DOUBLE_EQ(two.density().host_share(), 1.0);
        } else if (d.name == "everything_hot") {
          EXPECT_DOUBLE_EQ(two.density().host_share(), 0.0);
        }
      }
      if (mode.name == std::string_view("auto")) {  // short sequences: what is lost or doubled shows, whatever the type
        EXPECT_LE(tight.share([&](const test::Script& s) { return test::run(two, s); }), 1);
      }
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& m : test::zoo()) {
    if (!m.name.starts_with("own_") && !test::is_todays(m)) continue;
    all.push_back({m, DType::f16});
    if (test::is_sparse(m)) all.push_back({m, DType::q8_0});  // quantised files of other families stay untransposed
  }
  all.push_back({test::wide_models()[1], DType::q4_k});
  all.push_back({test::wide_models()[0], DType::q6_k});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Zoo, Divided, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.model.name + "_" + traits(p.param.type).name; });

// Keeps what fetch() was told before a layer, and the neurons that the layer then needed.
class WatchedHost : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  struct Layer {
    std::vector<int32_t> fetched, needed;
  };
  const std::vector<Layer>& layers() const { return layers_; }

  void fetch(const FfnShard& shard, std::span<const int32_t> ids, const Mailbox& until) override {
    EXPECT_TRUE(ids.front() >= 0 && ids.back() < shard.n()) << ids.front() << " to " << ids.back();
    fetched_.assign(ids.begin(), ids.end());
    ForwardingDevice::fetch(shard, ids, until);
  }
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override {
    Layer& layer = layers_.emplace_back();
    layer.fetched = std::exchange(fetched_, {});
    EXPECT_EQ(T, 1);
    if (const auto* lists = std::get_if<NeuronLists>(&sparse.candidates))
      layer.needed.assign(lists->ids, lists->ids + lists->count[0]);
    ForwardingDevice::ffn_sparse(shard, sparse, in, T, y_bias, y, next);
  }

 private:
  std::vector<int32_t> fetched_;
  std::vector<Layer> layers_;
};

// A synthetic model with predictors.
std::filesystem::path write_tiny(const test::TempDir& dir, ThreadTeam& team) {
  offline::SynthOptions synth;
  synth.shape = offline::find_synth_shape("tiny");
  synth.predictor_rank = 64;
  offline::write_synthetic(dir / "m.gguf", synth, team);
  return dir / "m.gguf";
}

// Nobody asks the CPU for a token's neurons where the main device reads all of them itself over the link. (That the
// results are right, Divided shows.)
TEST(Linked, TheCpuRestsWhereNoneAreItsOwn) {
  const test::TempDir dir;
  ThreadTeam team(2);
  auto model = model::Model::load(write_tiny(dir, team));
  std::mt19937 rng(5);
  for (const double linked : {1.0, 0.5}) {
    const Placement placement =
        placement_of({"linked", {0.3}, {Where::gpu}, Where::gpu, Where::gpu, linked}, model, true, rng);
    const auto main = cpu::make_reference_device(), cpu = cpu::make_device(team);
    WatchedHost host(*cpu);
    Engine engine(model, *main, {.sparsity = Sparsity::predict}, {host, placement, team});
    engine::Sequence text = engine.sequence();
    for (int32_t id = 1; id <= 5; ++id) engine.eval(text, {&id, 1});
    EXPECT_EQ(host.layers().empty(), linked == 1.0);
    const engine::DensityStats counted = engine.density();
    EXPECT_EQ(std::accumulate(counted.active_on_host.begin(), counted.active_on_host.end(), 0.0) == 0.0, linked == 1.0);
    EXPECT_GT(std::accumulate(counted.active_linked.begin(), counted.active_linked.end(), 0.0), 0.0);
  }
}

// Predicts from the input that the layer's hint was made from.
class PredictsAsHinted : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void hint(const Predictor& predictor, Act in, const HintArgs& args) override {
    hinted_.assign(in.x, in.x + predictor.fc1.cols);
    ForwardingDevice::hint(predictor, in, args);
  }
  void predict(const Predictor& predictor, const Input& in, int64_t T, const PredictArgs& args) override {
    std::vector<float> hinted = std::exchange(hinted_, {});
    if (hinted.empty()) return ForwardingDevice::predict(predictor, in, T, args);
    if (in.normed()) norm(in.norm, in.x, T, in.act);  // the FFN reads it
    ForwardingDevice::predict(predictor, Act{hinted.data(), nullptr}, T, args);
  }

 private:
  std::vector<float> hinted_;  // [n_embd], or empty
};

// The CPU fetches before a layer's hand-off exactly the neurons that this brings where both come from one input. Where
// they do not, most of them, because a synthetic model's residual stream changes slowly. It fetches nothing before the
// first predicted layer, or when told so.
TEST(LookAhead, TheCpuFetchesWhatItWillNeed) {
  const test::TempDir dir;
  ThreadTeam team(2);
  const auto path = write_tiny(dir, team);
  for (const bool as_hinted : {false, true}) {
    for (const bool look_ahead : {true, false}) {
      SCOPED_TRACE(fmt::format("as hinted {}, look-ahead {}", as_hinted, look_ahead));
      auto model = model::Model::load(path);
      const model::Config& c = model.config();
      std::mt19937 rng(3);
      const Placement placement =
          placement_of({"some_linked", {0.3}, {Where::gpu}, Where::gpu, Where::gpu, 0.2}, model, true, rng);
      const auto reference = cpu::make_reference_device(), cpu = cpu::make_device(team);
      PredictsAsHinted predicts_as_hinted(*reference);
      WatchedHost host(*cpu);
      Device& main = as_hinted ? predicts_as_hinted : *reference;
      Engine engine(model, main, {.sparsity = Sparsity::predict, .look_ahead = look_ahead}, {host, placement, team});
      constexpr int32_t kSteps = 12;
      engine::Sequence text = engine.sequence();
      for (int32_t id = 1; id <= kSteps; ++id) engine.eval(text, {&id, 1});
      ASSERT_EQ(std::ssize(host.layers()), kSteps * c.n_layer);
      double hits = 0, fetched = 0, needed = 0;
      for (size_t i = 0; i < host.layers().size(); ++i) {
        const WatchedHost::Layer& layer = host.layers()[i];
        const size_t l = i % static_cast<size_t>(c.n_layer);
        const bool is_first = l == 0 || placement.layers[l - 1].selection != engine::Selection::predictor;
        if (is_first || !look_ahead) {
          EXPECT_TRUE(layer.fetched.empty());
          continue;
        }
        if (layer.fetched.empty()) continue;  // the hand-off came before the CPU looked for hints
        if (as_hinted) {
          EXPECT_EQ(layer.fetched, layer.needed) << "layer " << l;
        }
        std::vector<int32_t> both;
        std::set_intersection(layer.fetched.begin(), layer.fetched.end(), layer.needed.begin(), layer.needed.end(),
                              std::back_inserter(both));
        hits += static_cast<double>(both.size());
        fetched += static_cast<double>(layer.fetched.size()), needed += static_cast<double>(layer.needed.size());
      }
      if (!look_ahead) continue;
      EXPECT_GT(needed, 0);
      EXPECT_GT(hits, 0.6 * needed);
      EXPECT_GT(hits, 0.6 * fetched);
    }
  }
}

// Hints as they are at worst: every bit of their words is set.
class StrayHints : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void hint(const Predictor& predictor, Act, const HintArgs& args) override {
    const auto marks = MailboxMarks::of(static_cast<int32_t>(predictor.n()), static_cast<int32_t>(args.n_own),
                                        static_cast<int32_t>(args.n_own + args.n_linked));
    std::vector<int32_t> ids(static_cast<size_t>(marks.n_words) * 32);
    std::iota(ids.begin(), ids.end(), marks.first);
    dynamic_cast<HostMailbox&>(*args.mailbox).post_hints(marks, ids);
  }
};

// A hint that came a hand-off late may tell of another layer. Rows that the layer does not have are not fetched, and
// the results are the same.
TEST(LookAhead, HintsMayBeWrong) {
  const test::TempDir dir;
  ThreadTeam team(2);
  auto model = model::Model::load(write_tiny(dir, team));
  for (const double hot : {0.3, 0.31, 0.37}) {  // of 32 neurons another number each
    std::mt19937 rng(7);
    const Placement placement = placement_of({"hot", {hot}}, model, true, rng);
    std::vector<std::vector<float>> logits[2];
    for (const bool stray : {false, true}) {
      const auto reference = cpu::make_reference_device(), cpu = cpu::make_device(team);
      StrayHints main(*reference);
      WatchedHost host(*cpu);
      Engine engine(model, stray ? static_cast<Device&>(main) : *reference, {.sparsity = Sparsity::predict},
                    {host, placement, team});
      engine::Sequence text = engine.sequence();
      for (int32_t id = 1; id <= 6; ++id) {
        const auto last = engine.eval(text, {&id, 1});
        logits[stray].emplace_back(last.begin(), last.end());
      }
      const auto fetched = [](const WatchedHost::Layer& layer) { return !layer.fetched.empty(); };
      EXPECT_TRUE(std::any_of(host.layers().begin(), host.layers().end(), fetched));
    }
    EXPECT_EQ(logits[0], logits[1]);
  }
}

// Hand-offs of one to a few tokens, each with lists of its own.
TEST(Mailbox, ManyHandOffsInOrder) {
  HostMailbox box(64, 8);
  constexpr int rounds = 2000;
  const auto marks = MailboxMarks::of(8, 0, 0);
  const auto ids_of = [](int round, int64_t token) {
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < 8; ++id) {
      if (((round + token) >> (id % 4) & 1) != 0) ids.push_back(id);
    }
    return ids;
  };
  std::thread device([&] {
    std::vector<float> x(64);
    for (int r = 0; r < rounds; ++r) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(r) + static_cast<float>(i);
      box.post_input(x.data(), 64, marks);
      for (int64_t t = 0; t <= r % kFewTokens; ++t) box.post_neurons(t, marks, ids_of(r, t));
      box.collect(x.data(), 64);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], 3 * (static_cast<float>(r) + static_cast<float>(i)));
    }
  });
  for (int r = 0; r < rounds; ++r) {
    const float* const x = box.wait_input();
    const int64_t T = 1 + r % kFewTokens;
    const NeuronLists lists = box.wait_neurons(T);
    for (int64_t t = 0; t < T; ++t) {
      const int32_t* const ids = lists.ids + t * lists.stride;
      ASSERT_EQ(std::vector<int32_t>(ids, ids + lists.count[t]), ids_of(r, t)) << r << ", token " << t;
    }
    for (int i = 0; i < 64; ++i) box.answer_buffer()[i] = 2 * x[i];
    box.answer();
  }
  device.join();
}

TEST(Mailbox, AnAbandonedOneDoesNotBlock) {
  HostMailbox box(4, 0);
  const float x[4] = {1, 2, 3, 4};
  float y[4] = {};
  box.post(x, 4);
  box.abandon();
  EXPECT_THROW(box.collect(y, 4), Error);
}

}  // namespace
}  // namespace hearth
