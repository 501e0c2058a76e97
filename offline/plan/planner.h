#pragma once
// Decides what lives on the GPU under a byte budget, and says what a token will then cost, by the cost model
// (cost_model.h). A more frequent neuron is never colder than a less frequent one of its layer, or of its expert.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/placement.h"
#include "offline/plan/cost_model.h"
#include "offline/plan/frequencies.h"
#include "offline/plan/layer_choices.h"
#include "offline/plan/shape.h"
#include "offline/plan/streaming.h"

namespace hearth::offline {

struct PlanRequest {
  uint64_t vram_budget = 0;      // bytes of GPU memory that may be used in all; 0 = no GPU
  int64_t n_ctx = 0;             // 0: the model's own, at most 4096
  int64_t n_sequences = 1;       // of n_ctx positions each
  int64_t n_batch = 512;         // prompt tokens evaluated at once
  int64_t expected_context = 0;  // positions that an average token attends to; 0 = half of n_ctx
  engine::Sparsity sparsity = engine::Sparsity::auto_;
  bool thresholds = false;  // neurons below a threshold are left out, so that `auto` is sparse for every family
  // By layer, ascending: the neurons that are on the GPU whatever they are worth (offline/plan/gpu_index.h). Empty: the
  // planner chooses.
  std::vector<std::vector<int32_t>> gpu_buckets;
  CostModel cost;
  GpuReserve reserve;
  uint64_t host_memory = 0;  // bytes that may be used on the host; 0 = not checked
};

// Bytes of GPU memory by what they are for.
struct GpuBytes {
  uint64_t context = 0, margin = 0, staging = 0, activations = 0, scratch = 0;
  uint64_t norms = 0, attention = 0, kv_cache = 0, neurons = 0, predictors = 0, embedding = 0, output = 0;
  uint64_t total() const;
  uint64_t fixed() const;  // what any plan that uses the GPU needs: everything up to `norms`
};

struct LayerReport {
  LayerChoice choice;
  int64_t n_ff = 0;
  double hot = 0;                               // neurons on the GPU, or experts, of cut ones their parts
  double activations = 0, hot_activations = 0;  // expected, per token
  Traffic attention, ffn;                       // expected bytes per token
  uint64_t gpu_bytes = 0;
  double seconds = 0;
};

struct Plan {
  engine::Placement placement;
  GpuBytes gpu;
  uint64_t host_bytes = 0;         // weights, cache and activations in host memory
  uint64_t mapped_bytes = 0;       // of these, experts: they are read where the file is mapped, and may be on disk
  uint64_t linked_copy_bytes = 0;  // of these, second copies of rows that the GPU reads over the link
  double link_share = 0;           // of the rows of cold neurons that a token needs, read by the GPU
  std::vector<LayerReport> layers;
  Traffic traffic;      // per token, all layers and the head
  double seconds = 0;   // per token
  double bound = 0;     // no plan of this budget is faster, by the cost model
  double hit_rate = 0;  // share of the activations that happen on the GPU
  double density = 0;   // expected active neurons / all neurons
  int64_t n_kv = 0;     // positions that an average token attends to
  double tokens_per_second() const { return 1 / seconds; }
};

class Planner {
 public:
  // Throws Error when the context cannot be had from this model.
  Planner(ModelShape shape, Frequencies frequencies, const PlanRequest& request);

  // A plan for a budget in bytes, 0 = without a GPU. Throws Error when the budget is below the smallest one that
  // works (and says which that is), or when what remains does not fit host memory. Where that is short, fewer rows than
  // would be fastest are read over the link, if that takes copies of them and the request does not say how many.
  Plan plan(uint64_t vram_budget) const;
  Plan plan() const { return plan(request_.vram_budget); }
  // What a plan of this budget would reach, whatever it leaves to the host.
  double tokens_per_second(uint64_t vram_budget) const { return 1 / pick(vram_budget).seconds; }
  // Needs of any plan that uses the GPU: those that are fixed, and prescribed neurons; a budget below it is refused.
  uint64_t smallest_budget() const;
  // Everything on the GPU.
  uint64_t largest_useful_budget() const;

  // For a layer placed as `choice` is: the smallest hit rate at which it is faster with neurons or experts on the GPU
  // than with none. nullopt: it never is.
  std::optional<double> break_even(size_t layer, const LayerChoice& choice) const;

  // How prompts of a model that is placed like this stream what the CPU has.
  Streaming streaming(const engine::Placement& placement) const {
    return {shape_, frequencies_, placement, request_.cost};
  }

  const ModelShape& shape() const { return shape_; }
  const Frequencies& frequencies() const { return frequencies_; }
  const PlanRequest& request() const { return request_; }

 private:
  struct Picked {
    std::vector<LayerChoice> layers;
    bool embedding_gpu = false, output_gpu = false;
    bool gpu = true;
    double seconds = 0, bound = 0;
  };
  void check_context();
  void check_buckets() const;
  bool sparse_family() const { return shape_.sparse_family || request_.thresholds; }
  uint64_t kv_layer_bytes() const;  // of a layer's KV cache, as the engine allocates it
  uint64_t largest_staged_expert() const;
  GpuBytes fixed_bytes() const;
  void build_classes();
  Picked pick_cpu_only() const;
  Picked pick(uint64_t vram_budget) const;
  uint64_t embedding_gpu_bytes(bool embedding, bool output) const;
  double head_seconds(bool embedding, bool output) const;
  Plan report(const Picked& picked, uint64_t vram_budget) const;
  LayerReport report_layer(size_t layer, const Picked& picked) const;
  void account(const Picked& picked, Plan& plan) const;
  engine::Placement placement(const Picked& picked, uint64_t vram_budget) const;
  bool fits_host(const Plan& plan) const {
    return request_.host_memory == 0 || plan.host_bytes - plan.mapped_bytes <= request_.host_memory;
  }
  void check_host_memory(const Plan& plan) const;
  Plan plan_with(uint64_t vram_budget, double link_share) const;

  ModelShape shape_;
  Frequencies frequencies_;
  PlanRequest request_;
  int64_t n_kv_ = 0;
  GpuBytes fixed_;
  std::vector<LayerCosts> costs_;
  std::vector<std::vector<LayerChoice>> choices_;  // by layer; a Choice's id is the index
  std::vector<ChoiceClass> classes_;               // layers, then embedding and head
};

}  // namespace hearth::offline
