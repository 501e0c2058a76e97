#pragma once
// A trained two-layer perceptron, as PowerInfer (arXiv 2312.12456) and Deja Vu (arXiv 2310.17157) use: score = fc2
// relu(fc1 x + b). Binary cross-entropy with the active neurons' terms weighted up, AdamW, early stop on recall.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/half.h"
#include "core/thread_team.h"
#include "predictor/whitened_svd.h"

namespace hearth::predictor {

struct MlpOptions {
  int epochs = 12;
  int patience = 3;  // epochs without a better recall before it stops
  int64_t batch = 128;
  float learning_rate = 1e-3f;
  float weight_decay = 1e-4f;
  uint32_t seed = 1;
};

// Tokens to learn from: x [T][n_embd], loss [T][n_ff] (0 = inactive).
struct MlpSamples {
  std::span<const f16_t> x;
  const float* loss = nullptr;
  int64_t T = 0;
};

struct Mlp {
  int64_t rank = 0;
  std::vector<float> fc1, fc1_bias, fc2;  // [rank][n_embd], [rank], [n_ff][rank]; fc2's bias is left to the thresholds
  std::vector<double> recall;             // by epoch: share of the loss among the 1.3 * active best scores
};

// `start`: the linear solution of rank / 2, from whose pairs relu(z) - relu(-z) training sets out. Deterministic for
// given options and products, whatever the number of threads. Weights, gradients and their moments stay in the memory
// of the products: 16 bytes a weight.
Mlp train_mlp(const LowRank& start, const InputMoments& inputs, int64_t rank, const MlpSamples& train,
              const MlpSamples& validation, const MlpOptions& options, Products& products, ThreadTeam& team);

}  // namespace hearth::predictor
