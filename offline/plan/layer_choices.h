#pragma once
// The ways one layer can be placed, each with its bytes of GPU memory and its time per token.
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/placement.h"
#include "offline/plan/cost_model.h"
#include "offline/plan/knapsack.h"
#include "offline/plan/shape.h"

namespace hearth::offline {

constexpr int kPredictorTensors = 5;  // of a layer, at most, each aligned on its own

struct LayerChoice {
  engine::Where attention = engine::Where::cpu;
  engine::Selection selection = engine::Selection::gate;
  engine::Where predictor = engine::Where::cpu;
  bool look_ahead = false;
  int32_t hot = 0;      // this many of the most frequent neurons are on the GPU
  int32_t neurons = 0;  // of experts: that many of each of those but the shared one, the most active; 0: all
  bool predicts_on_gpu() const { return selection == engine::Selection::predictor && predictor == engine::Where::gpu; }
};

// Expected bytes read for one token, by device and by kind of access.
struct Traffic {
  double gpu_dense = 0, gpu_sparse = 0;  // whole matrices; gathered rows
  double cpu_dense = 0, cpu_sparse = 0;
  double link = 0;  // gathered by the GPU from host memory
  double gpu() const { return gpu_dense + gpu_sparse; }
  double cpu() const { return cpu_dense + cpu_sparse; }
  Traffic& operator+=(const Traffic& t) {
    gpu_dense += t.gpu_dense, gpu_sparse += t.gpu_sparse, cpu_dense += t.cpu_dense, cpu_sparse += t.cpu_sparse;
    link += t.link;
    return *this;
  }
};

class LayerCosts {
 public:
  // `frequencies` [n_ff]; kv_bytes of KV cache are allocated, n_kv positions of it are read by an average token.
  // `gpu_bucket`: these neurons are on the GPU and no others; null: as many of the most frequent ones as pays.
  LayerCosts(const LayerShape& shape, std::span<const double> frequencies, const CostModel& cost,
             const GpuReserve& reserve, uint64_t kv_bytes, int64_t n_kv,
             const std::vector<int32_t>* gpu_bucket = nullptr);

  // Neurons by falling frequency, those of a prescribed bucket before the others; of equal ones the lower id first.
  const std::vector<int32_t>& order() const { return order_; }

  uint64_t gpu_bytes(const LayerChoice& choice) const;
  uint64_t kv_gpu_bytes(const LayerChoice& choice) const;  // of those, the KV cache's
  double seconds(const LayerChoice& choice) const;
  // When nothing runs on a GPU: no hand-offs.
  double seconds_cpu_only(engine::Selection selection) const;
  Traffic attention_traffic(const LayerChoice& choice) const;
  Traffic ffn_traffic(const LayerChoice& choice) const;
  // The cold neurons that the GPU reads from host memory itself: of every frequency, so that its part of what a token
  // needs varies as little as can be. In no order.
  std::vector<int32_t> linked(const LayerChoice& choice) const;
  // The most active neurons of a routed expert, `n` of them, ascending.
  std::vector<int32_t> hottest_inside(int32_t expert, int32_t n) const;
  // Neurons on the GPU, or experts, of cut ones their parts.
  double on_gpu(const LayerChoice& choice) const;
  // Expected active neurons among the hot ones, and among all. Of experts: expected uses, of cut ones their parts.
  double hot_activations(const LayerChoice& choice) const;
  double activations() const { return active_.back(); }

  // Every placement that a plan chooses from.
  std::vector<LayerChoice> choices(engine::Sparsity sparsity, bool sparse_family) const;
  // The ways of finding the active neurons that `sparsity` allows in this layer; the gate where a predictor is asked
  // for and it has none.
  std::vector<engine::Selection> selections(engine::Sparsity sparsity, bool sparse_family) const;

 private:
  // A layer's experts where each on the GPU has `neurons` there (0: all): sums over the first k of order_, [n_ff + 1].
  struct ExpertSums {
    int32_t neurons = 0;
    std::vector<double> parts;         // on the GPU, in experts
    std::vector<double> memory, read;  // bytes that they take there, and that a token reads of them
    std::vector<double> uses;          // expected, in experts
    std::vector<double> active;        // those parts of the activations inside them, in experts
  };
  void sort_inside(size_t expert, std::vector<std::vector<double>>& covered);
  ExpertSums sum_experts(std::span<const double> p, const LayerShape::ExpertCut& cut,
                         std::span<const double> covered) const;
  const ExpertSums& sums(const LayerChoice& choice) const;
  struct FfnTime {
    double before;  // what both sides wait for, and the GPU's kernels
    double hot, cold;
  };
  FfnTime ffn_time(const LayerChoice& choice) const;
  double attention_seconds(const LayerChoice& choice) const;
  double expert_seconds(const LayerChoice& choice) const;  // with experts on the GPU
  double predictor_seconds() const;                    // on the GPU
  double cold_bytes(const LayerChoice& choice) const;  // gathered rows that the CPU or the link has to read
  // With a predictor on the GPU, when the CPU's answer is there if these are its rows, and when the GPU has read these
  // itself; from the moment on when both know their neurons. No time for no bytes.
  double cpu_seconds(const LayerChoice& choice, double bytes) const;
  double linked_seconds(const LayerChoice& choice, double bytes, bool cpu_rests) const;
  double link_share(const LayerChoice& choice) const;  // of the cold neurons; 1: the CPU rests
  std::vector<int32_t> hot_counts() const;

  LayerShape shape_;
  CostModel cost_;
  GpuReserve reserve_;
  uint64_t kv_bytes_ = 0;              // of the cache as allocated
  double kv_read_ = 0;                 // of the cache, by an average token
  std::optional<int32_t> prescribed_;  // the number of hot neurons
  std::vector<int32_t> order_;
  std::vector<double> active_;     // [n_ff + 1] expected activations of the first k neurons of order_
  std::vector<double> predicted_;  // [n_ff + 1] the same for predictions
  std::vector<std::vector<int32_t>> hottest_;  // by routed expert: its neurons by falling frequency
  std::vector<ExpertSums> experts_;            // of a mixture: whole ones first, then by its cuts
  std::vector<double> spared_;     // [n_ff + 1] of experts: the chance that a token uses none but the first k
};

}  // namespace hearth::offline
