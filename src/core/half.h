#pragma once
// IEEE 754 binary16 and bfloat16 as storage types: bit-exact scalar conversions, round to nearest even.
// SIMD code converts with instructions; these are for loading, tests and the scalar oracle.
#include <bit>
#include <cstdint>
#include <cstring>

namespace hearth {

using f16_t = uint16_t;   // binary16 bits
using bf16_t = uint16_t;  // bfloat16 bits

inline float f16_to_f32(f16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1Fu;
  const uint32_t mantissa = h & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in binary32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline f16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u)
    return static_cast<f16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));  // NaN, kept quiet
  if (magnitude >= 0x477FF000u) return static_cast<f16_t>(sign | 0x7C00u);     // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal or zero: adding 2^-1's ulp grid rounds to multiples of 2^-24
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<f16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3F000000u));
  }
  const uint32_t round = 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<f16_t>(sign | ((magnitude + round - 0x38000000u) >> 13));
}

inline float bf16_to_f32(bf16_t b) {
  return std::bit_cast<float>(static_cast<uint32_t>(b) << 16);
}

inline bf16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<bf16_t>((bits >> 16) | 0x40u);  // NaN, kept quiet
  return static_cast<bf16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace hearth
