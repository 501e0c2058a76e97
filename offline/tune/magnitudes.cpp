#include "offline/tune/magnitudes.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/error.h"

namespace hearth::offline {
namespace {

constexpr int kDroppedBits = 17;  // of the 23 of a float's mantissa
constexpr size_t kBins = size_t{1} << (31 - kDroppedBits);

size_t bin_of(float magnitude) {
  return std::bit_cast<uint32_t>(magnitude) >> kDroppedBits;
}
// The largest float of a bin.
float end_of(size_t bin) {
  return std::bit_cast<float>(static_cast<uint32_t>(((bin + 1) << kDroppedBits) - 1));
}

}  // namespace

MagnitudeHistogram::MagnitudeHistogram() : counts_(kBins) {}

void MagnitudeHistogram::add(float magnitude) {
  ++total_;
  if (magnitude == 0.0f) {
    ++zeros_;
  } else {
    ++counts_[bin_of(magnitude)];
  }
}

double MagnitudeHistogram::density(float threshold) const {
  if (total_ == 0) return 0;
  uint64_t above = 0;
  for (size_t b = 0; b < kBins; ++b) {
    if (end_of(b) > threshold) above += counts_[b];
  }
  return static_cast<double>(above) / static_cast<double>(total_);
}

float MagnitudeHistogram::threshold_for(double density) const {
  const double wanted = density * static_cast<double>(total_);
  uint64_t above = total_ - zeros_;
  if (static_cast<double>(above) <= wanted) return 0.0f;
  for (size_t b = 0; b < kBins; ++b) {
    above -= counts_[b];
    if (counts_[b] > 0 && static_cast<double>(above) <= wanted) return end_of(b);
  }
  return end_of(kBins - 1);
}

MagnitudeHistogram& MagnitudeHistogram::operator+=(const MagnitudeHistogram& other) {
  for (size_t b = 0; b < kBins; ++b) counts_[b] += other.counts_[b];
  total_ += other.total_, zeros_ += other.zeros_;
  return *this;
}

ThresholdCounts::ThresholdCounts(std::vector<float> thresholds, int64_t n_ff, int64_t n_expert)
    : thresholds_(std::move(thresholds)),
      n_ff_(n_ff),
      counts_(static_cast<size_t>(n_ff) * (thresholds_.size() + 1)),
      energy_(counts_.size()),
      chosen_(static_cast<size_t>(n_expert)) {
  HEARTH_CHECK(std::is_sorted(thresholds_.begin(), thresholds_.end()));
}

void ThresholdCounts::add(const float* activation, const float* value, const float* down_norms, int64_t begin,
                          int64_t end) {
  const size_t width = thresholds_.size() + 1;
  for (int64_t i = begin; i < end; ++i) {
    const float magnitude = std::fabs(activation[i]);
    const auto bucket = std::lower_bound(thresholds_.begin(), thresholds_.end(), magnitude) - thresholds_.begin();
    const size_t at = static_cast<size_t>(i) * width + static_cast<size_t>(bucket);
    const double contribution = static_cast<double>(value[i]) * down_norms[i];
    ++counts_[at];
    energy_[at] += contribution * contribution;
  }
}

void ThresholdCounts::add_choice(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    if (static_cast<size_t>(id) < chosen_.size()) ++chosen_[static_cast<size_t>(id)];
  }
}

std::vector<uint64_t> ThresholdCounts::active(size_t k) const {
  if (!chosen_.empty()) return chosen_;
  const size_t width = thresholds_.size() + 1;
  std::vector<uint64_t> above(static_cast<size_t>(n_ff_));
  for (size_t i = 0; i < above.size(); ++i) {
    for (size_t b = k + 1; b < width; ++b) above[i] += counts_[i * width + b];
  }
  return above;
}

std::vector<double> ThresholdCounts::frequencies(size_t k) const {
  std::vector<double> f;
  for (const uint64_t n : active(k))
    f.push_back(tokens_ > 0 ? static_cast<double>(n) / static_cast<double>(tokens_) : 0);
  return f;
}

double ThresholdCounts::density(size_t k) const {
  const size_t width = thresholds_.size() + 1;
  uint64_t above = 0;
  for (size_t i = 0; i < counts_.size(); ++i) above += i % width > k ? counts_[i] : 0;
  return tokens_ > 0 ? static_cast<double>(above) / (static_cast<double>(tokens_) * static_cast<double>(n_ff_)) : 0;
}

double ThresholdCounts::dropped_energy(size_t k) const {
  const size_t width = thresholds_.size() + 1;
  double sum = 0;
  for (size_t i = 0; i < static_cast<size_t>(n_ff_); ++i) {
    for (size_t b = 0; b <= k; ++b) sum += energy_[i * width + b];
  }
  return tokens_ > 0 ? sum / static_cast<double>(tokens_) : 0;
}

}  // namespace hearth::offline
