#pragma once
// Mixtures of experts on the GPU (core/experts.h): launchers, and what their kernels share.
#include "core/experts.h"
#include "cuda/kernels.cuh"

namespace hearth::cuda {

// Where an expert's matrices are; all null where the GPU does not hold it.
struct ExpertEntry {
  const std::byte *gate, *up, *down;
  const float *gate_bias, *up_bias, *down_bias;
};
static_assert(sizeof(ExpertEntry) <= kExpertTableBytes);
inline ExpertEntry entry_of(const Expert& e) {  // in this GPU's memory
  const auto bytes = [](const Matrix& m) { return static_cast<const std::byte*>(m.data); };
  return {bytes(e.ffn.gate),    bytes(e.ffn.up),    bytes(e.ffn.down),
          e.ffn.gate_bias.data, e.ffn.up_bias.data, e.down_bias.data};
}

// A run of slots of each token's choice, whose experts have one shape: their types and sizes. Experts' ids ascend, so
// that the shared expert, which may have a shape of its own, has every token's last slot.
struct ExpertRun {
  const ExpertEntry* table = nullptr;  // by id, in device memory
  FfnShard shape;                      // of any of them; data and biases are not looked at
  const int32_t* ids = nullptr;        // [T][n_named] of the choice
  const float* weights = nullptr;      // the same
  int n_named = 0, first_slot = 0, n_slots = 0;
  int n_experts = 0;       // of the table
  float threshold = 0.0f;  // neurons whose |act(gate)| is at most this are zero
};

// A neuron's value from act(gate) and the factor beside it.
__device__ __forceinline__ float value_above(float threshold, float gate, float up) {
  return fabsf(gate) <= threshold ? 0.0f : gate * up;  // no numbers stay none
}

// --- experts_route.cu ---
// From logits [T][n_expert], and, unless null, those of the shared expert [T], to the choice of each token.
void choose(const Gpu& gpu, const Router& router, const float* logits, const float* shared, int64_t T,
            const ExpertChoice& choice);

// Few tokens: the products with w too, and the norm of the input on the way. x: the input where there is no norm.
struct RouteScratch {
  float* logits = nullptr;      // [T][n_expert + 1]
  unsigned* arrived = nullptr;  // [T], zero before and after
};
bool route_fits(const Router& router);
void route(const Gpu& gpu, const Router& router, const InputNorm* norm, const float* x, int64_t T,
           const RouteScratch& scratch, const ExpertChoice& choice);

// --- experts_few.cu: few tokens ---
// hidden [T][n_slots * n]: the values of the neurons of each token's experts, those of an absent expert undefined.
void experts_gate_up(const Gpu& gpu, const ExpertRun& run, Act in, int64_t T, Act hidden);
// y[t] += sum of weight * (down hidden + bias).
void experts_down(const Gpu& gpu, const ExpertRun& run, Act hidden, int64_t T, float* y);

// --- experts_batch.cu: many tokens, whose (token, slot) pairs are grouped by expert ---
constexpr int kTileTokens = 64;  // pairs of one expert that share what is read of its weights
// Scratch for at most n_pairs pairs.
struct PairGroups {
  int32_t* position = nullptr;  // [pairs] of pair t * n_slots + slot among those that are grouped; -1: expert absent
  int32_t* pair = nullptr;      // [positions]
  int4* tiles = nullptr;        // [n_tiles] expert, first position, positions
  int32_t* n_tiles = nullptr;
  static int64_t most_tiles(int64_t n_pairs, int64_t n_experts) { return n_pairs / kTileTokens + n_experts; }
  static int64_t words(int64_t n_pairs, int64_t n_experts) {
    return 2 * n_pairs + 4 * most_tiles(n_pairs, n_experts) + 4;
  }
  static PairGroups at(int32_t* memory, int64_t n_pairs, int64_t n_experts);
};
void group_pairs(const Gpu& gpu, const ExpertRun& run, int64_t T, const PairGroups& groups);
// hidden [positions][n], from x [T][n_embd], both f16.
void experts_gate_up(const Gpu& gpu, const ExpertRun& run, const PairGroups& groups, const f16_t* x, int64_t T,
                     f16_t* hidden);
// sums [positions][n_embd], then y[t] += sum of weight * (sum + bias).
void experts_down(const Gpu& gpu, const ExpertRun& run, const PairGroups& groups, const f16_t* hidden, int64_t T,
                  float* sums, float* y);

}  // namespace hearth::cuda
