#pragma once
// The search for a block's scale that the encoders of core/codec.h share.
//
// Weights x are rounded to levels of a grid times a scale. For given levels q the best scale is a least-squares fit,
// sum(w x q) / sum(w q q), and lowers the squared error by sum(w x q)^2 / sum(w q q). Levels depend on the scale in turn:
// some scales near that which maps the extreme weight to the end of the grid are tried, and the best is refined by
// rounding and fitting in turns (Lloyd, "Least squares quantization in PCM", 1982). ggml's quantisers search alike.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "core/half.h"

namespace hearth::codec {

// Four floats in a register. Sums run over four lanes in a fixed order on every machine.
using f32x4 = float __attribute__((vector_size(16)));

inline f32x4 load(const float* p) {
  f32x4 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline f32x4 splat(float v) {
  return f32x4{v, v, v, v};
}
inline float sum(f32x4 v) {
  return (v[0] + v[2]) + (v[1] + v[3]);
}
// v > low ? v : low and v < high ? v : high: NaN gives the bound. (GCC makes four instructions of a comparison with a
// constant.)
inline f32x4 at_least(f32x4 v, f32x4 low) {
#if defined(__SSE__)
  return _mm_max_ps(v, low);
#else
  return v > low ? v : low;
#endif
}
inline f32x4 at_most(f32x4 v, f32x4 high) {
#if defined(__SSE__)
  return _mm_min_ps(v, high);
#else
  return v < high ? v : high;
#endif
}
// The nearest integer in [low, high], ties to even; NaN gives low. |low|, |high| < 2^22.
inline f32x4 round_clamped(f32x4 v, float low, float high) {
  const f32x4 shift = splat(0x1.8p23f);
  return (at_most(at_least(v, splat(low)), splat(high)) + shift) - shift;
}
inline float round_clamped(float v, float low, float high) {
  v = v > low ? v : low;
  v = v < high ? v : high;
  return (v + 0x1.8p23f) - 0x1.8p23f;
}

// The scale of a block that holds an infinity or NaN.
inline constexpr f16_t kNotANumber = 0x7E00;

// 1 / v, or 0 where that could overflow.
inline float reciprocal(float v) {
  return std::fabs(v) >= 0x1p-126f ? 1.0f / v : 0.0f;
}

// A block as the search sees it: weights times a power of two, so that the largest is in [0.5, 1) and no product leaves
// the range of f32; importance over its largest value. A column that the data never excites keeps a weight of 2^-20, so
// that it stays sane. Importance that is zero throughout, or none, is 1 throughout.
template <int n>
struct ScaledBlock {
  alignas(16) float x[n];
  alignas(16) float w[n];
  int exponent;  // weights are x * 2^exponent
  bool finite;   // all of them are; if not, the rest is undefined

  ScaledBlock(const float* row, const float* importance) {
    float largest = 0.0f, poison = 0.0f;
    for (int i = 0; i < n; ++i) largest = std::max(largest, std::fabs(row[i])), poison += row[i] * 0.0f;
    finite = poison == 0.0f && largest <= std::numeric_limits<float>::max();
    if (!finite) return;
    std::frexp(largest, &exponent);
    // In two steps, for a power of two beyond f32's range is needed when all weights are subnormal.
    const float first = std::ldexp(1.0f, -exponent / 2), second = std::ldexp(1.0f, -exponent - (-exponent / 2));
    for (int i = 0; i < n; ++i) x[i] = row[i] * first * second;
    float most = 0.0f;
    if (importance != nullptr) most = *std::max_element(importance, importance + n);
    for (int i = 0; i < n; ++i) w[i] = most > 0.0f ? std::max(0x1p-20f, importance[i] / most) : 1.0f;
  }

  // A scale as stored, and what a decoder reads there, in the units of x.
  f16_t store(float scale) const { return f32_to_f16(std::ldexp(scale, exponent)); }
  float read(f16_t stored) const { return std::ldexp(f16_to_f32(stored), -exponent); }
};

// Integers low..high.
template <int low, int high>
struct IntegerGrid {
  static constexpr float extreme = low;  // the level of largest magnitude
  static f32x4 nearest(f32x4 v) { return round_clamped(v, low, high); }
  static uint8_t code(float v) { return static_cast<uint8_t>(static_cast<int>(round_clamped(v, low, high)) - low); }
};

// Which scales are tried: those that map the extreme weight to the level Grid::extreme + i * step, |i| <= steps.
struct Candidates {
  int steps;
  float step;
};

// Error of x rounded to the grid times `scale`.
template <class Grid, int n>
float rounding_error(const float* x, const float* w, float scale) {
  const f32x4 inverse = splat(reciprocal(scale)), s = splat(scale);
  f32x4 total{};
  for (int i = 0; i < n; i += 4) {
    const f32x4 v = load(x + i), e = v - Grid::nearest(v * inverse) * s;
    total += load(w + i) * e * e;
  }
  return sum(total);
}

// The scale that makes the error of n weights smallest, among those tried; 0 if all weights are.
template <class Grid, int n>
float search_scale(const float* x, const float* w, Candidates candidates) {
  float extreme = 0.0f;
  for (int i = 0; i < n; ++i) {
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  }
  if (std::fabs(extreme) < 0x1p-60f) return 0.0f;  // below every scale that a super-block can tell from zero
  float best_xq = 0.0f, best_qq = 1.0f;
  const auto try_inverse = [&](float inverse) {
    const f32x4 in = splat(inverse);
    f32x4 xq{}, qq{};
    for (int i = 0; i < n; i += 4) {
      const f32x4 v = load(x + i), q = Grid::nearest(v * in), wq = load(w + i) * q;
      xq += wq * v;
      qq += wq * q;
    }
    const float a = sum(xq), b = sum(qq);
    if (!(b > 0.0f) || !(a * a * best_qq > best_xq * best_xq * b)) return false;
    best_xq = a, best_qq = b;
    return true;
  };
  for (int i = -candidates.steps; i <= candidates.steps; ++i) {
    try_inverse((Grid::extreme + static_cast<float>(i) * candidates.step) / extreme);
  }
  for (int i = 0; i < 4 && best_xq != 0.0f; ++i) {
    if (!try_inverse(best_qq / best_xq)) break;
  }
  return best_xq / best_qq;
}

// A super-block of n_sub sub-blocks with scales d * code, code in [code_low, code_high], |code_low| the largest.
template <int n_sub>
struct ScaledCodes {
  f16_t d;
  std::array<int, n_sub> scale;            // codes
  alignas(16) std::array<uint8_t, 256> q;  // levels' codes
};

template <class Grid, int n_sub, int code_low, int code_high>
ScaledCodes<n_sub> encode_scaled(const ScaledBlock<256>& b, Candidates candidates) {
  constexpr int size = 256 / n_sub;
  std::array<float, n_sub> scales;
  float extreme = 0.0f;
  for (int j = 0; j < n_sub; ++j) {
    scales[j] = search_scale<Grid, size>(b.x + j * size, b.w + j * size, candidates);
    if (std::fabs(scales[j]) > std::fabs(extreme)) extreme = scales[j];
  }
  ScaledCodes<n_sub> out{};
  out.d = b.store(extreme / code_low);
  float d = b.read(out.d);
  for (int j = 0; j < n_sub; ++j) {
    out.scale[j] = static_cast<int>(round_clamped(scales[j] * reciprocal(d), code_low, code_high));
  }
  // The codes have moved the scales: fit d to them, then each code to d.
  float xq = 0.0f, qq = 0.0f;
  for (int j = 0; j < n_sub; ++j) {
    const auto code = static_cast<float>(out.scale[j]);
    const f32x4 inverse = splat(reciprocal(d * code));
    f32x4 sub_xq{}, sub_qq{};
    for (int i = j * size; i < (j + 1) * size; i += 4) {
      const f32x4 v = load(b.x + i), q = Grid::nearest(v * inverse), wq = load(b.w + i) * q;
      sub_xq += wq * v;
      sub_qq += wq * q;
    }
    xq += code * sum(sub_xq);
    qq += code * code * sum(sub_qq);
  }
  if (qq > 0.0f) out.d = b.store(xq / qq), d = b.read(out.d);
  for (int j = 0; j < n_sub; ++j) {
    const float* x = b.x + j * size;
    const int middle = static_cast<int>(round_clamped(scales[j] * reciprocal(d), code_low, code_high));
    float least = std::numeric_limits<float>::infinity();
    for (int code = std::max(code_low, middle - 1); code <= std::min(code_high, middle + 1); ++code) {
      const float error = rounding_error<Grid, size>(x, b.w + j * size, d * static_cast<float>(code));
      if (error < least) least = error, out.scale[j] = code;
    }
    const float inverse = reciprocal(d * static_cast<float>(out.scale[j]));
    for (int i = 0; i < size; ++i) out.q[j * size + i] = Grid::code(x[i] * inverse);
  }
  return out;
}

}  // namespace hearth::codec
