#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace hearth::model {
namespace {

// The pair that turns `turns` times within the original context, as a real number.
double pair_of(const Rope& rope, int64_t n_rot, double turns) {
  return static_cast<double>(n_rot) * std::log(rope.yarn->original_context / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(rope.base));
}

}  // namespace

double yarn_magnitude(double factor, double m) {
  return factor > 1 ? 0.1 * m * std::log(factor) + 1 : 1;
}

std::vector<float> rope_frequencies(const Rope& rope, int64_t n_rot, std::span<const float> divisors) {
  const auto n = static_cast<size_t>(n_rot / 2);
  HEARTH_CHECK(divisors.empty() || divisors.size() == n);
  double begin = 0, end = 0;  // of the ramp
  if (rope.yarn) {
    begin = pair_of(rope, n_rot, rope.yarn->beta_fast), end = pair_of(rope, n_rot, rope.yarn->beta_slow);
    if (rope.yarn->truncates) begin = std::floor(begin), end = std::ceil(end);
    begin = std::max(begin, 0.0), end = std::min(end, static_cast<double>(n_rot - 1));
    if (begin == end) end += 0.001;
  }
  std::vector<float> frequencies(n);
  for (size_t i = 0; i < n; ++i) {
    double f = std::pow(rope.base, -2.0 * static_cast<double>(i) / static_cast<double>(n_rot)) / rope.linear_factor;
    if (!divisors.empty()) f /= static_cast<double>(divisors[i]);
    if (rope.yarn) {
      const double slow = std::clamp((static_cast<double>(i) - begin) / (end - begin), 0.0, 1.0);
      f = f / rope.yarn->factor * slow + f * (1 - slow);
    }
    frequencies[i] = static_cast<float>(f);
  }
  return frequencies;
}

}  // namespace hearth::model
