// Mixtures of experts of the GPU device against the reference: routers, and experts of every type.
#include <fmt/format.h>

#include <numeric>
#include <optional>

#include "core/thread_team.h"
#include "twin_ffn.h"

namespace hearth::test {
namespace {

class GpuExpertsTest : public GpuFfnTest {
 protected:
  static ExpertFfn& experts_of(int side) { return *device(side).expert_ffn(); }
};

// The choice of T tokens on both devices.
struct TwinChoice {
  TwinChoice(Device& ref, Device& gpu, int64_t T, int64_t n)
      : n_named(n),
        ids(ref, gpu, std::vector<int32_t>(static_cast<size_t>(T * n), -7)),
        weights(ref, gpu, std::vector<float>(static_cast<size_t>(T * n), kNan)) {}
  ExpertChoice on(int s, int64_t t = 0) const {
    return {ids.on(s) + t * n_named, weights.on(s) + t * n_named, n_named};
  }
  int64_t n_named;
  Twin<int32_t> ids;
  Twin<float> weights;
};

TEST_F(GpuExpertsTest, RoutersChooseAsTheReferenceDoes) {
  std::mt19937 rng(1);
  const int64_t n_embd = 96;
  for (const Gating gating : {Gating::softmax, Gating::sigmoid, Gating::selected_softmax}) {
    for (const bool corrected : {false, true}) {
      for (const int64_t T : {1, 5, 8, 50}) {
        for (const auto& [n, used, groups, groups_used, best, normalize, shared] :
             {std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool>{7, 1, 1, 1, 2, false, false},
              {60, 4, 1, 1, 2, true, true},
              {64, 8, 8, 3, 2, true, false},
              {64, 6, 32, 4, 2, false, true},
              {160, 6, 8, 3, 1, false, true},  // DeepSeek-V2
              {15, 4, 5, 2, 1, true, false},
              {33, 33, 1, 1, 2, true, false}}) {
          SCOPED_TRACE(fmt::format("gating {} corrected {} T {} of {}", static_cast<int>(gating), corrected, T, n));
          const TwinAct in = make_input(rng, T, n_embd);
          const TwinMatrix w(*ref_, *gpu_, rng, DType::f32, n, n_embd, 0.3f);
          const TwinMatrix gate(*ref_, *gpu_, rng, DType::f32, 1, n_embd, 0.3f);
          const Twin<float> bias(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n), 0.5f));
          const Twin<float> correction(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(n), 0.2f));
          TwinChoice choice(*ref_, *gpu_, T, used + (shared ? 1 : 0));
          for (const int s : {kRef, kGpu}) {
            Router r;
            r.routing = {gating, n, used, normalize, 2.5f, groups, groups_used, best};
            r.w = w.on(s), r.bias = {bias.on(s), n}, r.shared = shared;
            if (corrected) r.correction = {correction.on(s), n};
            if (shared && normalize) r.shared_gate = gate.on(s);
            experts_of(s).route(r, in.on(s), T, choice.on(s));
          }
          EXPECT_EQ(choice.ids.read(kGpu), choice.ids.read(kRef));
          EXPECT_LE(relative_error(choice.weights.read(kGpu), choice.weights.read(kRef)), 1e-5);
        }
      }
    }
  }
}

TEST_F(GpuExpertsTest, NaNInARouterChoosesTheFirstExperts) {
  std::mt19937 rng(2);
  const int64_t T = 3, n_embd = 64;
  std::vector<float> x = random_normal(rng, static_cast<size_t>(T * n_embd));
  x[static_cast<size_t>(n_embd) + 5] = kNan;
  const TwinAct in(*ref_, *gpu_, T, n_embd, x);
  const TwinMatrix w(*ref_, *gpu_, rng, DType::f32, 16, n_embd);
  TwinChoice choice(*ref_, *gpu_, T, 3);
  for (const int s : {kRef, kGpu}) {
    Router r;
    r.routing = {.n_expert = 16, .n_used = 3}, r.w = w.on(s);
    experts_of(s).route(r, in.on(s), T, choice.on(s));
  }
  EXPECT_EQ(choice.ids.read(kGpu), choice.ids.read(kRef));
  const std::vector<float> weights = choice.weights.read(kGpu);
  for (size_t i = 0; i < weights.size(); ++i) EXPECT_EQ(std::isnan(weights[i]), i / 3 == 1) << i;
}

struct MixtureCase {
  DType gate, down;
  int64_t n = 96, n_embd = 160, n_expert = 12, n_used = 3;
  std::optional<DType> shared = std::nullopt;  // type of a shared expert's matrices, of twice as many neurons
  bool gated = true, biased = false;
  Activation act = Activation::silu;
  int64_t keep = 1;  // one of so many experts is absent; 1: none is
  float threshold = 0;
  std::string name() const {
    return fmt::format("{} {} {} x {}, {} of {}{}{}{}{}", traits(gate).name, traits(down).name, n, n_embd, n_used,
                       n_expert, shared ? ", shared" : "", gated ? "" : ", ungated", biased ? ", biased" : "",
                       threshold > 0 ? fmt::format(", threshold {}", threshold) : "");
  }
};

// Experts with random weights, and a choice of T tokens among them.
struct TwinMixture {
  TwinMixture(Device& ref, Device& gpu, std::mt19937& rng, const MixtureCase& c, int64_t T)
      : choice(ref, gpu, T, c.n_used + (c.shared ? 1 : 0)),
        has_shared(c.shared.has_value()),
        threshold(c.threshold),
        table(nullptr) {
    const int64_t n_all = c.n_expert + (c.shared ? 1 : 0);
    for (int64_t e = 0; e < n_all; ++e) {
      const bool is_shared = e == c.n_expert;
      const int64_t n = is_shared ? 2 * c.n : c.n;
      const DType gate = is_shared ? *c.shared : c.gate, down = is_shared ? *c.shared : c.down;
      const auto matrix = [&](DType type, int64_t rows, int64_t cols) {
        return TwinMatrix(ref, gpu, rng, type, rows, cols, 0.1f);
      };
      const auto bias = [&](int64_t size) {
        return Twin<float>(ref, gpu, random_normal(rng, static_cast<size_t>(size), 0.1f));
      };
      matrices.push_back(std::array{matrix(gate, n, c.n_embd), matrix(gate, n, c.n_embd), matrix(down, c.n_embd, n)});
      // Half of the gates are far above a threshold, the others far below it, and not zero.
      std::vector<float> offsets = random_normal(rng, static_cast<size_t>(n), 0.1f);
      for (float& b : offsets) b = c.threshold > 0 ? (b > 0 ? 2 * c.threshold : 0.0f) : b;
      biases.push_back(std::array{Twin<float>(ref, gpu, offsets), bias(n), bias(c.n_embd)});
      for (const int s : {kRef, kGpu}) {
        Expert& x = experts[s].emplace_back();
        if (c.keep > 1 && e % c.keep == 1) continue;
        x.ffn.gate = matrices.back()[0].on(s), x.ffn.down = matrices.back()[2].on(s);
        if (c.gated) x.ffn.up = matrices.back()[1].on(s);
        x.ffn.act = c.act, x.ffn.act_threshold = 0.4f;
        if (!c.biased || is_shared) continue;
        x.ffn.gate_bias = {biases.back()[0].on(s), n}, x.down_bias = {biases.back()[2].on(s), c.n_embd};
        if (c.gated) x.ffn.up_bias = {biases.back()[1].on(s), n};
      }
    }
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::uniform_real_distribution<float> weight(0.05f, 1.0f);
    for (int64_t t = 0; t < T; ++t) {
      std::vector<int32_t> all(static_cast<size_t>(c.n_expert));
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), rng);
      all.resize(static_cast<size_t>(c.n_used));
      std::sort(all.begin(), all.end());
      if (c.shared) all.push_back(static_cast<int32_t>(c.n_expert));
      ids.insert(ids.end(), all.begin(), all.end());
      for (size_t i = 0; i < all.size(); ++i) weights.push_back(weight(rng));
    }
    for (Device* d : {&ref, &gpu}) {
      const int s = d == &ref ? kRef : kGpu;
      d->upload(choice.ids.on(s), ids.data(), ids.size() * 4),
          d->upload(choice.weights.on(s), weights.data(), ids.size() * 4);
    }
    table = gpu.expert_ffn()->adopt_experts({experts[kGpu], has_shared});
  }
  ExpertSet on(int s) const {
    ExpertSet set(experts[s], has_shared, s == kGpu ? table : nullptr);
    set.threshold = threshold;
    return set;
  }
  std::vector<std::array<TwinMatrix, 3>> matrices;
  std::vector<std::array<Twin<float>, 3>> biases;
  std::vector<Expert> experts[2];
  TwinChoice choice;
  bool has_shared;
  float threshold;
  const void* table;
};

std::vector<MixtureCase> mixture_cases() {
  std::vector<MixtureCase> all;
  for (const DType type : gpu_types()) {
    const int64_t n = std::max<int64_t>(whole_blocks(type, 96), 96), n_embd = whole_blocks(type, 160);
    all.push_back({.gate = type, .down = type, .n = n, .n_embd = n_embd, .keep = 3});
  }
  all.push_back({.gate = DType::q4_k, .down = DType::q6_k, .n = 768, .n_embd = 512, .n_expert = 64, .n_used = 8});
  all.push_back({.gate = DType::q4_k, .down = DType::q5_0, .n = 96, .n_embd = 256, .shared = DType::q8_0, .keep = 2});
  all.push_back({.gate = DType::f16, .down = DType::f16, .shared = DType::f16, .biased = true, .keep = 5});
  all.push_back({.gate = DType::mxfp4,
                 .down = DType::mxfp4,
                 .n = 160,
                 .n_embd = 96,
                 .biased = true,
                 .act = Activation::clamped_silu});
  all.push_back({.gate = DType::q8_0, .down = DType::q4_0, .gated = false, .biased = true, .act = Activation::relu2});
  all.push_back({.gate = DType::f32, .down = DType::f32, .shared = DType::f32});
  all.push_back({.gate = DType::q4_0, .down = DType::q4_0, .n = 1024, .n_embd = 2304, .n_expert = 4, .n_used = 2});
  return all;
}

TEST_F(GpuExpertsTest, EveryTypeAndNumberOfTokens) {
  std::mt19937 rng(3);
  for (const MixtureCase& c : mixture_cases()) {
    for (const int64_t T : {1, 3, 8, 9, 70, 190}) {
      SCOPED_TRACE(fmt::format("{}, T {}", c.name(), T));
      const TwinAct in = make_input(rng, T, c.n_embd);
      const TwinMixture m(*ref_, *gpu_, rng, c, T);
      Twin<float> y(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(T * c.n_embd), 0.1f));
      run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
        d.expert_ffn()->ffn_experts(m.on(s), m.choice.on(s), in.on(s), T, y.on(s));
      });
      EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), std::max(bound(c.gate, T), bound(c.down, T)));
    }
  }
}

TEST_F(GpuExpertsTest, NeuronsBelowAThresholdAddNothing) {
  std::mt19937 rng(6);
  for (const auto& [type, act] : {std::pair(DType::f32, Activation::silu), std::pair(DType::q4_k, Activation::silu),
                                  std::pair(DType::f16, Activation::gelu), std::pair(DType::q8_0, Activation::silu)}) {
    for (const bool gated : {true, false}) {
      for (const int64_t T : {1, 3, 8, 40}) {
        const MixtureCase c{.gate = type,
                            .down = type,
                            .n = whole_blocks(type, 96),
                            .n_embd = whole_blocks(type, 160),
                            .gated = gated,
                            .biased = true,
                            .act = act,
                            .keep = 3,
                            .threshold = 10};
        SCOPED_TRACE(fmt::format("{}, T {}", c.name(), T));
        const TwinAct in = make_input(rng, T, c.n_embd);
        const TwinMixture m(*ref_, *gpu_, rng, c, T);
        const std::vector<float> initial = random_normal(rng, static_cast<size_t>(T * c.n_embd), 0.1f);
        Twin<float> y(*ref_, *gpu_, initial), all(*ref_, *gpu_, initial);
        run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
          d.expert_ffn()->ffn_experts(m.on(s), m.choice.on(s), in.on(s), T, y.on(s));
        });
        EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), bound(type, T));
        ExpertSet every = m.on(kRef);
        every.threshold = 0;
        experts_of(kRef).ffn_experts(every, m.choice.on(kRef), in.on(kRef), T, all.on(kRef));
        EXPECT_GT(relative_error(all.read(kRef), y.read(kRef)), 1e-3) << "the threshold does nothing";
      }
    }
  }
}

// Every second expert comes from host memory, in the file's rows or in the CPU's panels, to slots in turn.
TEST_F(GpuExpertsTest, ExpertsVisitFromHostMemory) {
  std::mt19937 rng(5);
  ThreadTeam team(2);
  const auto host_device = cpu::make_device(team);
  ColdRows& slots = *gpu_->cold_rows();
  slots.open_staging(2, size_t{64} << 20);
  int slot = 0;
  for (const bool packed : {false, true}) {
    for (const MixtureCase& c : mixture_cases()) {
      SCOPED_TRACE(fmt::format("{}{}", c.name(), packed ? ", packed" : ""));
      const int64_t T = 70;
      const TwinAct in = make_input(rng, T, c.n_embd);
      const TwinMixture m(*ref_, *gpu_, rng, c, T);
      std::vector<Expert> host = m.experts[kRef], visitors(host.size());
      std::vector<int32_t> ids;
      std::vector<std::vector<std::byte>> panels;
      for (size_t id = 0; id < host.size(); id += 2) {
        if (!host[id]) continue;
        visitors[id] = host[id];
        ids.push_back(static_cast<int32_t>(id));
        for (Matrix* w : {&host[id].ffn.gate, &host[id].ffn.up, &host[id].ffn.down}) {
          const size_t bytes = *w && packed ? host_device->packed_bytes(*w) : 0;
          if (bytes > 0) *w = host_device->pack(*w, panels.emplace_back(bytes).data());
        }
      }
      const ExpertSet all(host, m.has_shared);
      ASSERT_LE(slots.staged_bytes(all, ids), size_t{64} << 20);
      const ExpertSet staged = slots.stage(slot, all, ids);
      Twin<float> y(*ref_, *gpu_, random_normal(rng, static_cast<size_t>(T * c.n_embd), 0.1f));
      run_twins<float>(*ref_, *gpu_, {&y}, [&](int s, Device& d) {
        if (s == kGpu) slots.acquire(slot);
        d.expert_ffn()->ffn_experts(s == kGpu ? staged : ExpertSet(visitors, m.has_shared), m.choice.on(s), in.on(s), T,
                                    y.on(s));
        if (s == kGpu) slots.release(slot);
      });
      EXPECT_LE(relative_error(y.read(kGpu), y.read(kRef)), std::max(bound(c.gate, T), bound(c.down, T)));
      slot = 1 - slot;
    }
  }
}

TEST_F(GpuExpertsTest, ATokenHasTheSameBitsAmongOthers) {
  std::mt19937 rng(4);
  for (const MixtureCase& c : mixture_cases()) {
    SCOPED_TRACE(c.name());
    const int64_t T = kFewTokens, n = c.n_embd;
    const TwinAct in = make_input(rng, T, n);
    const TwinMixture m(*ref_, *gpu_, rng, c, T);
    const std::vector<float> initial = random_normal(rng, static_cast<size_t>(T * n));
    const Twin<float> together(*ref_, *gpu_, initial), alone(*ref_, *gpu_, initial);
    experts_of(kGpu).ffn_experts(m.on(kGpu), m.choice.on(kGpu), in.on(kGpu), T, together.on(kGpu));
    for (int64_t t = 0; t < T; ++t) {
      experts_of(kGpu).ffn_experts(m.on(kGpu), m.choice.on(kGpu, t), in.on(kGpu, t), 1, alone.on(kGpu) + t * n);
    }
    EXPECT_EQ(together.read(kGpu), alone.read(kGpu));
  }
}

}  // namespace
}  // namespace hearth::test
