// A model divided between a main device and the CPU gives the results of the undivided one, however it is divided. The
// oracle device stands in for the GPU, in a thread of its own.
#include <gtest/gtest.h>

#include <random>

#include "core/error.h"
#include "engine/engine.h"
#include "support/random.h"
#include "support/zoo.h"

namespace hearth {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::LayerPlacement;
using engine::Placement;
using engine::Sparsity;
using engine::Where;

// How a test divides: the share of hot neurons in a layer, and who has the rest.
struct Division {
  std::string name;
  std::vector<double> hot_share;                // by layer, repeated
  std::vector<Where> attention = {Where::gpu};  // by layer, repeated
  Where embedding = Where::gpu, output = Where::gpu;
};

const std::vector<Division>& divisions() {
  static const std::vector<Division> all = {
      {"nothing_hot", {0.0}},
      {"everything_hot", {1.0}},
      {"a_third_hot", {0.37}},
      {"mixed", {0.0, 0.61, 1.0}, {Where::gpu, Where::cpu}, Where::cpu, Where::gpu},
      {"all_on_cpu_but_head", {0.0}, {Where::cpu}, Where::cpu, Where::gpu},
      {"attention_on_cpu", {0.5}, {Where::cpu}, Where::gpu, Where::cpu},
      {"ends_on_cpu", {1.0}, {Where::gpu}, Where::cpu, Where::cpu},
  };
  return all;
}

Placement placement_of(const Division& d, const model::Config& c, std::mt19937& rng) {
  Placement p;
  p.embedding = d.embedding, p.output = d.output;
  for (int64_t l = 0; l < c.n_layer; ++l) {
    LayerPlacement& layer = p.layers.emplace_back();
    layer.attention = d.attention[static_cast<size_t>(l) % d.attention.size()];
    const double share = d.hot_share[static_cast<size_t>(l) % d.hot_share.size()];
    for (int32_t id = 0; id < c.n_ff; ++id) {
      if (std::uniform_real_distribution<>(0, 1)(rng) < share) layer.gpu_bucket.push_back(id);
    }
  }
  return p;
}

struct Case {
  test::ZooModel model;
  DType type;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.model.name << "/" << traits(c.type).name; }
};

class Divided : public testing::TestWithParam<Case> {};

TEST_P(Divided, EqualsTheUndividedModel) {
  const auto path = test::gguf_of(GetParam().model, GetParam().type);
  auto plain = model::Model::load(path);
  auto divided = model::Model::load(path);
  ASSERT_FALSE(divided.prepare_sparse().has_value());
  const model::Config& c = plain.config();
  std::mt19937 rng(7);
  std::vector<int32_t> ids(23);
  for (int32_t& id : ids) id = static_cast<int32_t>(test::random_int(rng, 0, c.n_vocab - 1));
  ThreadTeam team(2);
  const double noise =
      is_quantized(GetParam().type) ? test::quantization_noise(c) : 0x1p-12 * static_cast<double>(c.n_layer);

  for (const Sparsity sparsity : {Sparsity::off, Sparsity::auto_}) {
    const EngineOptions options{.n_batch = 16, .sparsity = sparsity};
    const auto cpu = cpu::make_device(team);
    Engine whole(plain, *cpu, options);
    for (const Division& d : divisions()) {
      SCOPED_TRACE(d.name + (sparsity == Sparsity::off ? ", dense" : ", sparse"));
      const Placement placement = placement_of(d, c, rng);
      const auto main = cpu::make_reference_device();
      const auto host = cpu::make_device(team);
      Engine two(divided, *main, options, {*host, placement});
      whole.truncate(0);
      const auto compare = [&](std::span<const int32_t> next) {
        const auto expected = whole.eval(next);
        const auto got = two.eval(next);
        ASSERT_LE(test::worst_difference(got, expected), 5 * noise * test::rms(expected));
      };
      compare(std::span(ids).first(18));  // a prompt, in two batches
      for (size_t i = 18; i < ids.size(); ++i) compare(std::span(ids).subspan(i, 1));
      if (two.sparsity() != Sparsity::exact) continue;
      if (d.name == "nothing_hot") {
        EXPECT_DOUBLE_EQ(two.density().host_share(), 1.0);
      } else if (d.name == "everything_hot") {
        EXPECT_DOUBLE_EQ(two.density().host_share(), 0.0);
      }
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& m : test::zoo()) {
    if (!m.name.starts_with("own_")) continue;
    all.push_back({m, DType::f16});
    if (m.name.find("silu") == std::string::npos)
      all.push_back({m, DType::q8_0});  // quantised silu files stay untransposed
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Zoo, Divided, testing::ValuesIn(cases()),
                         [](const auto& p) { return p.param.model.name + "_" + traits(p.param.type).name; });

TEST(Mailbox, ManyHandOffsInOrder) {
  HostMailbox box(64, 8);
  constexpr int rounds = 2000;
  std::thread device([&] {
    std::vector<float> x(64);
    for (int r = 0; r < rounds; ++r) {
      for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(r) + static_cast<float>(i);
      const std::vector<int32_t> ids(static_cast<size_t>(r % 9), r);
      box.post(x.data(), 64, ids);
      box.collect(x.data(), 64);
      for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], 3 * (static_cast<float>(r) + static_cast<float>(i)));
    }
  });
  for (int r = 0; r < rounds; ++r) {
    const MailboxRequest request = box.wait_request();
    ASSERT_EQ(*request.n_ids, r % 9);
    for (int i = 0; i < *request.n_ids; ++i) EXPECT_EQ(request.ids[i], r);
    for (int i = 0; i < 64; ++i) box.answer_buffer()[i] = 2 * request.x[i];
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
