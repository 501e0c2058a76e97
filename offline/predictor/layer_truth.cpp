#include "offline/predictor/layer_truth.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace hearth::offline {

LayerTruth::LayerTruth(const FfnShard& shard, const NeuronRule& rule, std::vector<float> down_norms, int64_t n_embd,
                       Products& products, ThreadTeam& team)
    : shard_(shard),
      rule_(rule),
      down_norms_(std::move(down_norms)),
      n_embd_(n_embd),
      products_(products),
      team_(team) {}

const float* LayerTruth::losses(std::span<const f16_t> x, int64_t first, int64_t count) {
  const auto T = static_cast<int64_t>(x.size()) / n_embd_;
  if (const auto kept = kept_.find(x.data()); kept != kept_.end()) return kept->second.data() + first * T;
  loss_.resize(static_cast<size_t>(count * T));
  compute(tokens(x), first, count, loss_.data());
  return loss_.data();
}

const predictor::TokenProducts& LayerTruth::tokens(std::span<const f16_t> x) {
  if (!tokens_ || last_ != x.data()) {
    tokens_.reset();  // first, so that the two are never in memory at once
    tokens_.emplace(Matrix{DType::f16, static_cast<int64_t>(x.size()) / n_embd_, n_embd_, x.data()},
                    products_);
    last_ = x.data();
  }
  return *tokens_;
}

void LayerTruth::keep(std::span<const f16_t> x) {
  const auto T = static_cast<int64_t>(x.size()) / n_embd_;
  const auto n = static_cast<size_t>(T * n_ff());
  if (n * sizeof(float) > kKeptBytes) return;
  std::vector<float> loss(n);
  for (int64_t first = 0; first < n_ff(); first += kNeuronBlock) {
    compute(tokens(x), first, std::min(kNeuronBlock, n_ff() - first), loss.data() + first * T);
  }
  kept_[x.data()] = std::move(loss);
}

void LayerTruth::compute(const predictor::TokenProducts& x, int64_t first, int64_t count, float* loss) {
  const int64_t T = x.tokens();
  x.multiply(shard_.gate.slice_rows(first, count), loss);
  if (shard_.up) {
    up_.resize(static_cast<size_t>(count * T));
    x.multiply(shard_.up.slice_rows(first, count), up_.data());
  }
  team_.for_chunks(count, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t neuron = first + i;
      const float gate_bias = shard_.gate_bias ? shard_.gate_bias.data[neuron] : 0.0f;
      const float up_bias = shard_.up_bias ? shard_.up_bias.data[neuron] : 0.0f;
      const float norm = down_norms_[static_cast<size_t>(neuron)];
      float* row = loss + i * T;
      for (int64_t t = 0; t < T; ++t) {
        const float a = rule_.activate(row[t] + gate_bias);
        float value = std::fabs(a) > rule_.threshold ? a : 0.0f;
        if (shard_.up && value != 0) {
          const float u = up_[static_cast<size_t>(i * T + t)] + up_bias;
          value *= rule_.up_relu ? std::max(0.0f, u) : u;
        }
        row[t] = std::fabs(value) * norm;
      }
    }
  });
}

SampleScores::SampleScores(const Predictor& predictor, std::span<const f16_t> x, int64_t n_embd, Products& products)
    : predictor_(predictor), T_(static_cast<int64_t>(x.size()) / n_embd) {
  const Matrix inputs{DType::f16, T_, n_embd, x.data()};
  reader_.emplace(inputs, products);
  if (!predictor.fc1) return;
  const int64_t rank = predictor.fc1.rows;
  std::vector<float> by_row(static_cast<size_t>(rank * T_));  // [rank][T]
  reader_->multiply(predictor.fc1, by_row.data());
  for (int64_t r = 0; r < rank; ++r) {
    const float bias = predictor.fc1_bias ? predictor.fc1_bias.data[r] : 0.0f;
    for (int64_t t = 0; t < T_; ++t) {
      float& v = by_row[static_cast<size_t>(r * T_ + t)];
      v += bias;
      if (predictor.relu) v = std::max(v, 0.0f);
    }
  }
  hidden_.resize(by_row.size());
  predictor::transpose(by_row.data(), rank, T_, hidden_.data());
  reader_.emplace(Matrix{DType::f32, T_, rank, hidden_.data()}, products);
}

void SampleScores::scores(int64_t first, int64_t count, std::vector<float>& score) {
  score.resize(static_cast<size_t>(count * T_));
  reader_->multiply(predictor_.fc2.slice_rows(first, count), score.data());
}

}  // namespace hearth::offline
