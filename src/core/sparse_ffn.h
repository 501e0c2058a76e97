#pragma once
// Devices that skip neurons, for T tokens of 1 to kFewTokens: predict which neurons will fire, and compute an FFN of
// those alone. A token's results have the same bits whatever T is and whatever the other tokens are. Rows that several
// tokens need are read from memory once.
#include <array>
#include <cstdint>
#include <variant>

#include "core/mailbox.h"
#include "core/ops.h"

namespace hearth {

// Sent to the CPU along with the lists of its neurons: x [T][n], posted in `mailbox` (null: nothing is posted).
struct HandOff {
  Mailbox* mailbox = nullptr;
  const float* x = nullptr;
  int64_t n = 0;
};

// Where the predicted neurons are listed: rows [0, n_own) of the predictor in `own`; the others are numbered from 0
// again, the first n_linked of them listed in `linked`, what follows goes with the hand-off (without one: nowhere).
struct PredictArgs {
  int64_t n_own = 0;
  NeuronLists own;
  int64_t n_linked = 0;
  NeuronLists linked;
  HandOff hand_off;
};

// Neurons whose rows the device does not hold: it reads them from page-locked host memory, over the link, for each
// token that needs them.
struct LinkedNeurons {
  FfnShard shard;               // from ColdRows::link()
  NeuronLists named;            // as predicted
  int32_t* n_active = nullptr;  // out [T], optional: how many of them are active
};

// Every gate is evaluated; a neuron is computed when |act(gate)| > threshold.
struct ByGates {};

// Which neurons an FFN computes: those whose gate confirms, of all or of the listed ones.
struct SparseArgs {
  std::variant<ByGates, NeuronLists> candidates;
  float threshold = 0.0f;       // 0 loses nothing for ReLU families
  int32_t* n_active = nullptr;  // out [T], optional: how many neurons of each token are active
  // y also gets the CPU's answer to the last hand-off, in the same pass over y; the CPU publishes it
  // (Mailbox::publish()).
  Mailbox* collect = nullptr;
  // With `collect`, a hint: the matrices of the product that comes first when the answer has come, or empty ones. What
  // of them a device can prefetch while it waits costs nothing.
  std::array<Matrix, 3> next = {};
  // y also gets the sum of these neurons, by the same threshold; with lists alone.
  const LinkedNeurons* linked = nullptr;
  // The CPU's side: y is its answer to this mailbox, and nothing is added to it later, so that each part is published
  // as soon as it is complete. Not with `linked`.
  Mailbox* answer = nullptr;
};

class SparseFfn {
 public:
  // The neurons that `predictor` names for each of T tokens. `in`: what the predictor reads.
  virtual void predict(const Predictor& predictor, const Input& in, int64_t T, const PredictArgs& args) = 0;
  // y[t] += y_bias + the FFN of token t over its active neurons: gates first, then up and down of the active ones.
  // Needs down_t. `next`: the norm that reads y, or null.
  virtual void ffn_sparse(const FfnShard& shard, const SparseArgs& sparse, const Input& in, int64_t T, Vector y_bias,
                          float* y, const NextNorm* next) = 0;

 protected:
  ~SparseFfn() = default;
};

}  // namespace hearth
