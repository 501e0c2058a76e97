#pragma once
// Predictors for whole models, without fitting.
#include <memory>
#include <random>
#include <vector>

#include "model/model.h"
#include "support/random.h"

namespace hearth::test {

// Gives every layer a predictor that reads `input`: of the FFN's input a copy of the gate, which names exactly the
// active neurons; of the residual stream a random one of rank 5, which does not.
inline void add_predictors(model::Model& m, model::PredictorInput input) {
  struct Storage {
    std::vector<std::vector<float>> pieces;
    Vector keep(std::vector<float> v) {
      pieces.push_back(std::move(v));
      return {pieces.back().data(), static_cast<int64_t>(pieces.back().size())};
    }
  };
  const auto storage = std::make_shared<Storage>();
  std::mt19937 rng(99);
  std::vector<model::LayerPredictor> layers;
  for (const model::LayerWeights& w : m.weights().layers) {
    const int64_t n = w.ffn.n(), n_embd = w.ffn.gate.cols;
    model::LayerPredictor& p = layers.emplace_back();
    p.input = input;
    std::vector<float> threshold(static_cast<size_t>(n),
                                 w.ffn.act == Activation::fat_relu ? w.ffn.act_threshold : 0.0f);
    if (input == model::PredictorInput::ffn_input) {
      p.weights.fc2 = w.ffn.gate;
      for (size_t k = 0; w.ffn.gate_bias && k < threshold.size(); ++k) threshold[k] -= w.ffn.gate_bias.data[k];
    } else {
      constexpr int64_t rank = 5;
      p.weights.relu = true;
      p.weights.fc1 = {DType::f32, rank, n_embd,
                       storage->keep(random_normal(rng, static_cast<size_t>(rank * n_embd))).data};
      p.weights.fc2 = {DType::f32, n, rank, storage->keep(random_normal(rng, static_cast<size_t>(n * rank))).data};
      p.weights.fc1_bias = storage->keep(random_normal(rng, rank));
    }
    p.weights.threshold = storage->keep(std::move(threshold));
  }
  m.set_predictors(layers, storage);
}

}  // namespace hearth::test
