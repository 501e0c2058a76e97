#pragma once
// Makes predictors for a model's layers: weights by one of three methods, thresholds calibrated to a wanted share of
// the loss, and the choice among methods, ranks and types.
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/predictors.h"
#include "offline/plan/cost_model.h"
#include "offline/predictor/calibrate.h"
#include "offline/predictor/samples.h"
#include "predictor/mlp.h"
#include "predictor/whitened_svd.h"

namespace hearth::offline {

enum class FitMethod { svd, mlp, gate_bits };
const char* to_string(FitMethod method);  // as in PredictorData::method
FitMethod parse_fit_method(std::string_view name);

struct Candidate {
  FitMethod method = FitMethod::svd;
  int64_t rank = 0;  // svd, mlp
  DType type = DType::f16;
  std::string name() const;  // "svd 128 q8_0", "gate-bits q4_0"
};

// Throws Error when a layer of this width cannot have it: a rank beyond its size, or no multiple of the type's block.
void check_candidate(const Candidate& candidate, int64_t n_embd);

constexpr int64_t kWholeRank = 1024;  // ranks up to this come from one decomposition

struct FitOptions {
  double recall = 0.99;    // loss-weighted, on the validation tokens
  float threshold = 0.0f;  // a neuron is active when |act(gate)| exceeds this
  predictor::MlpOptions mlp;
};

// One layer's samples, the truth about them, and the candidates made from them.
class LayerFit {
 public:
  // All must outlive the object. `device`: a host device of its own.
  LayerFit(const model::Model& model, size_t layer, const Samples& samples, const FitOptions& options,
           Products& products, ThreadTeam& team);

  // Weights only, no thresholds yet. Throws Error when the candidate is impossible here.
  model::PredictorData weights(const Candidate& candidate);
  Calibration calibrated(const Predictor& predictor);
  // With thresholds and figures for the wanted recall.
  model::PredictorData fit(const Candidate& candidate);
  model::PredictorData with_thresholds(model::PredictorData weights, const Calibration& c, size_t price) const;

  LayerTruth& truth() { return truth_; }
  model::PredictorInput input() const { return input_; }

 private:
  model::PredictorData svd(const Candidate& candidate);
  model::PredictorData mlp(const Candidate& candidate);
  const predictor::InputMoments& moments();
  const predictor::LowRank& low_rank(int64_t rank);
  CalibrationInputs inputs(Part part) const;
  std::span<const f16_t> read(Part part) const;
  const Matrix& gate();
  std::vector<float> importance();
  std::vector<float> losses_by_token(Part part);  // [T][n_ff]

  const Samples& samples_;
  size_t layer_;
  FitOptions options_;
  Products& products_;
  ThreadTeam& team_;
  int64_t n_embd_;
  model::PredictorInput input_;
  LayerTruth truth_;
  Matrix gate_;
  std::vector<float> gate_values_;
  std::vector<float> mlp_loss_, mlp_validation_;  // [T][n_ff] of the tokens fitted on, and of the validation's
  std::optional<predictor::InputMoments> moments_;
  std::optional<predictor::LowRank> low_rank_;
};

// Candidates for `auto`: every method, ranks from 32 up to what costs as much as the gate itself.
std::vector<Candidate> all_candidates(int64_t n_embd, int64_t n_ff, DType gate_type, bool with_mlp);

// Expected seconds a token of a layer's FFN with this predictor, all of it read by the CPU (`gpu`: by the GPU).
double expected_seconds(const model::PredictorData& predictor, const FfnShard& shard, const CostModel& cost, bool gpu);

}  // namespace hearth::offline
