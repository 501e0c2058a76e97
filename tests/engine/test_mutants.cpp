// The bounds of whole-model tests catch defects: each of these devices computes with a GPU's or the CPU's roundings and
// one thing wrong. And they pass what is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/engine.h"
#include "support/conditioning.h"
#include "support/zoo.h"

namespace hearth {
namespace {

enum class Defect { none, rope_position, attention_scale, dropped_neuron, norm_scale, missed_bias, weight_block };

// The right arithmetic, nearest rounding, float noise; and the defect.
class Mutant final : public test::NoisyDevice {
 public:
  Mutant(const test::Arithmetic& arithmetic, Defect defect)
      : NoisyDevice(arithmetic, {test::Rounding::nearest, 0x1p-22}), defect_(defect) {}

  using NoisyDevice::adopt;
  // The first block of 32 weights of every matrix but the embedding: its scale 1 % too large.
  Matrix adopt(const Matrix& host) override {
    const Matrix m = NoisyDevice::adopt(host);
    if (defect_ == Defect::weight_block && ++matrices_ > 1) {  // the first is the embedding
      auto* w = const_cast<float*>(static_cast<const float*>(m.data));
      for (int64_t i = 0; i < 32; ++i) w[i] *= 1.01f;
    }
    return m;
  }

  // The last token of every batch is rotated as its successor would be, or 1/sqrt(d) is off by 1 %.
  void attention(const AttentionArgs& args, int64_t T, Act out) override {
    AttentionArgs a = args;
    if (defect_ == Defect::attention_scale) a.scale *= 1.01f;
    if (defect_ == Defect::rope_position && a.rope != RopeKind::none) {
      head_norm(a.q_norm, a.norm_eps, T * a.n_head, a.q), a.q_norm = {};
      head_norm(a.k_norm, a.norm_eps, T * a.n_head_kv, a.k), a.k_norm = {};
      for (int64_t h = 0; h < a.n_head; ++h) rotate_by_one(a, a.q + ((T - 1) * a.n_head + h) * a.head_dim);
      for (int64_t h = 0; h < a.n_head_kv; ++h) rotate_by_one(a, a.k + ((T - 1) * a.n_head_kv + h) * a.head_dim);
    }
    NoisyDevice::attention(a, T, out);
  }
  // One channel of every norm, 1 % off.
  void norm(const NormArgs& args, const float* x, int64_t T, Act out) override {
    NoisyDevice::norm(args, x, T, out);
    if (defect_ != Defect::norm_scale) return;
    for (int64_t t = 0; t < T; ++t) out.x[t * args.n] *= 1.01f;
  }
  // Biases of q, k and v.
  using NoisyDevice::matmul;
  void matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm* next) override {
    std::vector<MatmulPart> edited(parts.begin(), parts.end());
    if (defect_ == Defect::missed_bias && parts.size() == 3) {
      for (MatmulPart& p : edited) p.bias = {};
    }
    NoisyDevice::matmul(edited, in, T, next);
  }

 protected:
  // One neuron of each layer never fires: the one with the largest value in the batch at hand would be missed first, so
  // it is a middling one, the median of those that fire.
  void edit_values(float* values, int64_t T, int64_t n) override {
    if (defect_ != Defect::dropped_neuron) return;
    std::vector<std::pair<float, int64_t>> firing;
    for (int64_t k = 0; k < n; ++k) {
      if (values[(T - 1) * n + k] != 0) firing.emplace_back(std::fabs(values[(T - 1) * n + k]), k);
    }
    if (firing.empty()) return;
    std::sort(firing.begin(), firing.end());
    for (int64_t t = 0; t < T; ++t) values[t * n + firing[firing.size() / 2].second] = 0;
  }

 private:
  // What attention() does to heads before their rotation: x [n][weight.n].
  void head_norm(Vector weight, float eps, int64_t n, float* x) {
    if (weight) oracle().norm({NormKind::rms, weight, {}, eps, weight.n}, x, n, {x, nullptr});
  }
  // By one position more than attention() will.
  static void rotate_by_one(const AttentionArgs& a, float* head) {
    const int64_t half = a.n_rot / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float c = std::cos(a.inv_freq[i]), s = std::sin(a.inv_freq[i]);
      float& first = a.rope == RopeKind::neox ? head[i] : head[2 * i];
      float& second = a.rope == RopeKind::neox ? head[i + half] : head[2 * i + 1];
      const float x = first, y = second;
      first = x * c - y * s, second = x * s + y * c;
    }
  }

  Defect defect_;
  int matrices_ = 0;
};

struct Case {
  test::ZooModel model;
  DType type;
  bool gpu;
  friend void PrintTo(const Case& c, std::ostream* out) {
    *out << c.model.name << "/" << traits(c.type).name << (c.gpu ? "/gpu" : "/cpu");
  }
};

class Mutants : public testing::TestWithParam<Case> {
 protected:
  // Shares of the limits: above 1 is caught.
  struct Caught {
    double worst, rms, tight;
    bool any() const { return worst > 1 || rms > 1 || tight > 1; }
  };
  Caught judge(Defect defect) {
    auto model = model::Model::load(path_);
    Mutant device(arithmetic(), defect);
    Engine e(model, device, {});
    const auto s = limits_->shares(test::run(e, script_));
    return {s.worst, s.rms, tight_->share([&](const test::Script& t) { return test::run(e, t); })};
  }
  const test::Arithmetic& arithmetic() const { return GetParam().gpu ? test::kGpuArithmetic : test::kCpuArithmetic; }
  void SetUp() override {
    path_ = test::gguf_of(GetParam().model, GetParam().type);
    config_ = model::Model::load(path_).config();
    script_ = test::prompt_then_decode(test::random_ids(config_, 30, 3), 13);
    limits_.emplace(path_, script_, arithmetic(), EngineOptions{});
    tight_.emplace(path_, arithmetic(), EngineOptions{}, std::vector<int64_t>{GetParam().gpu ? 9 : 2, 1});
  }

  using Engine = engine::Engine;
  using EngineOptions = engine::EngineOptions;
  std::filesystem::path path_;
  model::Config config_;
  test::Script script_;
  std::optional<test::ErrorLimits> limits_;
  std::optional<test::TightLimit> tight_;
};

TEST_P(Mutants, EveryDefectIsCaughtAndTheRightOnePasses) {
  const Caught right = judge(Defect::none);
  EXPECT_FALSE(right.any()) << right.worst << " " << right.rms << " " << right.tight;
  struct Row {
    Defect defect;
    const char* name;
    bool applies;
  };
  const bool biased = GetParam().model.name.find("qwen2") != std::string::npos ||
                      GetParam().model.name.find("opt") != std::string::npos;
  const Row rows[] = {{Defect::rope_position, "rope position", config_.rope != RopeKind::none},
                      {Defect::attention_scale, "attention scale", true},
                      {Defect::dropped_neuron, "dropped neuron", true},
                      {Defect::norm_scale, "norm channel", true},
                      {Defect::missed_bias, "missed bias", biased},
                      {Defect::weight_block, "weight block", true}};
  for (const Row& row : rows) {
    if (!row.applies) continue;
    const Caught caught = judge(row.defect);
    EXPECT_TRUE(caught.any()) << row.name;
    std::printf("    %-16s shares of the limits: step %.3g, rms %.3g, short sequences %.3g\n", row.name, caught.worst,
                caught.rms, caught.tight);
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& m : test::zoo()) {
    if (!m.name.starts_with("own_")) continue;
    for (const DType t : {DType::f16, DType::q8_0}) {
      for (const bool gpu : {false, true}) all.push_back({m, t, gpu});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Zoo, Mutants, testing::ValuesIn(cases()), [](const auto& p) {
  return p.param.model.name + "_" + traits(p.param.type).name + (p.param.gpu ? "_gpu" : "_cpu");
});

// Exact arithmetic and the device's own roundings, in the terms of the oracle itself: the decorator adds nothing else.
TEST(NoisyDevice, WithoutNoiseItIsTheOracle) {
  for (const DType type : {DType::f32, DType::q8_0}) {
    const auto path = test::gguf_of(test::zoo().front(), type);
    auto a = model::Model::load(path), b = model::Model::load(path);
    test::NoisyDevice noisy(test::kCpuArithmetic, {test::Rounding::nearest});
    const auto oracle = cpu::make_reference_device();
    engine::Engine e(a, noisy, {}), f(b, *oracle, {});
    const test::Script script{test::random_ids(a.config(), 4, 8), {4}};
    EXPECT_LT(test::deviation(test::run(e, script), test::run(f, script)).rms, 1e-6) << traits(type).name;
  }
}

}  // namespace
}  // namespace hearth
