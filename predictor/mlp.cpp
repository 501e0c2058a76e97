#include "predictor/mlp.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/error.h"

namespace hearth::predictor {
namespace {

constexpr int64_t kPiece = 4096;  // values a thread updates at once
constexpr float kBeta1 = 0.9f, kBeta2 = 0.999f, kEpsilon = 1e-8f;
constexpr double kBudget = 1.3;  // scores that count as predicted, in units of the active neurons

// AdamW (arXiv 1711.05101) on one array.
class Adam {
 public:
  Adam(std::vector<float>& values, float decay)
      : values_(values), decay_(decay), first_(values.size()), second_(values.size()) {}

  void step(const std::vector<float>& gradient, float rate, int t, ThreadTeam& team) {
    const float c1 = 1 - std::pow(kBeta1, static_cast<float>(t)), c2 = 1 - std::pow(kBeta2, static_cast<float>(t));
    team.for_chunks(static_cast<int64_t>(values_.size()), kPiece, [&](int64_t begin, int64_t end, int) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        first_[i] = kBeta1 * first_[i] + (1 - kBeta1) * gradient[i];
        second_[i] = kBeta2 * second_[i] + (1 - kBeta2) * gradient[i] * gradient[i];
        const float update = first_[i] / c1 / (std::sqrt(second_[i] / c2) + kEpsilon);
        values_[i] -= rate * (update + decay_ * values_[i]);
      }
    });
  }

 private:
  std::vector<float>& values_;
  float decay_;
  std::vector<float> first_, second_;
};

class Trainer {
 public:
  Trainer(const LowRank& start, const InputMoments& inputs, int64_t rank, const MlpOptions& options, Products& products,
          ThreadTeam& team)
      : n_(start.n_embd), n_ff_(start.n_ff), rank_(rank), options_(options), products_(products), team_(team) {
    HEARTH_CHECK(rank % 2 == 0 && rank / 2 <= start.rank);
    scale_inputs(inputs);
    start_from(start);
  }

  Mlp train(const MlpSamples& samples, const MlpSamples& validation) {
    set_weights(samples);
    Adam fc1(fc1_, options_.weight_decay), fc2(fc2_, options_.weight_decay), b1(b1_, 0), b2(b2_, 0);
    std::vector<int64_t> order(static_cast<size_t>(samples.T));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 rng(options_.seed);
    Mlp best;
    double best_recall = -1;
    const auto keep = [&] {
      const double r = recall(validation);
      best.recall.push_back(r);
      if (r <= best_recall) return;
      best_recall = r;
      std::vector<double> history = std::move(best.recall);
      best = folded();
      best.recall = std::move(history);
    };
    keep();
    int step = 0, worse = 0;
    const int steps_per_epoch = static_cast<int>((samples.T + options_.batch - 1) / options_.batch);
    const int total = options_.epochs * steps_per_epoch;
    for (int epoch = 0; epoch < options_.epochs && worse < options_.patience; ++epoch) {
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng() % i]);
      for (int64_t first = 0; first < samples.T; first += options_.batch) {
        const int64_t count = std::min(options_.batch, samples.T - first);
        gradient(samples, order.data() + first, count);
        ++step;
        const float rate =
            options_.learning_rate * 0.5f *
            (1 + std::cos(static_cast<float>(M_PI) * static_cast<float>(step) / static_cast<float>(total)));
        fc1.step(d_fc1_, rate, step, team_), fc2.step(d_fc2_, rate, step, team_);
        b1.step(d_b1_, rate, step, team_), b2.step(d_b2_, rate, step, team_);
      }
      const double before = best_recall;
      keep();
      worse = best_recall > before ? 0 : worse + 1;
    }
    return best;
  }

 private:
  // Training sees (x - mean) / deviation; folded() undoes it.
  void scale_inputs(const InputMoments& inputs) {
    mean_ = inputs.mean;
    for (int64_t c = 0; c < n_; ++c) {
      const float v = inputs.covariance[static_cast<size_t>(c * n_ + c)];
      deviation_.push_back(std::sqrt(std::max(v, 1e-12f)));
    }
  }

  void start_from(const LowRank& start) {
    const int64_t half = rank_ / 2;
    fc1_.resize(static_cast<size_t>(rank_ * n_));
    b1_.assign(static_cast<size_t>(rank_), 0.0f);
    for (int64_t r = 0; r < half; ++r) {
      for (int64_t c = 0; c < n_; ++c) {
        const float v = start.fc1[static_cast<size_t>(r * n_ + c)] * deviation_[static_cast<size_t>(c)];
        fc1_[static_cast<size_t>(r * n_ + c)] = v;
        fc1_[static_cast<size_t>((half + r) * n_ + c)] = -v;
      }
    }
    // Each neuron's score in units of its own spread, so that the loss sees probabilities, not extremes.
    fc2_.resize(static_cast<size_t>(n_ff_ * rank_));
    b2_.assign(static_cast<size_t>(n_ff_), -1.0f);
    for (int64_t i = 0; i < n_ff_; ++i) {
      const float* row = start.fc2.data() + i * start.rank;
      double square = 0;
      for (int64_t r = 0; r < half; ++r)
        square += static_cast<double>(row[r]) * row[r];  // hidden values have variance 1
      const auto scale = static_cast<float>(2 / std::sqrt(std::max(square, 1e-20)));
      for (int64_t r = 0; r < half; ++r) {
        fc2_[static_cast<size_t>(i * rank_ + r)] = row[r] * scale;
        fc2_[static_cast<size_t>(i * rank_ + half + r)] = -row[r] * scale;
      }
    }
  }

  // A token's term in the cross-entropy: 1 where the neuron is inactive; where it is active as many times the inactive
  // ones per active one, and more for those that lose more, up to four times.
  void set_weights(const MlpSamples& samples) {
    const auto n = static_cast<size_t>(n_ff_ * samples.T);
    double sum = 0;
    size_t active = 0;
    for (size_t i = 0; i < n; ++i) {
      if (samples.loss[i] > 0) sum += static_cast<double>(samples.loss[i]), ++active;
    }
    mean_loss_ = active > 0 ? static_cast<float>(sum / static_cast<double>(active)) : 1.0f;
    const double inactive = static_cast<double>(n - active);
    positive_ = static_cast<float>(std::clamp(active > 0 ? inactive / static_cast<double>(active) : 1.0, 1.0, 20.0));
  }

  void load(const MlpSamples& samples, const int64_t* ids, int64_t B) {
    x_.resize(static_cast<size_t>(B * n_));
    team_.for_chunks(B, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        float* row = x_.data() + t * n_;
        traits(DType::f16).to_float(samples.x.data() + ids[t] * n_, row, n_);
        for (int64_t c = 0; c < n_; ++c) {
          row[c] = (row[c] - mean_[static_cast<size_t>(c)]) / deviation_[static_cast<size_t>(c)];
        }
      }
    });
  }

  // h_ [B][rank] after relu, score_ [B][n_ff].
  void forward(int64_t B) {
    h_.resize(static_cast<size_t>(B * rank_));
    score_.resize(static_cast<size_t>(B * n_ff_));
    products_.multiply(fc1_.data(), rank_, x_.data(), B, n_, h_.data());
    for (int64_t t = 0; t < B; ++t) {
      for (int64_t r = 0; r < rank_; ++r) {
        float& v = h_[static_cast<size_t>(t * rank_ + r)];
        v = std::max(0.0f, v + b1_[static_cast<size_t>(r)]);
      }
    }
    products_.multiply(fc2_.data(), n_ff_, h_.data(), B, rank_, score_.data());
  }

  void gradient(const MlpSamples& samples, const int64_t* ids, int64_t B) {
    load(samples, ids, B);
    forward(B);
    // score_ becomes d loss / d score.
    const float scale = 1.0f / static_cast<float>(B);
    team_.for_chunks(B, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t i = 0; i < n_ff_; ++i) {
          float& s = score_[static_cast<size_t>(t * n_ff_ + i)];
          const float loss = samples.loss[i * samples.T + ids[t]];
          const float p = 1 / (1 + std::exp(-(s + b2_[static_cast<size_t>(i)])));
          s = loss > 0 ? (p - 1) * positive_ * std::clamp(loss / mean_loss_, 0.1f, 4.0f) * scale : p * scale;
        }
      }
    });
    d_b2_.assign(static_cast<size_t>(n_ff_), 0.0f);
    for (int64_t t = 0; t < B; ++t) {
      for (int64_t i = 0; i < n_ff_; ++i) d_b2_[static_cast<size_t>(i)] += score_[static_cast<size_t>(t * n_ff_ + i)];
    }
    backward(B);
  }

  void backward(int64_t B) {
    const auto transposed = [](const std::vector<float>& in, int64_t rows, int64_t cols) {
      std::vector<float> out(in.size());
      transpose(in.data(), rows, cols, out.data());
      return out;
    };
    const std::vector<float> ht = transposed(h_, B, rank_), gt = transposed(score_, B, n_ff_);
    d_fc2_.resize(fc2_.size());
    products_.multiply(ht.data(), rank_, gt.data(), n_ff_, B, d_fc2_.data());  // [n_ff][rank]
    const std::vector<float> fc2t = transposed(fc2_, n_ff_, rank_);
    std::vector<float> dh(h_.size());
    products_.multiply(fc2t.data(), rank_, score_.data(), B, n_ff_, dh.data());
    d_b1_.assign(static_cast<size_t>(rank_), 0.0f);
    for (size_t i = 0; i < dh.size(); ++i) {
      if (!(h_[i] > 0)) dh[i] = 0;
      d_b1_[i % static_cast<size_t>(rank_)] += dh[i];
    }
    const std::vector<float> dht = transposed(dh, B, rank_), xt = transposed(x_, B, n_);
    d_fc1_.resize(fc1_.size());
    products_.multiply(xt.data(), n_, dht.data(), rank_, B, d_fc1_.data());  // [rank][n]
  }

  // Share of the loss that the best-scored neurons hold, as many as kBudget times the active ones over all tokens.
  double recall(const MlpSamples& v) {
    std::vector<int64_t> ids(static_cast<size_t>(options_.batch));
    std::vector<std::pair<float, float>> scored;  // score, loss
    double all = 0;
    size_t active = 0;
    const int64_t T = std::min<int64_t>(v.T, 1024);  // an even sample: a million scores tell enough
    for (int64_t first = 0; first < T; first += options_.batch) {
      const int64_t B = std::min(options_.batch, T - first);
      for (int64_t t = 0; t < B; ++t) ids[static_cast<size_t>(t)] = (first + t) * v.T / T;
      load(v, ids.data(), B);
      forward(B);
      for (int64_t t = 0; t < B; ++t) {
        for (int64_t i = 0; i < n_ff_; ++i) {
          const float loss = v.loss[i * v.T + ids[static_cast<size_t>(t)]];
          scored.push_back({score_[static_cast<size_t>(t * n_ff_ + i)] + b2_[static_cast<size_t>(i)], loss});
          all += static_cast<double>(loss);
          active += loss > 0 ? 1 : 0;
        }
      }
    }
    const auto budget = std::min(scored.size(), static_cast<size_t>(kBudget * static_cast<double>(active)));
    if (all <= 0 || budget == 0) return 1;
    std::nth_element(scored.begin(), scored.begin() + static_cast<ptrdiff_t>(budget - 1), scored.end(),
                     [](const auto& a, const auto& b) { return a > b; });
    double kept = 0;
    for (size_t i = 0; i < budget; ++i) kept += static_cast<double>(scored[i].second);
    return kept / all;
  }

  // In terms of the inputs as they are.
  Mlp folded() const {
    Mlp m;
    m.rank = rank_, m.fc1 = fc1_, m.fc1_bias = b1_, m.fc2 = fc2_;
    for (int64_t r = 0; r < rank_; ++r) {
      double shift = 0;
      for (int64_t c = 0; c < n_; ++c) {
        float& v = m.fc1[static_cast<size_t>(r * n_ + c)];
        v /= deviation_[static_cast<size_t>(c)];
        shift += static_cast<double>(v) * mean_[static_cast<size_t>(c)];
      }
      m.fc1_bias[static_cast<size_t>(r)] -= static_cast<float>(shift);
    }
    return m;
  }

  int64_t n_, n_ff_, rank_;
  MlpOptions options_;
  Products& products_;
  ThreadTeam& team_;
  std::vector<float> mean_, deviation_;
  std::vector<float> fc1_, b1_, fc2_, b2_;
  std::vector<float> d_fc1_, d_b1_, d_fc2_, d_b2_;
  std::vector<float> x_, h_, score_;
  float positive_ = 1, mean_loss_ = 1;
};

}  // namespace

Mlp train_mlp(const LowRank& start, const InputMoments& inputs, int64_t rank, const MlpSamples& train,
              const MlpSamples& validation, const MlpOptions& options, Products& products, ThreadTeam& team) {
  return Trainer(start, inputs, rank, options, products, team).train(train, validation);
}

}  // namespace hearth::predictor
