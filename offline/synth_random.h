#pragma once
// Counter-based random numbers for synthetic weights: a value depends on (seed, tensor, index) alone, so that any
// thread can make any part of any tensor. Integer arithmetic and one multiplication: the same bits on every machine.
#include <cstdint>

namespace hearth::offline {

inline constexpr int64_t kSynthBlock = 32;  // values made together

// The constant component of the residual stream points along e_j = +1, -1, +1, …: its sum is zero over any even number
// of elements, so LayerNorm, which removes the mean, keeps it.
inline float constant_sign(int64_t j) {
  return (j & 1) == 0 ? 1.0f : -1.0f;
}

// SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014): a bijection that mixes all bits.
inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

class RandomStream {
 public:
  // Streams of one seed with different ids start at unrelated places of one sequence of period 2^64.
  RandomStream(uint64_t seed, uint64_t id) : key_(mix64(mix64(seed + kStep) + id * kStep)) {}

  uint64_t bits(uint64_t index) const { return mix64(key_ + index * kStep); }
  // Uniform in [0, n), n < 2^32.
  uint32_t below(uint64_t index, uint32_t n) const { return static_cast<uint32_t>(((bits(index) >> 32) * n) >> 32); }

  // out[j] = scale * x_j, j < 32: x has variance 1 and mean 0 and is orthogonal to e over the block. Before the
  // projection x_j is the sum of four 16-bit uniform numbers, normal enough for weights: no tail beyond 3.5 deviations,
  // and any inner product over a row is normal by the central limit theorem.
  void block(uint64_t index, float scale, float* out) const {
    int32_t sums[kSynthBlock];
    int32_t along_e = 0;
    for (int64_t j = 0; j < kSynthBlock; ++j) {
      const uint64_t b = bits(index * kSynthBlock + static_cast<uint64_t>(j));
      sums[j] = static_cast<int32_t>((b & 0xFFFF) + ((b >> 16) & 0xFFFF) + ((b >> 32) & 0xFFFF) + (b >> 48));
    }
    for (int64_t j = 0; j < kSynthBlock; j += 2) along_e += sums[j] - sums[j + 1];
    const float mean = static_cast<float>(along_e) / kSynthBlock;
    const float unit = scale * kUnit;
    for (int64_t j = 0; j < kSynthBlock; j += 2) {
      out[j] = (static_cast<float>(sums[j] - kMean) - mean) * unit;
      out[j + 1] = (static_cast<float>(sums[j + 1] - kMean) + mean) * unit;
    }
  }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, odd
  static constexpr int32_t kMean = 131070;                // of the sum: 4 * 65535 / 2
  // 1 / its deviation, sqrt(4 (2^32 - 1) / 12) = 37837.2, times sqrt(32 / 31) for the direction that is projected out.
  static constexpr float kUnit = 1.01600102f / 37837.2f;
  uint64_t key_;
};

}  // namespace hearth::offline
