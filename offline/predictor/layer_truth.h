#pragma once
// Neurons of a layer as they really are on samples, and as a predictor names them, a block of neurons at a time so
// that memory stays bounded: [neurons][tokens].
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "model/predictors.h"
#include "offline/predictor/samples.h"
#include "offline/profile/activation_counter.h"
#include "predictor/products.h"

namespace hearth::offline {

constexpr int64_t kNeuronBlock = 512;
constexpr size_t kKeptBytes = size_t{1} << 30;

class LayerTruth {
 public:
  // All must outlive the object. `down_norms` [n_ff]: ||down row||.
  LayerTruth(const FfnShard& shard, const NeuronRule& rule, std::vector<float> down_norms, int64_t n_embd,
             Products& products, ThreadTeam& team);

  int64_t n_ff() const { return shard_.n(); }
  const FfnShard& shard() const { return shard_; }
  // |value| * ||down row|| of `count` neurons from `first` on for the T inputs x [T][n_embd]: [count][T], 0 where the
  // neuron is inactive. Valid until the next call.
  const float* losses(std::span<const f16_t> x, int64_t first, int64_t count);
  // Computes the losses of all neurons on these inputs once and for all, where that takes no more than kKeptBytes.
  void keep(std::span<const f16_t> x);

 private:
  void compute(const predictor::TokenProducts& x, int64_t first, int64_t count, float* loss);
  const predictor::TokenProducts& tokens(std::span<const f16_t> x);

  const FfnShard& shard_;
  NeuronRule rule_;
  std::vector<float> down_norms_;
  int64_t n_embd_;
  Products& products_;
  ThreadTeam& team_;
  const f16_t* last_ = nullptr;  // what tokens_ were made of
  std::optional<predictor::TokenProducts> tokens_;
  std::vector<float> up_, loss_;
  std::unordered_map<const f16_t*, std::vector<float>> kept_;
};

// Scores of one predictor on samples.
class SampleScores {
 public:
  // x [T][n_embd]: what the predictor reads. All must outlive the object.
  SampleScores(const Predictor& predictor, std::span<const f16_t> x, int64_t n_embd, Products& products);
  // score [count][T] of the neurons from `first` on. Weights are used in f32 as they are after rounding to their type;
  // the 8-bit rounding of inputs that devices do for quantised weights is not imitated.
  void scores(int64_t first, int64_t count, std::vector<float>& score);

 private:
  const Predictor& predictor_;
  int64_t T_;
  std::vector<float> hidden_;                       // [T][rank]
  std::optional<predictor::TokenProducts> reader_;  // of hidden_, or of x_ without an fc1
};

}  // namespace hearth::offline
