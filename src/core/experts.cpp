#include "core/experts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"

namespace hearth {
namespace {

using Scores = std::array<float, kMostExperts>;
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kSmallestSum = 6.103515625e-5f;  // llama.cpp's: the smallest normal number of f16

// x = exp(x - max x) / sum.
void softmax(std::span<float> x) {
  const float largest = *std::max_element(x.begin(), x.end());
  float sum = 0;
  for (float& v : x) sum += v = std::exp(v - largest);
  for (float& v : x) v /= sum;
}

// Leaves the experts of the best groups; the others will not be selected.
void keep_best_groups(const Routing& r, std::span<float> selecting) {
  if (r.n_groups_used >= r.n_groups) return;
  const int64_t size = r.n_expert / r.n_groups;
  Scores of_group;
  for (int64_t g = 0; g < r.n_groups; ++g) {
    float best = kNever, second = kNever;
    for (const float s : selecting.subspan(static_cast<size_t>(g * size), static_cast<size_t>(size))) {
      second = std::max(second, std::min(best, s));
      best = std::max(best, s);
    }
    of_group[static_cast<size_t>(g)] = size > 1 && r.n_best_of_group > 1 ? best + second : best;
  }
  std::array<bool, kMostExperts> kept{};
  for (int64_t k = 0; k < r.n_groups_used; ++k) {
    const auto best = std::max_element(of_group.begin(), of_group.begin() + r.n_groups);
    kept[static_cast<size_t>(best - of_group.begin())] = true;
    *best = kNever;
  }
  for (int64_t i = 0; i < r.n_expert; ++i) {
    if (!kept[static_cast<size_t>(i / size)]) selecting[static_cast<size_t>(i)] = kNever;
  }
}

}  // namespace

bool gpu_computes(const Expert& e) {
  return (!e.ffn.up || e.ffn.up.type == e.ffn.gate.type) && e.ffn.n() % 32 == 0 && e.ffn.gate.cols % 8 == 0;
}

bool same_shape(const FfnShard& a, const FfnShard& b) {
  const auto same = [](const Matrix& m, const Matrix& n) {
    return m.type == n.type && m.rows == n.rows && m.cols == n.cols;
  };
  return same(a.gate, b.gate) && same(a.up, b.up) && same(a.down, b.down) && same(a.down_t, b.down_t);
}

bool gpu_computes(const ExpertSet& set) {
  const auto routed = set.experts.first(set.experts.size() - (set.shared ? 1 : 0));
  return std::ranges::all_of(set.experts, [](const Expert& e) { return static_cast<bool>(e) && gpu_computes(e); }) &&
         std::ranges::all_of(routed, [&](const Expert& e) { return same_shape(e.ffn, routed[0].ffn); });
}

void choose_experts(const Routing& r, const float* logits, Vector correction, int32_t* ids, float* weights) {
  HEARTH_CHECK(r.n_used >= 1 && r.n_used <= r.n_expert && r.n_expert <= kMostExperts, "{} experts of {}", r.n_used,
               r.n_expert);
  const auto n = static_cast<size_t>(r.n_expert), k = static_cast<size_t>(r.n_used);
  if (std::any_of(logits, logits + n, [](float x) { return std::isnan(x); })) {
    std::iota(ids, ids + k, 0);
    std::fill(weights, weights + k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  Scores scores, selecting;
  std::copy(logits, logits + n, scores.begin());
  if (r.gating == Gating::softmax) softmax({scores.data(), n});
  if (r.gating == Gating::sigmoid) {
    for (size_t i = 0; i < n; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  }
  for (size_t i = 0; i < n; ++i) selecting[i] = scores[i] + (correction ? correction.data[i] : 0.0f);
  keep_best_groups(r, {selecting.data(), n});
  std::array<bool, kMostExperts> chosen{};
  for (size_t j = 0; j < k; ++j) {  // not by marking scores: one that is -inf must not be chosen twice
    size_t best = n;
    for (size_t i = 0; i < n; ++i) {
      if (!chosen[i] && (best == n || selecting[i] > selecting[best])) best = i;
    }
    chosen[best] = true;
  }
  for (size_t i = 0, j = 0; i < n; ++i) {
    if (!chosen[i]) continue;
    ids[j] = static_cast<int32_t>(i);
    weights[j++] = scores[i];
  }
  const std::span<float> w(weights, k);
  if (r.gating == Gating::selected_softmax) softmax(w);
  if (r.normalize) {
    const float sum = std::max(std::accumulate(w.begin(), w.end(), 0.0f), kSmallestSum);
    for (float& v : w) v /= sum;
  }
  for (float& v : w) v *= r.scale;
}

}  // namespace hearth
