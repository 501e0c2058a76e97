#pragma once
// Seeded random inputs for tests: the seed is printed by SCOPED_TRACE in the callers so that a failure can be repeated.
#include <cstdint>
#include <random>
#include <vector>

namespace hearth::test {

inline std::vector<float> random_normal(std::mt19937& rng, size_t n, float std = 1.0f, float mean = 0.0f) {
  std::normal_distribution<float> d(mean, std);
  std::vector<float> v(n);
  for (float& x : v) x = d(rng);
  return v;
}
inline int64_t random_int(std::mt19937& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

}  // namespace hearth::test
