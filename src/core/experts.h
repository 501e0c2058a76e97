#pragma once
// Mixtures of experts (Shazeer et al., arXiv 1701.06538): of many feed-forward networks a router names a few for each
// token, and a weight for each of those. A router is a predictor that names ranges of neurons; an expert is one range.
#include <cstdint>
#include <span>
#include <vector>

#include "core/ops.h"

namespace hearth {

// How a router's logits become scores.
enum class Gating {
  softmax,           // over all experts
  sigmoid,           // each by itself
  selected_softmax,  // the logits choose; weights are the softmax over the chosen ones
};

constexpr int64_t kMostExperts = 1024;    // of a layer
constexpr size_t kExpertTableBytes = 48;  // at most, of an expert, in a device's table of a layer's experts

// From logits to a choice, as llama.cpp's build_moe_ffn, DeepSeek-V2 (arXiv 2405.04434, 2.2.2) and V3 (arXiv 2412.19437,
// 2.1.2) do it: of the groups those with the largest sums of their best selecting scores stay; of their experts the
// n_used best are chosen, the one with the smaller id first where two are equal. A selecting score is score +
// correction, a weight is the score alone, divided by the sum of the chosen ones if `normalize`, times `scale`.
struct Routing {
  Gating gating = Gating::softmax;
  int64_t n_expert = 0, n_used = 0;
  bool normalize = false;
  float scale = 1.0f;
  int64_t n_groups = 1, n_groups_used = 1;  // of equally many consecutive experts
  int64_t n_best_of_group = 2;              // selecting scores whose sum ranks a group: 1 (DeepSeek-V2) or 2
};

// The router of one layer. Logits are w h + bias, in f32 of the f32 activations: w is not quantised.
struct Router {
  Routing routing;
  Matrix w;             // [n_expert][n_embd]
  Vector bias;          // [n_expert], or empty
  Vector correction;    // [n_expert], or empty
  bool shared = false;  // expert n_expert is named for every token, with weight 1, or with
  Matrix shared_gate;   // [1][n_embd]: the sigmoid of this product; or empty
  explicit operator bool() const { return static_cast<bool>(w); }
  // Experts named for each token.
  int64_t n_named() const { return routing.n_used + (shared ? 1 : 0); }
};

// The experts of T tokens, in the device's memory: token t's ids are ids[t * n_named ...], ascending and distinct, and
// their weights weights[t * n_named ...]. A token with a logit that is no number gets experts 0, 1, ... and weights that
// are no numbers, so that its results are none either.
struct ExpertChoice {
  int32_t* ids = nullptr;
  float* weights = nullptr;
  int64_t n_named = 0;  // of a token
};

// One expert: a range of neurons with a down projection of its own. With down_t its neurons can be skipped. Empty where
// its device does not hold it.
struct Expert {
  FfnShard ffn;
  Vector down_bias;  // [n_embd], or empty
  explicit operator bool() const { return static_cast<bool>(ffn.gate); }
  size_t bytes() const { return ffn.gate.bytes() + ffn.up.bytes() + ffn.down.bytes() + ffn.down_t.bytes(); }
};

// Whether GPUs have kernels for an expert: gate and up of one type, whole blocks of 32 neurons, rows of whole 16 bytes.
bool gpu_computes(const Expert& expert);

// A layer's experts by id, the shared one last. All of them have down, or all have down_t.
struct ExpertSet {
  std::span<const Expert> experts;
  bool shared = false;          // the last one is named for every token
  const void* table = nullptr;  // what ExpertFfn::adopt_experts() made of them
  // A neuron whose |act(gate)| is at most this adds nothing, whichever device has its expert.
  float threshold = 0.0f;
  // Out [T], or null: every neuron is computed. Otherwise T is kFewTokens at most, and devices that take down_t evaluate
  // the gates of experts that have it, then up and down of the active neurons, those above the threshold, and say how
  // many of each token's are.
  int32_t* n_active = nullptr;
  ExpertSet(std::span<const Expert> all, bool has_shared = false, const void* adopted = nullptr)
      : experts(all), shared(has_shared), table(adopted) {}
  ExpertSet(const std::vector<Expert>& all) : ExpertSet(std::span(all)) {}
};

bool same_shape(const FfnShard& a, const FfnShard& b);  // the types and sizes of both shards' matrices
// Whether GPUs have kernels for a layer's experts: for each, and all but the shared one have one shape. Without down they
// must be given one first (ExpertFfn::takes_down_t()).
bool gpu_computes(const ExpertSet& set);

// Devices that compute mixtures. Up to kFewTokens tokens, a token's results have the same bits whatever the others are,
// and rows of an expert that several tokens chose are read from memory once.
class ExpertFfn {
 public:
  // Whether experts may have down_t; otherwise all have down.
  virtual bool takes_down_t() const { return true; }
  // The device's table of a layer's experts by their ids, made once of the adopted ones; null where it needs
  // nothing. Throws Error for experts that it has no kernels for.
  virtual const void* adopt_experts(const ExpertSet& /*adopted*/) { return nullptr; }
  // Chooses the experts of T tokens. `in`: what the router reads.
  virtual void route(const Router& router, const Input& in, int64_t T, const ExpertChoice& choice) = 0;
  // y[t] += sum of weight * (FFN_e(in[t]) + down_bias_e) over token t's experts e that `set` holds, ids ascending. The
  // choice is route()'s, of this device or of another one.
  virtual void ffn_experts(const ExpertSet& set, const ExpertChoice& choice, const Input& in, int64_t T, float* y) = 0;

 protected:
  ~ExpertFfn() = default;
};

// One token's choice from its logits [n_expert]: ids and weights [n_used]. In plain code for every device whose address
// space is the host's; n_expert is kMostExperts at most.
void choose_experts(const Routing& routing, const float* logits, Vector correction, int32_t* ids, float* weights);

}  // namespace hearth
