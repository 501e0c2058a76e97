#pragma once
// As core/scale_search.h, for weights that are a scale times q, q in 0..levels, plus an offset: x ~ scale * q - min.
#include "core/scale_search.h"

namespace hearth::codec {

struct Affine {
  float scale = 0.0f, min = 0.0f;
};

// Which scales are tried: those by which the range of the weights spans levels + first + i * step of them, i < steps.
struct Spans {
  float first, step;
  int steps;
};

// The nearest q of x, as a float.
template <int levels>
f32x4 nearest_level(f32x4 x, f32x4 min, f32x4 inverse) {
  return round_clamped((x + min) * inverse, 0, levels);
}

template <int n, int levels>
float affine_error(const float* x, const float* w, Affine a) {
  const f32x4 inverse = splat(reciprocal(a.scale)), scale = splat(a.scale), min = splat(a.min);
  f32x4 total{};
  for (int i = 0; i < n; i += 4) {
    const f32x4 v = load(x + i), e = v + min - nearest_level<levels>(v, min, inverse) * scale;
    total += load(w + i) * e * e;
  }
  return sum(total);
}

// The scale (>= 0) and min that make the error of n weights smallest, among those tried. With `unsigned_min`, min >= 0.
template <int n, int levels, bool unsigned_min>
Affine search_affine(const float* x, const float* w, Spans spans) {
  f32x4 all_w{}, all_wx{};
  float low = x[0], high = x[0];
  for (int i = 0; i < n; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
  if (unsigned_min) low = std::min(low, 0.0f);
  if (high - low < 0x1p-60f) return {0.0f, -low};
  for (int i = 0; i < n; i += 4) all_w += load(w + i), all_wx += load(w + i) * load(x + i);
  const float sum_w = sum(all_w), sum_x = sum(all_wx);
  // For the levels q of a scale and min, the least-squares fit of both; its gain is what it takes off sum(w x x).
  float best_gain = -std::numeric_limits<float>::infinity();
  Affine best{(high - low) / levels, -low};
  const auto try_levels = [&](float min, float inverse) {
    const f32x4 m = splat(min), in = splat(inverse);
    f32x4 all_q{}, all_qq{}, all_xq{};
    for (int i = 0; i < n; i += 4) {
      const f32x4 v = load(x + i), q = nearest_level<levels>(v, m, in), wq = load(w + i) * q;
      all_q += wq;
      all_qq += wq * q;
      all_xq += wq * v;
    }
    const float q = sum(all_q), qq = sum(all_qq), xq = sum(all_xq);
    const float determinant = sum_w * qq - q * q;
    if (!(determinant > 0.0f)) return false;
    float scale = (sum_w * xq - sum_x * q) / determinant, offset = (qq * sum_x - q * xq) / determinant;
    if (unsigned_min && offset > 0.0f) offset = 0.0f, scale = xq / qq;
    const float gain = scale * xq + offset * sum_x;
    if (!(scale > 0.0f) || !(gain > best_gain)) return false;
    best_gain = gain, best = {scale, -offset};
    return true;
  };
  for (int i = 0; i < spans.steps; ++i) {
    try_levels(-low, (levels + spans.first + static_cast<float>(i) * spans.step) / (high - low));
  }
  for (int i = 0; i < 4 && try_levels(best.min, reciprocal(best.scale)); ++i) {
  }
  return best;
}

// A super-block of n_sub sub-blocks with scales d * scale and minima dmin * min, codes in 0..code_max.
template <int n_sub>
struct AffineCodes {
  f16_t d, dmin;
  std::array<int, n_sub> scale, min;  // codes
  std::array<uint8_t, 256> q;
};

template <int n_sub, int levels, int code_max>
class AffineEncoder {
 public:
  // `reach`: codes of a sub-block that far from the rounded ones are tried, too.
  AffineEncoder(const ScaledBlock<256>& b, Spans spans, int reach) : b_(b), reach_(reach) {
    float most_scale = 0.0f, most_min = 0.0f;
    for (int j = 0; j < n_sub; ++j) {
      fits_[j] = search_affine<size, levels, true>(b.x + j * size, b.w + j * size, spans);
      most_scale = std::max(most_scale, fits_[j].scale), most_min = std::max(most_min, fits_[j].min);
    }
    set_scales(most_scale / code_max, most_min / code_max);
  }

  AffineCodes<n_sub> encode(int passes) {
    choose_codes();
    for (int i = 1; i < passes; ++i) {
      fit_scales();
      choose_codes();
    }
    for (int j = 0; j < n_sub; ++j) {
      const Affine a = decoded(out_.scale[j], out_.min[j]);
      const float inverse = reciprocal(a.scale);
      for (int i = j * size; i < (j + 1) * size; ++i) {
        out_.q[i] = static_cast<uint8_t>(round_clamped((b_.x[i] + a.min) * inverse, 0, levels));
      }
    }
    return out_;
  }

 private:
  static constexpr int size = 256 / n_sub;

  void set_scales(float d, float dmin) {
    out_.d = b_.store(d), out_.dmin = b_.store(dmin);
    d_ = b_.read(out_.d), dmin_ = b_.read(out_.dmin);
  }
  Affine decoded(int scale, int min) const { return {d_ * static_cast<float>(scale), dmin_ * static_cast<float>(min)}; }

  void choose_codes() {
    for (int j = 0; j < n_sub; ++j) {
      const int scale = static_cast<int>(round_clamped(fits_[j].scale * reciprocal(d_), 0, code_max));
      const int min = static_cast<int>(round_clamped(fits_[j].min * reciprocal(dmin_), 0, code_max));
      out_.scale[j] = scale, out_.min[j] = min;
      if (reach_ == 0) continue;
      float least = std::numeric_limits<float>::infinity();
      for (int s = std::max(0, scale - reach_); s <= std::min(code_max, scale + reach_); ++s) {
        for (int m = std::max(0, min - reach_); m <= std::min(code_max, min + reach_); ++m) {
          const float error = affine_error<size, levels>(b_.x + j * size, b_.w + j * size, decoded(s, m));
          if (error < least) least = error, out_.scale[j] = s, out_.min[j] = m;
        }
      }
    }
  }

  // The least-squares fit of d and dmin to the codes and levels as they are: x ~ d * (scale * q) - dmin * min.
  void fit_scales() {
    float aa = 0, am = 0, mm = 0, ax = 0, mx = 0;
    for (int j = 0; j < n_sub; ++j) {
      const Affine a = decoded(out_.scale[j], out_.min[j]);
      const f32x4 inverse = splat(reciprocal(a.scale)), min = splat(a.min);
      f32x4 w{}, x{}, q{}, qq{}, xq{};
      for (int i = j * size; i < (j + 1) * size; i += 4) {
        const f32x4 v = load(b_.x + i), weight = load(b_.w + i), level = nearest_level<levels>(v, min, inverse);
        w += weight, x += weight * v, q += weight * level, qq += weight * level * level, xq += weight * level * v;
      }
      const auto s = static_cast<float>(out_.scale[j]), m = static_cast<float>(out_.min[j]);
      aa += s * s * sum(qq), am += s * m * sum(q), mm += m * m * sum(w), ax += s * sum(xq), mx += m * sum(x);
    }
    const float determinant = aa * mm - am * am;
    if (determinant > 1e-6f * aa * mm) {
      const float d = (ax * mm - mx * am) / determinant, dmin = (ax * am - mx * aa) / determinant;
      if (d > 0.0f && dmin > 0.0f) set_scales(d, dmin);
    } else if (mm == 0.0f && ax > 0.0f) {
      set_scales(ax / aa, 0.0f);
    }
  }

  const ScaledBlock<256>& b_;
  int reach_;
  std::array<Affine, n_sub> fits_;
  float d_ = 0.0f, dmin_ = 0.0f;  // as a decoder reads them
  AffineCodes<n_sub> out_{};
};

}  // namespace hearth::codec
