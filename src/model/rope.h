#pragma once
// Rotary position embedding (Su et al. 2021): frequencies, and how they are changed for longer contexts.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace hearth::model {

// YaRN (Peng et al. 2023): pairs that turn less often than beta_slow within the original context have their frequency
// divided by the factor, those that turn more often than beta_fast keep theirs, and between lies a ramp.
struct Yarn {
  double factor = 1, original_context = 0;
  double beta_fast = 32, beta_slow = 1;
  bool truncates = true;  // the ramp begins and ends at whole pairs
};

struct Rope {
  double base = 10000.0;
  double linear_factor = 1.0;  // frequencies are divided by this
  std::optional<Yarn> yarn;
  std::string factors;            // the tensor that has a divisor for every frequency; empty: there is none
  float attention_factor = 1.0f;  // multiplies cos and sin
};

// 0.1 m ln(factor) + 1 of a factor above 1: YaRN's correction of the softmax's temperature.
double yarn_magnitude(double factor, double m = 1);

// [n_rot / 2] frequencies: the angle of pair i at position p is p times frequency i. `divisors`: as many, or none.
std::vector<float> rope_frequencies(const Rope& rope, int64_t n_rot, std::span<const float> divisors);

}  // namespace hearth::model
