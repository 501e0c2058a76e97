// Mixtures of experts on the CUDA device (core/experts.h).
#include <algorithm>
#include <array>
#include <vector>

#include "cuda/device.cuh"
#include "cuda/experts.cuh"

namespace hearth::cuda {
namespace {

// Any expert of [first, first + count) that is here, or null.
const Expert* some_of(std::span<const Expert> experts, size_t first, size_t count) {
  const auto part = experts.subspan(first, count);
  const auto here = std::find_if(part.begin(), part.end(), [](const Expert& e) { return static_cast<bool>(e); });
  return here == part.end() ? nullptr : &*here;
}

void check(const Expert& e, const Expert& other) {
  const FfnShard& s = e.ffn;
  if (!gpu_computes(e)) {
    fail(
        "the GPU computes experts of whole blocks of 32 neurons, whose gate and up are of one type and rows of whole "
        "16 bytes; found {} neurons of {}, {} and {} weights; run with --device cpu",
        s.n(), traits(s.gate.type).name, traits(s.up.type).name, s.gate.cols);
  }
  if (!same_shape(s, other.ffn)) {
    fail(
        "the GPU computes layers whose experts have one type and size, found {} and {} neurons of {} and {}; run with "
        "--device cpu",
        s.n(), other.ffn.n(), traits(s.gate.type).name, traits(other.ffn.gate.type).name);
  }
}

}  // namespace

const void* CudaDevice::adopt_experts(const ExpertSet& set) {
  const size_t n = set.experts.size(), routed = n - (set.shared ? 1 : 0);
  HEARTH_CHECK(n > 0 && n <= static_cast<size_t>(kMostExperts) + 1, "{} experts", n);
  std::vector<ExpertEntry> table(n);
  const Expert* const some = some_of(set.experts, 0, routed);
  for (size_t id = 0; id < n; ++id) {
    const Expert& e = set.experts[id];
    if (!e) continue;
    check(e, id < routed ? *some : e);
    table[id] = entry_of(e);
  }
  void* const data = weights_->allocate(n * sizeof(ExpertEntry));
  upload(data, table.data(), n * sizeof(ExpertEntry));
  return data;
}

void CudaDevice::route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) {
  check_reserved(T);
  const int64_t n = router.routing.n_expert;
  HEARTH_CHECK(n < limits_.n_experts + (router.shared ? 0 : 1), "a router of {} experts, reserved for {}", n,
               limits_.n_experts);
  if (T <= kFewTokens && route_fits(router)) {
    const auto norm = norm_on_the_way(in, router.w, T, {});
    if (!norm) norm_first(in, T);
    left_ = {};
    return cuda::route(gpu_, router, norm ? &*norm : nullptr, in.act.x, T,
                       {scratch_.expert_logits, scratch_.expert_arrived}, choice);
  }
  float* const logits = scratch_.expert_logits;
  float* const shared = router.shared_gate ? logits + T * n : nullptr;
  const std::array parts = {MatmulPart{.w = router.w, .bias = router.bias, .y = logits},
                            MatmulPart{.w = router.shared_gate, .y = shared}};
  matmul(std::span(parts).first(router.shared_gate ? 2 : 1), in, T, nullptr);
  choose(gpu_, router, logits, shared, T, choice);
}

void CudaDevice::ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) {
  check_reserved(T);
  norm_first(in, T);
  left_ = {};
  const size_t n = set.experts.size(), routed = n - (set.shared ? 1 : 0);
  const auto n_named = static_cast<int>(choice.n_named);
  const Expert* const some = some_of(set.experts, 0, routed);
  const Expert* const shared = set.shared && set.experts.back() ? &set.experts.back() : nullptr;
  ExpertRun run{static_cast<const ExpertEntry*>(set.table),
                {},
                choice.ids,
                choice.weights,
                n_named,
                0,
                n_named - (set.shared ? 1 : 0),
                static_cast<int>(n),
                set.threshold};
  const bool together = some != nullptr && shared != nullptr && same_shape(some->ffn, shared->ffn);
  if (together) run.n_slots = n_named;
  if (some != nullptr) run.shape = some->ffn, run_experts(run, in.act, T, y);
  if (shared == nullptr || together) return;
  run.first_slot = n_named - 1, run.n_slots = 1, run.shape = shared->ffn;
  run_experts(run, in.act, T, y);
}

void CudaDevice::run_experts(ExpertRun run, Act in, int64_t T, float* y) {
  const int64_t n_embd = run.shape.gate.cols, n = run.shape.n();
  HEARTH_CHECK(n <= limits_.n_ff_expert && run.n_slots <= limits_.n_named && run.n_experts <= limits_.n_experts,
               "{} of {} experts of {} neurons, reserved for {} of {} of {}", run.n_slots, run.n_experts, n,
               limits_.n_named, limits_.n_experts, limits_.n_ff_expert);
  const auto from = [&](int64_t t) {
    ExpertRun part = run;
    part.ids += t * run.n_named, part.weights += t * run.n_named;
    return part;
  };
  // f32 weights stay f32, which tensor cores do not multiply.
  const bool few = T <= kFewTokens || run.shape.gate.type == DType::f32 || run.shape.down.type == DType::f32;
  if (few) {
    const Act hidden{scratch_.expert_values, is_quantized(run.shape.down.type) ? scratch_.expert_values_q8 : nullptr};
    for (int64_t t = 0; t < T; t += kFewTokens) {
      const int64_t count = std::min(kFewTokens, T - t);
      experts_gate_up(gpu_, from(t), act_row(in, t, n_embd), count, hidden);
      experts_down(gpu_, from(t), hidden, count, y + t * n_embd);
    }
    return;
  }
  const int64_t at_once = DeviceScratch::expert_tokens(limits_);
  auto* const x = static_cast<f16_t*>(scratch_.gemm_input);
  convert_rows(gpu_, in.x, T * n_embd, DType::f16, x);
  for (int64_t t = 0; t < T; t += at_once) {
    const int64_t count = std::min(at_once, T - t);
    const PairGroups groups = PairGroups::at(scratch_.expert_groups, count * run.n_slots, run.n_experts);
    auto* const hidden = reinterpret_cast<f16_t*>(scratch_.expert_hidden);
    group_pairs(gpu_, from(t), count, groups);
    experts_gate_up(gpu_, from(t), groups, x + t * n_embd, count, hidden);
    experts_down(gpu_, from(t), groups, hidden, count, static_cast<float*>(scratch_.gemm_workspace), y + t * n_embd);
  }
}

}  // namespace hearth::cuda
