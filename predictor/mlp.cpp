#include "predictor/mlp.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/error.h"

namespace hearth::predictor {
namespace {

constexpr double kBudget = 1.3;  // scores that count as predicted, in units of the active neurons

// Values that are learnt, with their gradient.
class Parameter {
 public:
  Parameter(const std::vector<float>& values, int64_t rows, int64_t cols, float decay, Products& products)
      : products_(products),
        decay_(decay),
        value_(products.upload({DType::f32, rows, cols, values.data()})),
        gradient_(products.allocate(rows, cols)),
        first_(products.allocate(rows, cols)),
        second_(products.allocate(rows, cols)) {}

  const Block& value() const { return *value_; }
  const Block& gradient() const { return *gradient_; }
  void step(float rate, int step) {
    products_.adam(value_, gradient_, first_, second_, {.rate = rate, .decay = decay_, .step = step});
  }
  void read(std::vector<float>& to) const {
    to.resize(static_cast<size_t>(value_->rows * value_->cols));
    products_.read(value_, to.data());
  }

 private:
  Products& products_;
  float decay_;
  OwnedBlock value_, gradient_, first_, second_;
};

// The start of training, in terms of inputs scaled to mean 0 and deviation 1.
struct Start {
  std::vector<float> mean, deviation;  // [n] of the inputs
  std::vector<float> fc1, fc2;         // [rank][n], [n_ff][rank]
};

Start start_from(const LowRank& low, const InputMoments& inputs, int64_t rank) {
  const int64_t n = low.n_embd, n_ff = low.n_ff, half = rank / 2;
  Start s;
  s.mean = inputs.mean;
  for (const float v : inputs.variance) s.deviation.push_back(std::sqrt(std::max(v, 1e-12f)));
  s.fc1.resize(static_cast<size_t>(rank * n));
  for (int64_t r = 0; r < half; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      const float v = low.fc1[static_cast<size_t>(r * n + c)] * s.deviation[static_cast<size_t>(c)];
      s.fc1[static_cast<size_t>(r * n + c)] = v;
      s.fc1[static_cast<size_t>((half + r) * n + c)] = -v;
    }
  }
  // Each neuron's score in units of its own spread, so that the loss sees probabilities, not extremes.
  s.fc2.resize(static_cast<size_t>(n_ff * rank));
  for (int64_t i = 0; i < n_ff; ++i) {
    const float* row = low.fc2.data() + i * low.rank;
    double square = 0;
    for (int64_t r = 0; r < half; ++r) square += static_cast<double>(row[r]) * row[r];  // hidden values: variance 1
    const auto scale = static_cast<float>(2 / std::sqrt(std::max(square, 1e-20)));
    for (int64_t r = 0; r < half; ++r) {
      s.fc2[static_cast<size_t>(i * rank + r)] = row[r] * scale;
      s.fc2[static_cast<size_t>(i * rank + half + r)] = -row[r] * scale;
    }
  }
  return s;
}

class Trainer {
 public:
  Trainer(Start start, int64_t n, int64_t n_ff, int64_t rank, const MlpOptions& options, Products& products,
          ThreadTeam& team)
      : n_(n),
        n_ff_(n_ff),
        rank_(rank),
        options_(options),
        products_(products),
        team_(team),
        mean_(std::move(start.mean)),
        deviation_(std::move(start.deviation)),
        bias1_(static_cast<size_t>(rank), 0.0f),
        bias2_(static_cast<size_t>(n_ff), -1.0f),
        fc1_(start.fc1, rank, n, options.weight_decay, products),
        fc2_(start.fc2, n_ff, rank, options.weight_decay, products),
        b1_(bias1_, 1, rank, 0, products),
        b2_(bias2_, 1, n_ff, 0, products),
        inputs_(products.allocate(options.batch, n)),
        hidden_(products.allocate(options.batch, rank)),
        scores_(products.allocate(options.batch, n_ff)) {}

  Mlp train(const MlpSamples& samples, const MlpSamples& validation) {
    set_weights(samples);
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
        gradients(samples, order.data() + first, std::min(options_.batch, samples.T - first));
        ++step;
        const float rate =
            options_.learning_rate * 0.5f *
            (1 + std::cos(static_cast<float>(M_PI) * static_cast<float>(step) / static_cast<float>(total)));
        for (Parameter* p : {&fc1_, &fc2_, &b1_, &b2_}) p->step(rate, step);
        b1_.read(bias1_), b2_.read(bias2_);
      }
      const double before = best_recall;
      keep();
      worse = best_recall > before ? 0 : worse + 1;
    }
    return best;
  }

 private:
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

  // inputs_ [B][n], scaled.
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
    write(x_, B, n_, inputs_);
  }

  // hidden_ [B][rank] after relu, scores_ [B][n_ff] without bias2_; both also on the host.
  void forward(int64_t B) {
    const Block hidden = hidden_->row_part(0, B), scores = scores_->row_part(0, B);
    products_.multiply(inputs_->row_part(0, B), transposed(fc1_.value()), hidden);
    read(hidden, h_);
    for (size_t i = 0; i < h_.size(); ++i) h_[i] = std::max(0.0f, h_[i] + bias1_[i % static_cast<size_t>(rank_)]);
    write(h_, B, rank_, hidden_);
    products_.multiply(hidden, transposed(fc2_.value()), scores);
    read(scores, score_);
  }

  void gradients(const MlpSamples& samples, const int64_t* ids, int64_t B) {
    load(samples, ids, B);
    forward(B);
    // score_ becomes d loss / d score.
    const float scale = 1.0f / static_cast<float>(B);
    team_.for_chunks(B, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t i = 0; i < n_ff_; ++i) {
          float& s = score_[static_cast<size_t>(t * n_ff_ + i)];
          const float loss = samples.loss[ids[t] * n_ff_ + i];
          const float p = 1 / (1 + std::exp(-(s + bias2_[static_cast<size_t>(i)])));
          s = loss > 0 ? (p - 1) * positive_ * std::clamp(loss / mean_loss_, 0.1f, 4.0f) * scale : p * scale;
        }
      }
    });
    write_sum(score_, n_ff_, b2_);
    write(score_, B, n_ff_, scores_);
    backward(B);
  }

  void backward(int64_t B) {
    const Block hidden = hidden_->row_part(0, B), scores = scores_->row_part(0, B);
    products_.multiply(transposed(scores), hidden, fc2_.gradient());
    products_.multiply(scores, fc2_.value(), hidden);  // from here on d loss / d hidden
    read(hidden, d_h_);
    for (size_t i = 0; i < d_h_.size(); ++i) {
      if (!(h_[i] > 0)) d_h_[i] = 0;
    }
    write_sum(d_h_, rank_, b1_);
    write(d_h_, B, rank_, hidden_);
    products_.multiply(transposed(hidden), inputs_->row_part(0, B), fc1_.gradient());
  }

  void read(const Block& from, std::vector<float>& to) {
    to.resize(static_cast<size_t>(from.rows * from.cols));
    products_.read(from, to.data());
  }
  void write(const std::vector<float>& from, int64_t rows, int64_t cols, const OwnedBlock& to) {
    products_.write({DType::f32, rows, cols, from.data()}, to->row_part(0, rows));
  }
  // The gradient of a bias: sums over tokens.
  void write_sum(const std::vector<float>& values, int64_t cols, Parameter& bias) {
    sum_.assign(static_cast<size_t>(cols), 0.0f);
    for (size_t i = 0; i < values.size(); i += sum_.size()) {
      for (size_t c = 0; c < sum_.size(); ++c) sum_[c] += values[i + c];
    }
    products_.write({DType::f32, 1, cols, sum_.data()}, bias.gradient());
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
          const float loss = v.loss[ids[static_cast<size_t>(t)] * n_ff_ + i];
          scored.push_back({score_[static_cast<size_t>(t * n_ff_ + i)] + bias2_[static_cast<size_t>(i)], loss});
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
    m.rank = rank_;
    fc1_.read(m.fc1), b1_.read(m.fc1_bias), fc2_.read(m.fc2);
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
  std::vector<float> bias1_, bias2_;  // as they are in b1_ and b2_
  Parameter fc1_, fc2_, b1_, b2_;
  OwnedBlock inputs_, hidden_, scores_;  // [batch][n], [batch][rank], [batch][n_ff]
  std::vector<float> x_, h_, d_h_, score_, sum_;
  float positive_ = 1, mean_loss_ = 1;
};

}  // namespace

Mlp train_mlp(const LowRank& start, const InputMoments& inputs, int64_t rank, const MlpSamples& train,
              const MlpSamples& validation, const MlpOptions& options, Products& products, ThreadTeam& team) {
  HEARTH_CHECK(rank % 2 == 0 && rank / 2 <= start.rank);
  Trainer trainer(start_from(start, inputs, rank), start.n_embd, start.n_ff, rank, options, products, team);
  return trainer.train(train, validation);
}

}  // namespace hearth::predictor
