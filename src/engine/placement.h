#pragma once
// Where every part of a model lives, as data: made by the planner (offline/plan), obeyed by loading to the byte.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"
#include "model/config.h"

namespace hearth::engine {

enum class Where { cpu, gpu };
const char* to_string(Where where);

// How the neurons that a token needs are found in one layer.
enum class Selection {
  all,        // every neuron is computed (dense)
  gate,       // every gate row is evaluated where it lives; up and down of the active ones (exact)
  predictor,  // gate rows of the predicted neurons alone; up and down where the gate confirms
};
const char* to_string(Selection selection);

// Which selections a model's layers may have. off: all. exact: gate. predict: predictor in the layers that have one,
// gate in the others. auto_: a plan takes whichever is fastest, layer by layer; an undivided model predicts where it
// has predictors. Without predictors, auto_ is exact where that loses nothing (the ReLU families, or a threshold) and
// the file allows it, otherwise off.
enum class Sparsity { off, exact, predict, auto_ };
Sparsity parse_sparsity(std::string_view name);  // "off", "exact", "predict", "auto"; throws Error
const char* to_string(Sparsity sparsity);

constexpr int64_t kExpertBlock = 32;  // neurons of an expert that GPUs take together

// One layer. A neuron is in exactly one state:
//   in gpu_bucket   gate, up and down rows on the GPU (hot)
//   elsewhere       all rows on the CPU (cold)
// The GPU computes the cold ones in gpu_linked: it reads their rows from host memory, over the link.
struct LayerPlacement {
  Where attention = Where::cpu;  // wq, wk, wv, wo, their biases, and the layer's KV cache
  Selection selection = Selection::gate;
  Where predictor = Where::cpu;     // of fc1, fc2; only with Selection::predictor
  std::vector<int32_t> gpu_bucket;  // ascending original ids; row k of the GPU's pack is neuron gpu_bucket[k]
  std::vector<int32_t> gpu_linked;  // ascending original ids, disjoint from it; where a predictor on the GPU selects
  // For a mixture, instead of gpu_bucket: ascending ids of the experts on the GPU, the shared one's being the number of
  // the others. Those that are left are on the CPU.
  std::vector<int32_t> gpu_experts;
  // Of experts of the ReLU family with transposed down projections, which can be cut: for each of gpu_experts the
  // ascending ids of its neurons on the GPU, whole blocks of kExpertBlock and equally many in all but the shared one; the
  // CPU has its other neurons. No ids: all of them are on the GPU. An empty list: those of every expert are.
  std::vector<std::vector<int32_t>> gpu_expert_neurons;
  // While the GPU computes the layer before, it tells the CPU which of this layer's neurons it will probably be asked
  // for, so that their rows can be fetched. Where both layers' neurons are predicted on the GPU and some are the CPU's;
  // elsewhere it means nothing.
  bool look_ahead = false;
  bool operator==(const LayerPlacement&) const = default;

  // The ids of an expert's neurons that are on the GPU, none where all are; nullopt: the expert is the CPU's. And their
  // number, of n_ff.
  std::optional<std::span<const int32_t>> neurons_on_gpu(size_t expert) const;
  int64_t n_on_gpu(size_t expert, int64_t n_ff) const;
  // All of the layer's neurons are hot: no hand-off to the CPU is needed.
  bool ffn_on_gpu(int64_t n_ff) const { return static_cast<int64_t>(gpu_bucket.size()) == n_ff; }
};

struct Placement {
  std::string model_fingerprint;  // model::fingerprint() of the file it was made for
  int64_t n_ctx = 0, n_sequences = 1, n_batch = 0;
  uint64_t vram_budget = 0;      // bytes the plan may use
  Where embedding = Where::cpu;  // token embedding; with a tied head on the GPU it is there too
  Where output = Where::cpu;     // output norm and head
  std::vector<LayerPlacement> layers;
  std::vector<MemoryUse> planned;  // bytes of GPU memory by purpose, context and margin included

  bool uses_gpu() const { return !planned.empty(); }
  uint64_t planned_bytes() const;
  // The neurons of a layer that are not hot, in the order of the CPU's rows: those of gpu_linked, then the others, each
  // ascending.
  std::vector<int32_t> cpu_rows(size_t layer, int64_t n_ff) const;
};

// Throws Error saying what is wrong: made for another model, a list of ids that is not ascending or out of range, a
// neuron in two states, experts cut otherwise than LayerPlacement says, more bytes than its own budget.
void check_placement(const Placement& placement, const model::Config& config, const std::string& model_fingerprint);

}  // namespace hearth::engine
