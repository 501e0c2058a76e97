// The profiling device changes nothing but the time, and says where it went.
#include "engine/profiling_device.h"

#include <numeric>

#include "cpu/cpu.h"
#include "engine/engine.h"
#include "program.h"
#include "support/tiny_model.h"

namespace hearth::test {
namespace {

using engine::Engine;
using engine::Part;
using engine::ProfilingDevice;

double of(const std::array<double, engine::kParts>& parts, Part part) {
  return parts[static_cast<size_t>(part)];
}

std::map<std::string, int64_t> calls_of(ProfilingDevice& profiler) {
  std::map<std::string, int64_t> calls;
  for (const auto& row : profiler.rows()) calls[row.operation] = row.calls;
  return calls;
}

TEST(ProfilingDevice, SameLogitsAndEveryOperationCounted) {
  TempDir dir;
  model::Model plain_model = model::Model::load(write_tiny_model(dir / "m.gguf"));
  model::Model profiled_model = model::Model::load(dir / "m.gguf");
  const auto inner = cpu::make_reference_device();
  const auto plain_device = cpu::make_reference_device();
  ProfilingDevice profiler(*inner);
  {
    Engine plain(plain_model, *plain_device, {}), profiled(profiled_model, profiler, {});
    engine::Sequence text = plain.sequence(), other = profiled.sequence();
    const std::vector<int32_t> prompt = {kTinyThe, 4, 7, 1, 1, 2, 3, 5, 8};
    for (const auto& ids : {prompt, std::vector<int32_t>{9}, std::vector<int32_t>{9, 6}}) {
      const std::span<const float> expected = plain.eval(text, ids), logits = profiled.eval(other, ids);
      EXPECT_TRUE(std::equal(logits.begin(), logits.end(), expected.begin(), expected.end()));
    }
    EXPECT_EQ(profiler.memory().size(), plain_device->memory().size());
  }
  EXPECT_TRUE(profiler.memory().empty()) << "everything was given back";

  std::map<std::string, int64_t> calls = calls_of(profiler);
  EXPECT_EQ(calls["ffn_dense 96x64 f32"], 2);   // the prompt, two layers
  EXPECT_EQ(calls["ffn_sparse 96x64 f32"], 4);  // the token, and the two
  EXPECT_EQ(calls["matmul 128x64 f32"], 6);     // q, k and v
  EXPECT_EQ(calls["attention"], 6);
  EXPECT_EQ(calls.count("norm"), 0u) << "norms are a part of what reads them";
  const auto rows = profiler.rows();
  double sum = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    sum += rows[i].seconds;
    if (i > 0) {
      EXPECT_GE(rows[i - 1].seconds, rows[i].seconds);
    }
  }
  const auto parts = profiler.parts();
  EXPECT_NEAR(std::accumulate(parts.begin(), parts.end(), 0.0), sum, 1e-9);
  for (const Part p : {Part::attention, Part::ffn, Part::head, Part::other}) EXPECT_GT(of(parts, p), 0) << to_string(p);
  for (const Part p : {Part::predictor, Part::wait, Part::merge}) EXPECT_EQ(of(parts, p), 0) << to_string(p);
  profiler.reset();
  EXPECT_TRUE(profiler.rows().empty());
  EXPECT_EQ(profiler.parts(), (std::array<double, engine::kParts>{}));
}

// A device that is slow in one kind of operation, and knows a time of its own.
class Clocked final : public ForwardingDevice, public DeviceClock {
 public:
  using ForwardingDevice::ForwardingDevice;
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override {
    now_ += 1;
    inner_.norm(args, x, T, out);
  }
  using ForwardingDevice::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override {
    now_ += 10;
    inner_.matmul(parts, in, T, next);
  }
  void attention(const AttentionArgs& args, int64_t T, Act out) override {
    now_ += 100;
    inner_.attention(args, T, out);
  }
  void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias, float* y,
                  const NextNorm* next) override {
    now_ += 10000;
    ForwardingDevice::ffn_sparse(shard, sparse, in, T, y_bias, y, next);
  }
  void synchronize() override { ++waits; }
  void stamp() override { stamps_.push_back(now_); }
  std::vector<double> read_stamps() override {
    std::vector<double> seconds;
    for (size_t i = 1; i < stamps_.size(); ++i) seconds.push_back(stamps_[i] - stamps_[i - 1]);
    stamps_.clear();
    return seconds;
  }
  int waits = 0;

 private:
  double now_ = 0;
  std::vector<double> stamps_;
};

TEST(ProfilingDevice, ADeviceWithAClockIsNotWaitedFor) {
  TempDir dir;
  model::Model model = model::Model::load(write_tiny_model(dir / "m.gguf"));
  const auto inner = cpu::make_reference_device();
  Clocked clocked(*inner);
  ProfilingDevice profiler(clocked);
  Engine e(model, profiler, {});
  profiler.reset();
  constexpr int kTokens = 200;  // more stamps than are kept unread
  const int waits = clocked.waits;
  for (int i = 0; i < kTokens; ++i) {
    engine::Sequence text = e.sequence();
    e.eval_greedy(text, 9);
  }
  EXPECT_EQ(clocked.waits, waits);
  const auto parts = profiler.parts();
  // Two layers: an attention between two products each, and an FFN; the head.
  EXPECT_EQ(of(parts, Part::attention), kTokens * 2 * 120.0);
  EXPECT_EQ(of(parts, Part::ffn), kTokens * 2 * 10000.0);
  EXPECT_EQ(of(parts, Part::head), kTokens * 10.0);
  EXPECT_EQ(of(parts, Part::other), 0.0);
  const std::map<std::string, int64_t> calls = calls_of(profiler);
  EXPECT_EQ(calls.at("matmul 128x64 f32"), 2 * kTokens);
  EXPECT_EQ(calls.at("ffn_sparse 96x64 f32"), 2 * kTokens);
  EXPECT_EQ(calls.at("attention"), 2 * kTokens);
  EXPECT_EQ(calls.count("norm"), 0u);
}

TEST(ProfilingDevice, ANormByItselfBelongsToWhatFollows) {
  const auto inner = cpu::make_reference_device();
  Clocked clocked(*inner);
  ProfilingDevice profiler(clocked);
  std::vector<float> x(4, 1.0f);
  const NormArgs args{.weight = {x.data(), 4}, .n = 4};
  profiler.norm(args, x.data(), 1, {x.data(), nullptr});
  profiler.quantize({x.data(), nullptr}, 1, 4);  // for a predictor
  profiler.norm(args, x.data(), 1, {x.data(), nullptr});
  profiler.norm(args, x.data(), 1, {x.data(), nullptr});
  int32_t best = 0;
  profiler.argmax(x.data(), 4, 1, &best);
  const auto parts = profiler.parts();
  EXPECT_EQ(of(parts, Part::predictor), 1.0);
  EXPECT_EQ(of(parts, Part::other), 2.0);
  EXPECT_EQ(calls_of(profiler).at("norm"), 3);
}

TEST(ProfilingDevice, SwitchedOffItHandsOn) {
  TempDir dir;
  model::Model model = model::Model::load(write_tiny_model(dir / "m.gguf"));
  const auto inner = cpu::make_reference_device();
  ProfilingDevice profiler(*inner);
  Engine e(model, profiler, {});
  profiler.reset();
  profiler.enable(false);
  engine::Sequence text = e.sequence();
  e.eval_greedy(text, 9);
  EXPECT_TRUE(profiler.rows().empty());
  profiler.enable(true);
  e.eval_greedy(text, 9);
  EXPECT_FALSE(profiler.rows().empty());
}

// A divided model: each side's time by itself, with the wait for the CPU apart from the neurons and from the merge.
TEST(ProfilingDevice, SplitsADividedToken) {
  // A host whose neurons take long, so that the main device waits.
  class Slow final : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias,
                    float* y, const NextNorm* next) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ForwardingDevice::ffn_sparse(shard, sparse, in, T, y_bias, y, next);
    }
  };
  TempDir dir;
  const auto path = write_tiny_model(dir / "m.gguf");
  model::Model model = model::Model::load(path), plain_model = model::Model::load(path);
  ASSERT_FALSE(model.prepare_sparse().has_value());
  engine::Placement placement;
  placement.embedding = placement.output = engine::Where::gpu;
  for (int64_t l = 0; l < model.config().n_layer; ++l) {
    engine::LayerPlacement& layer = placement.layers.emplace_back();
    layer.attention = engine::Where::gpu;
    for (int32_t id = 0; id < model.config().n_ff; id += 2) layer.gpu_bucket.push_back(id);
  }
  ThreadTeam team(1);
  const auto main = cpu::make_reference_device(), host = cpu::make_device(team), plain = cpu::make_reference_device();
  Slow slow(*host);
  ProfilingDevice main_profiler(*main), host_profiler(slow);
  Engine divided(model, main_profiler, {}, {host_profiler, placement, team}), whole(plain_model, *plain, {});
  main_profiler.reset(), host_profiler.reset();
  engine::Sequence text = divided.sequence(), other = whole.sequence();
  for (const int32_t id : {9, 3, 77}) {
    const auto expected = whole.eval(other, {&id, 1}), got = divided.eval(text, {&id, 1});
    // 96 neurons of size one, in another order; logits of some 64 terms of that.
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-3);
  }
  const auto on_main = main_profiler.parts(), on_host = host_profiler.parts();
  constexpr double kSlept = 3 * 2 * 0.005;
  EXPECT_GE(of(on_host, Part::ffn), kSlept);
  EXPECT_EQ(of(on_host, Part::attention), 0);
  EXPECT_GT(of(on_main, Part::wait), kSlept / 2);
  EXPECT_LT(of(on_main, Part::merge), of(on_main, Part::wait));
  for (const Part p : {Part::attention, Part::hand_over, Part::ffn, Part::merge, Part::head}) {
    EXPECT_GT(of(on_main, p), 0) << to_string(p);
  }
  std::map<std::string, int64_t> calls = calls_of(main_profiler);
  EXPECT_EQ(calls["wait for the CPU"], 6);
  EXPECT_EQ(calls["merge"], 6);
  EXPECT_EQ(calls["ffn_sparse 48x64 f32"], 6);
}

}  // namespace
}  // namespace hearth::test
