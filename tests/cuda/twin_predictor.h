#pragma once
// Random predictors on the GPU device and on the reference, with thresholds that no score is near.
#include <algorithm>
#include <optional>

#include "twin_ffn.h"

namespace hearth::test {

struct PredictorShape {
  int64_t n = 0, n_embd = 0, rank = 0;  // rank 0: fc2 alone
  DType fc1 = DType::f16, fc2 = DType::f16;
  bool relu = false, biased = false;
};

class TwinPredictor {
 public:
  // Neurons are named with probability `density`, whatever their scores: the thresholds are set so.
  TwinPredictor(Device& ref, Device& gpu, std::mt19937& rng, const PredictorShape& shape, Act ref_in, double density)
      : shape_(shape),
        fc2_(ref, gpu, rng, shape.fc2, shape.n, shape.rank != 0 ? shape.rank : shape.n_embd, 0.1f),
        bias_(ref, gpu, random_normal(rng, static_cast<size_t>(std::max<int64_t>(shape.rank, 1)), 0.1f)),
        threshold_(ref, gpu, std::vector<float>(static_cast<size_t>(shape.n))) {
    if (shape.rank != 0) fc1_ = TwinMatrix(ref, gpu, rng, shape.fc1, shape.rank, shape.n_embd, 0.1f);
    const std::vector<float> score = scores(ref, ref_in);
    double squares = 0;
    for (const float s : score) squares += static_cast<double>(s) * s;
    // Ten times the error that the 8-bit form's steps may make.
    const auto margin = static_cast<float>(0.02 * std::sqrt(squares / static_cast<double>(score.size())));
    std::vector<float> threshold;
    std::bernoulli_distribution named(density);
    for (const float s : score) {
      named_.push_back(named(rng));
      threshold.push_back(named_.back() ? s - margin : s + margin);
    }
    threshold_ = Twin<float>(ref, gpu, threshold);
  }
  Predictor on(int s) const {
    Predictor p;
    if (shape_.rank != 0) {
      p.fc1 = fc1_.on(s);
      if (shape_.biased) p.fc1_bias = {bias_.on(s), shape_.rank};
    }
    p.relu = shape_.relu, p.fc2 = fc2_.on(s), p.threshold = {threshold_.on(s), shape_.n};
    return p;
  }
  // The named ones of neurons [begin, end), numbered from begin.
  std::vector<int32_t> named(int64_t begin, int64_t end) const {
    std::vector<int32_t> ids;
    for (int64_t k = begin; k < end; ++k) {
      if (named_[static_cast<size_t>(k)]) ids.push_back(static_cast<int32_t>(k - begin));
    }
    return ids;
  }

 private:
  // By the reference's ordinary products.
  std::vector<float> scores(Device& ref, Act in) const {
    std::vector<float> hidden(static_cast<size_t>(shape_.rank)), score(static_cast<size_t>(shape_.n));
    std::vector<std::byte> q8(ref.q8_bytes(std::max<int64_t>(shape_.rank, 1)));
    Act h = in;
    if (shape_.rank != 0) {
      h = {hidden.data(), is_quantized(shape_.fc2) ? q8.data() : nullptr};
      const MatmulPart first{
          .w = fc1_.on(kRef), .bias = shape_.biased ? Vector{bias_.on(kRef), shape_.rank} : Vector{}, .y = h.x};
      ref.matmul({&first, 1}, in, 1);
      if (shape_.relu) std::for_each(hidden.begin(), hidden.end(), [](float& v) { v = std::max(v, 0.0f); });
      ref.quantize(h, 1, shape_.rank);
    }
    const MatmulPart second{.w = fc2_.on(kRef), .y = score.data()};
    ref.matmul({&second, 1}, h, 1);
    return score;
  }

  PredictorShape shape_;
  TwinMatrix fc1_, fc2_;
  Twin<float> bias_, threshold_;
  std::vector<bool> named_;
};

}  // namespace hearth::test
