#include "offline/predictor/fit.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "offline/profile/ffn_probe.h"

namespace hearth::offline {

using model::OwnedMatrix;
using model::PredictorData;
using model::PredictorInput;

const char* to_string(FitMethod method) {
  switch (method) {
    case FitMethod::svd:
      return "svd";
    case FitMethod::mlp:
      return "mlp";
    case FitMethod::gate_bits:
      return "gate-bits";
  }
  return "?";
}

FitMethod parse_fit_method(std::string_view name) {
  for (const FitMethod m : {FitMethod::svd, FitMethod::mlp, FitMethod::gate_bits}) {
    if (name == to_string(m)) return m;
  }
  fail("unknown kind of predictor '{}'; expected svd, mlp, gate-bits or auto", name);
}

std::string Candidate::name() const {
  if (method == FitMethod::gate_bits) return fmt::format("gate-bits {}", traits(type).name);
  return fmt::format("{} {} {}", to_string(method), rank, traits(type).name);
}

namespace {

NeuronRule rule_of(const FfnShard& shard, float threshold) {
  return {shard.act, shard.act_threshold, shard.up_relu, threshold};
}

}  // namespace

LayerFit::LayerFit(const model::Model& model, size_t layer, const Samples& samples, const FitOptions& options,
                   Products& products, ThreadTeam& team)
    : samples_(samples),
      layer_(layer),
      options_(options),
      products_(products),
      team_(team),
      n_embd_(model.config().n_embd),
      input_(samples.input),
      truth_(model.weights().layers[layer].ffn, rule_of(model.weights().layers[layer].ffn, options.threshold),
             down_row_norms(model.weights().layers[layer].ffn), n_embd_, products, team) {
  truth_.keep(samples.at(Part::calibrate, layer).ffn);
  truth_.keep(samples.at(Part::validate, layer).ffn);
}

std::span<const f16_t> LayerFit::read(Part part) const {
  const LayerSamples& s = samples_.at(part, layer_);
  return input_ == PredictorInput::ffn_input ? s.ffn : s.read_by_predictor();
}

CalibrationInputs LayerFit::inputs(Part part) const {
  return {samples_.at(part, layer_).ffn, read(part)};
}

const predictor::InputMoments& LayerFit::moments() {
  if (!moments_) moments_ = predictor::moments_of(read(Part::fit), n_embd_, products_);
  return *moments_;
}

// The gate as a function of what the predictor reads: W itself, or W K where it reads something from which the gate's
// input is guessed as K x.
const Matrix& LayerFit::gate() {
  if (gate_) return gate_;
  const Matrix& w = truth_.shard().gate;
  if (input_ == PredictorInput::ffn_input) return gate_ = w;
  const std::vector<float> k =
      predictor::linear_guess(samples_.at(Part::fit, layer_).ffn, read(Part::fit), moments(), products_);
  gate_values_.resize(static_cast<size_t>(w.rows * n_embd_));
  const OwnedBlock guess = products_.upload({DType::f32, n_embd_, n_embd_, k.data()});
  const int64_t at_once = predictor::tile_rows(n_embd_);
  for (int64_t first = 0; first < w.rows; first += at_once) {
    const OwnedBlock rows = products_.upload(w.slice_rows(first, std::min(at_once, w.rows - first)));
    const OwnedBlock composed = products_.allocate(rows->rows, n_embd_);
    products_.multiply(rows, guess, composed);
    products_.read(composed, gate_values_.data() + first * n_embd_);
  }
  return gate_ = {DType::f32, w.rows, n_embd_, gate_values_.data()};
}

// An error of the score does harm where the neuron is often near its threshold and loses much there; both show in its
// mean loss, in units of its spread.
std::vector<float> LayerFit::importance() {
  const auto& x = samples_.at(Part::calibrate, layer_).ffn;
  const auto T = static_cast<int64_t>(x.size()) / n_embd_;
  std::vector<double> mean;
  double total = 0;
  for (int64_t first = 0; first < truth_.n_ff(); first += kNeuronBlock) {
    const int64_t count = std::min(kNeuronBlock, truth_.n_ff() - first);
    const float* loss = truth_.losses(x, first, count);
    for (int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int64_t t = 0; t < T; ++t) sum += static_cast<double>(loss[i * T + t]);
      mean.push_back(sum / static_cast<double>(T));
      total += mean.back();
    }
  }
  const double floor = std::max(0.05 * total / static_cast<double>(mean.size()), 1e-30);
  std::vector<float> weights;
  const std::vector<float> deviation = predictor::deviations(gate(), moments(), products_);
  for (size_t i = 0; i < mean.size(); ++i) {
    weights.push_back(static_cast<float>(std::sqrt(std::max(mean[i], floor) / total)) / deviation[i]);
  }
  return weights;
}

const predictor::LowRank& LayerFit::low_rank(int64_t rank) {
  if (!low_rank_ || low_rank_->rank < rank) {
    low_rank_ = predictor::whitened_svd(gate(), importance(), moments(), rank, products_);
  }
  return *low_rank_;
}

PredictorData LayerFit::svd(const Candidate& c) {
  PredictorData p;
  const predictor::LowRank& low = low_rank(std::max(c.rank, std::min<int64_t>(n_embd_, kWholeRank)));
  p.fc1 = OwnedMatrix::from(low.fc1.data(), c.rank, n_embd_, c.type);
  if (is_quantized(c.type)) {
    const std::vector<float> rounded = predictor::dequantized(p.fc1.view(), 0, c.rank);
    const std::vector<float> fc2 = predictor::refit_fc2(gate(), rounded, c.rank, moments(), products_);
    p.fc2 = OwnedMatrix::from(fc2.data(), truth_.n_ff(), c.rank, c.type);
  } else {
    p.fc2 = OwnedMatrix::from(low.fc2_of(c.rank).data(), truth_.n_ff(), c.rank, c.type);
  }
  return p;
}

std::vector<float> LayerFit::losses_by_token(Part part) {
  const auto& x = samples_.at(part, layer_).ffn;
  const int64_t T = static_cast<int64_t>(x.size()) / n_embd_, n_ff = truth_.n_ff();
  std::vector<float> losses(static_cast<size_t>(T * n_ff));
  for (int64_t first = 0; first < n_ff; first += kNeuronBlock) {
    const int64_t count = std::min(kNeuronBlock, n_ff - first);
    const float* by_neuron = truth_.losses(x, first, count);
    team_.for_chunks(T, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t t = begin; t < end; ++t) losses[static_cast<size_t>(t * n_ff + first + i)] = by_neuron[i * T + t];
      }
    });
  }
  return losses;
}

PredictorData LayerFit::mlp(const Candidate& c) {
  if (mlp_loss_.empty()) {
    mlp_loss_ = losses_by_token(Part::fit);
    mlp_validation_ = losses_by_token(Part::validate);
  }
  const auto tokens = [&](Part part) { return static_cast<int64_t>(samples_.at(part, layer_).ffn.size()) / n_embd_; };
  const predictor::MlpSamples train{read(Part::fit), mlp_loss_.data(), tokens(Part::fit)};
  const predictor::MlpSamples validation{read(Part::validate), mlp_validation_.data(), tokens(Part::validate)};
  const predictor::Mlp m = predictor::train_mlp(low_rank(std::min<int64_t>(n_embd_, kWholeRank)), moments(), c.rank,
                                                train, validation, options_.mlp, products_, team_);
  PredictorData p;
  p.relu = true;
  p.fc1 = OwnedMatrix::from(m.fc1.data(), c.rank, n_embd_, c.type);
  p.fc2 = OwnedMatrix::from(m.fc2.data(), truth_.n_ff(), c.rank, c.type);
  p.fc1_bias = m.fc1_bias;
  return p;
}

void check_candidate(const Candidate& c, int64_t n_embd) {
  if (c.method != FitMethod::svd && c.method != FitMethod::mlp) return;
  const int64_t most = c.method == FitMethod::svd ? n_embd : 2 * std::min<int64_t>(n_embd, kWholeRank);
  const int block = std::max(2, traits(c.type).block_size);
  if (c.rank < 1 || c.rank > most || c.rank % block != 0) {
    fail("rank {} is impossible for {} in {}: expected a multiple of {} up to {}", c.rank, to_string(c.method),
         traits(c.type).name, block, most);
  }
}

PredictorData LayerFit::weights(const Candidate& c) {
  check_candidate(c, n_embd_);
  PredictorData p;
  switch (c.method) {
    case FitMethod::svd:
      p = svd(c);
      break;
    case FitMethod::mlp:
      p = mlp(c);
      break;
    case FitMethod::gate_bits: {
      const Matrix& w = gate();
      p.fc2 = OwnedMatrix::from(predictor::dequantized(w, 0, w.rows).data(), w.rows, n_embd_, c.type);
      break;
    }
  }
  p.method = to_string(c.method);
  p.input = input_;
  p.threshold.assign(static_cast<size_t>(truth_.n_ff()), 0.0f);
  return p;
}

Calibration LayerFit::calibrated(const Predictor& predictor) {
  return calibrate(truth_, predictor, inputs(Part::calibrate), inputs(Part::validate), n_embd_, products_, team_);
}

PredictorData LayerFit::with_thresholds(PredictorData p, const Calibration& c, size_t price) const {
  p.threshold = c.at(price);
  const predictor::Tally& t = c.tallies[price];
  p.figures.recall_target = static_cast<float>(options_.recall);
  p.figures.recall = static_cast<float>(t.recall()), p.figures.loss_recall = static_cast<float>(t.loss_recall());
  p.figures.precision = static_cast<float>(t.precision()), p.figures.density = static_cast<float>(t.density());
  p.figures.predicted_density = static_cast<float>(t.predicted_density());
  p.figures.tokens = static_cast<uint64_t>(samples_.tokens(Part::validate));
  return p;
}

PredictorData LayerFit::fit(const Candidate& candidate) {
  PredictorData p = weights(candidate);
  const Calibration c = calibrated(p.view().weights);
  return with_thresholds(std::move(p), c, c.price_for(options_.recall));
}

std::vector<Candidate> all_candidates(int64_t n_embd, int64_t n_ff, DType gate_type, bool with_mlp) {
  const size_t gate_bytes = static_cast<size_t>(n_ff) * row_bytes(gate_type, n_embd);
  std::vector<Candidate> all;
  for (const DType type : {DType::q4_0, DType::q8_0}) {
    if (static_cast<size_t>(n_ff) * row_bytes(type, n_embd) < gate_bytes)
      all.push_back({FitMethod::gate_bits, 0, type});
    for (int64_t rank = 32; rank <= n_embd; rank += rank < 128 ? 32 : rank < 256 ? 64 : rank < 1024 ? 128 : 512) {
      const size_t bytes =
          static_cast<size_t>(rank) * row_bytes(type, n_embd) + static_cast<size_t>(n_ff) * row_bytes(type, rank);
      if (bytes >= gate_bytes) break;
      all.push_back({FitMethod::svd, rank, type});
      if (with_mlp) all.push_back({FitMethod::mlp, rank, type});
    }
  }
  return all;
}

double expected_seconds(const PredictorData& p, const FfnShard& shard, const CostModel& cost, bool gpu) {
  const auto n = static_cast<double>(shard.n());
  const Matrix& down = shard.down_t ? shard.down_t : shard.down;
  const double up_down =
      (static_cast<double>(down.bytes()) + (shard.up ? static_cast<double>(shard.up.bytes()) : 0)) / n;
  const double rows = n * static_cast<double>(p.figures.predicted_density);
  const double active = rows * static_cast<double>(p.figures.precision);
  const auto whole = static_cast<double>(model::predictor_bytes(p.view()));
  const double gathered = rows * static_cast<double>(shard.gate.row_size()) + active * up_down;
  return gpu ? cost.gpu_dense(whole) + cost.gpu_sparse(gathered) : cost.cpu_dense(whole) + cost.cpu_sparse(gathered);
}

}  // namespace hearth::offline
