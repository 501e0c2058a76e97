#pragma once
// Predictors as they are kept in a sidecar (model/sidecar.h), one per layer that has one:
//
//   hearth-sparse.predictor.version          u32   1
//   hearth-sparse.predictor.methods          string [n_layer]   "svd", "mlp", "gate-bits", "powerinfer"; "": none
//   hearth-sparse.predictor.inputs           string [n_layer]   "ffn_input", "residual"
//   hearth-sparse.predictor.relu             bool [n_layer]     between fc1 and fc2
//   hearth-sparse.predictor.recall_target    f32 [n_layer]      and what was measured on held-out tokens:
//   hearth-sparse.predictor.recall, .loss_recall, .precision, .density, .predicted_density   f32 [n_layer]
//   hearth-sparse.predictor.tokens           u64 [n_layer]      over how many tokens
//   blk.N.fc1.weight    [n_embd, rank]       absent for gate-bits
//   blk.N.fc1.bias      f32 [rank]           optional
//   blk.N.fc2.weight    [rank, n_ff]         [n_embd, n_ff] for gate-bits
//   blk.N.predictor_threshold   f32 [n_ff]
// The fields are explained at core/device.h's Predictor.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf.h"
#include "model/model.h"

namespace hearth::model {

// How good a predictor was on held-out tokens. "Active": the neuron's value is not zero.
struct PredictorFigures {
  float recall_target = 0;      // of the loss, that was asked for
  float recall = 0;             // active and predicted / active
  float loss_recall = 0;        // the same, each weighted with |value| * ||down row||
  float precision = 0;          // active and predicted / predicted
  float density = 0;            // active / all
  float predicted_density = 0;  // predicted / all
  uint64_t tokens = 0;
};

// A matrix with its own memory.
struct OwnedMatrix {
  DType type = DType::f32;
  int64_t rows = 0, cols = 0;
  std::vector<std::byte> data;
  // `values` [rows][cols], converted to `type`, whose block size must divide cols.
  static OwnedMatrix from(const float* values, int64_t rows, int64_t cols, DType type);
  explicit operator bool() const { return !data.empty(); }
  Matrix view() const { return *this ? Matrix{type, rows, cols, data.data()} : Matrix{}; }
};

// A layer's predictor with its own memory, as fitting makes it.
struct PredictorData {
  std::string method;  // empty: the layer has none
  PredictorInput input = PredictorInput::ffn_input;
  OwnedMatrix fc1, fc2;
  std::vector<float> fc1_bias, threshold;
  bool relu = false;
  PredictorFigures figures;

  LayerPredictor view() const;  // valid as long as this is neither moved nor changed
};

// A layer's predictor in a sidecar's file: views of its mapping.
struct StoredPredictor {
  LayerPredictor predictor;  // empty: the layer has none
  PredictorFigures figures;
};

PredictorInput parse_predictor_input(std::string_view name);  // "ffn_input" or "residual"; throws Error

// Bytes that evaluating a predictor reads: matrices, bias and thresholds.
uint64_t predictor_bytes(const LayerPredictor& predictor);

// Whether a sidecar's file holds predictors for any layer.
bool has_predictors(const gguf::File& sidecar);
// By layer. Throws Error naming the tensor or key that contradicts `n_embd`, `n_ff` or itself.
std::vector<StoredPredictor> read_predictors(const gguf::File& sidecar, int64_t n_embd,
                                             const std::vector<int64_t>& n_ff);

// The score from which on PowerInfer computes a neuron.
constexpr std::string_view kScoreThresholdKey = "powerinfer.sparse_threshold";
// The largest Predictor::threshold that a score of exactly `score` exceeds: PowerInfer leaves out scores below it
// alone.
float below_score(float score);
// Gives all predictors in PowerInfer's format (method "powerinfer"), from whichever file, this score in place of the
// file's. False when the model has none. Throws Error when it is no finite number.
bool set_score_threshold(Model& model, float score);

namespace detail {

// Predictors as a sidecar's writer has them: keys first, tensors in the same order as their data.
struct PendingTensor {
  size_t index;
  const void* data;
  size_t bytes;
};
void add_predictors(gguf::Writer& out, const std::vector<PredictorData>& layers, std::vector<PendingTensor>& pending);
bool is_predictor_key(const std::string& key);
bool is_predictor_tensor(const std::string& name);

}  // namespace detail
}  // namespace hearth::model
