#include "offline/profile/activation_counter.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace hearth::offline {
namespace {

constexpr int64_t kPiece = 512;         // neurons handed to a thread at once
constexpr int64_t kNever = -(1 << 30);  // farther back than any window

}  // namespace

float NeuronRule::activate(float z) const {
  switch (act) {
    case Activation::relu:
      return z > 0 ? z : 0;
    case Activation::fat_relu:
      return z > act_threshold ? z : 0;
    case Activation::relu2:
      return z > 0 ? z * z : 0;
    case Activation::silu:
      return z / (1 + std::exp(-z));
    case Activation::gelu:
      return 0.5f * z * (1 + std::erf(z * 0.70710678f));
    case Activation::gelu_tanh:
      return 0.5f * z * (1 + std::tanh(0.79788456f * (z + 0.044715f * z * z * z)));
    case Activation::clamped_silu: {
      const float x = std::min(z, act_threshold);
      return x / (1 + std::exp(-kClampedSiluAlpha * x));
    }
  }
  HEARTH_CHECK(false);
  return 0;
}

float NeuronRule::up_factor(float u) const {
  if (act == Activation::clamped_silu) return std::clamp(u, -act_threshold, act_threshold) + 1.0f;
  return up_relu ? std::max(0.0f, u) : u;
}

ActivationCounter::ActivationCounter(ThreadTeam& team, const NeuronRule& rule, std::vector<float> down_norms)
    : team_(team), rule_(rule), down_norms_(std::move(down_norms)), last_active_(down_norms_.size(), kNever) {}

void ActivationCounter::begin_sequence() {
  std::fill(last_active_.begin(), last_active_.end(), kNever);
  position_ = 0;
}

void ActivationCounter::add(const float* gate, const float* up, int64_t T, bool heldout,
                            model::LayerStatistics& stats) {
  const auto n_ff = static_cast<int64_t>(down_norms_.size());
  HEARTH_CHECK(stats.n_ff() == n_ff, "{} neurons, expected {}", stats.n_ff(), n_ff);
  if (heldout) {
    stats.active_heldout.resize(down_norms_.size());
    team_.for_chunks(n_ff, kPiece, [&](int64_t begin, int64_t end, int) { add_heldout(gate, T, begin, end, stats); });
    return;
  }
  stats.impact.resize(down_norms_.size());
  overlaps_.assign(static_cast<size_t>((n_ff + kPiece - 1) / kPiece * T), {});
  team_.for_chunks(n_ff, kPiece, [&](int64_t begin, int64_t end, int) {
    add_piece(gate, up, T, begin, end, overlaps_.data() + begin / kPiece * T, stats);
  });
  add_shares(T, stats);
  position_ += T;
}

void ActivationCounter::add_piece(const float* gate, const float* up, int64_t T, int64_t begin, int64_t end,
                                  Overlap* overlap, model::LayerStatistics& stats) {
  const auto n_ff = static_cast<int64_t>(down_norms_.size());
  for (int64_t t = 0; t < T; ++t) {
    const int64_t position = position_ + t;
    Overlap& o = overlap[t];
    for (int64_t i = begin; i < end; ++i) {
      const float a = rule_.activate(gate[t * n_ff + i]);
      if (!(std::fabs(a) > rule_.threshold)) continue;
      const auto n = static_cast<size_t>(i);
      float value = a;
      if (up != nullptr) value *= rule_.up_factor(up[t * n_ff + i]);
      ++stats.active[n];
      stats.impact[n] += static_cast<double>(std::fabs(value)) * down_norms_[n];
      ++o.active;
      o.previous += last_active_[n] == position - 1 ? 1 : 0;
      o.recent += last_active_[n] >= position - model::kRecentTokens ? 1 : 0;
      last_active_[n] = position;
    }
    for (size_t k = 0; k < model::kUnionTokens.size(); ++k) {
      const int64_t first = position - model::kUnionTokens[k] + 1;
      o.unions[k] = static_cast<uint32_t>(std::count_if(last_active_.begin() + begin, last_active_.begin() + end,
                                                        [=](int64_t p) { return p >= first; }));
    }
  }
}

void ActivationCounter::add_heldout(const float* gate, int64_t T, int64_t begin, int64_t end,
                                    model::LayerStatistics& stats) const {
  const auto n_ff = static_cast<int64_t>(down_norms_.size());
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = begin; i < end; ++i) {
      if (std::fabs(rule_.activate(gate[t * n_ff + i])) > rule_.threshold) {
        ++stats.active_heldout[static_cast<size_t>(i)];
      }
    }
  }
}

void ActivationCounter::add_shares(int64_t T, model::LayerStatistics& stats) const {
  const size_t pieces = overlaps_.size() / static_cast<size_t>(T);
  for (int64_t t = 0; t < T; ++t) {
    Overlap sum;
    for (size_t p = 0; p < pieces; ++p) {
      const Overlap& o = overlaps_[p * static_cast<size_t>(T) + static_cast<size_t>(t)];
      sum.active += o.active, sum.previous += o.previous, sum.recent += o.recent;
      for (size_t k = 0; k < sum.unions.size(); ++k) sum.unions[k] += o.unions[k];
    }
    for (size_t k = 0; k < sum.unions.size(); ++k) {
      if (position_ + t + 1 < model::kUnionTokens[k]) continue;  // the text has not that many tokens yet
      stats.unions[k].neurons += sum.unions[k];
      ++stats.unions[k].windows;
    }
    if (sum.active == 0) continue;
    if (position_ + t >= 1) {
      stats.previous.sum += static_cast<double>(sum.previous) / sum.active;
      ++stats.previous.tokens;
    }
    if (position_ + t >= model::kRecentTokens) {  // only where all of the recent tokens exist
      stats.recent.sum += static_cast<double>(sum.recent) / sum.active;
      ++stats.recent.tokens;
    }
  }
}

}  // namespace hearth::offline
