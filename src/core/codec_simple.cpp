// Types of 32-weight blocks with one scale: Q4_0, Q4_1, Q5_0, Q5_1 and MXFP4.
//
// Without importance they round as ggml's reference quantiser does, so that files made by either are equal bit for bit.
#include "core/affine_search.h"
#include "core/blocks.h"
#include "core/codec.h"
#include "core/dtype.h"

namespace hearth::codec {
namespace {

constexpr int kSize = 32, kHalf = kSize / 2;

struct Range {
  float low, high;
  float extreme;  // the value of largest magnitude, with its sign; the first of equal ones
  bool finite;
};
Range range_of(const float* x) {
  f32x4 low = load(x), high = low, poison = low * 0.0f;
  for (int i = 4; i < kSize; i += 4) {
    const f32x4 v = load(x + i);
    low = at_most(v, low), high = at_least(v, high);
    poison += v * 0.0f;
  }
  Range r{low[0], high[0], 0.0f, sum(poison) == 0.0f};
  for (int l = 1; l < 4; ++l) r.low = std::min(r.low, low[l]), r.high = std::max(r.high, high[l]);
  r.extreme = r.high > -r.low ? r.high : r.low;
  if (r.high == -r.low) {
    r.extreme = *std::find_if(x, x + kSize, [&](float v) { return std::fabs(v) == r.high; });
  }
  return r;
}

// f16 of a least-squares fit: it may exceed weights of up to 65504, but not become infinite.
f16_t store_fit(const ScaledBlock<kSize>& x, float v) {
  const f16_t h = x.store(v);
  return (h & 0x7FFF) == 0x7C00 ? static_cast<f16_t>(h - 1) : h;
}

struct Quants {
  uint8_t q[kSize];
};
// Round half up to 0..top. NaN, from an overflow of the range of f32, gives 0.
uint8_t round_half_up(float v, float top) {
  v += 0.5f;
  v = v > 0.0f ? v : 0.0f;
  return static_cast<uint8_t>(static_cast<int>(v < top ? v : top));
}

void pack_low(const Quants& q, uint8_t* qs) {
  for (int i = 0; i < kHalf; ++i) qs[i] = static_cast<uint8_t>((q.q[i] & 15) | (q.q[i + kHalf] & 15) << 4);
}
void pack_high(const Quants& q, uint8_t* qh) {
  for (int i = 0; i < kSize / 8; ++i) {
    int bits = 0;
    for (int l = 0; l < 8; ++l) bits |= q.q[i * 8 + l] >> 4 << l;
    qh[i] = static_cast<uint8_t>(bits);
  }
}
int low_bits(const uint8_t* qs, int i) {
  return i < kHalf ? qs[i] & 15 : qs[i - kHalf] >> 4;
}
int high_bit(const uint8_t* qh, int i) {
  return qh[i / 8] >> (i % 8) & 1;
}

// d * (q - levels / 2 - 1/2): the extreme becomes the lowest level.
template <int levels>
f16_t encode_signed(const float* x, const float* importance, Quants& q) {
  constexpr int low = -(levels + 1) / 2;
  if (importance == nullptr) {
    const Range r = range_of(x);
    if (!r.finite) return kNotANumber;
    const float d = r.extreme / low, inverse = reciprocal(d);
    for (int i = 0; i < kSize; ++i) q.q[i] = round_half_up(x[i] * inverse - low, levels);
    return f32_to_f16(d);
  }
  using Grid = IntegerGrid<low, levels + low>;
  const ScaledBlock<kSize> b(x, importance);
  if (!b.finite) return kNotANumber;
  const f16_t d = b.store(search_scale<Grid, kSize>(b.x, b.w, {9, 0.1f}));
  const float inverse = reciprocal(b.read(d));
  for (int i = 0; i < kSize; ++i) q.q[i] = Grid::code(b.x[i] * inverse);
  return d;
}

struct ScaleAndOffset {
  f16_t d, m;
};
template <int levels>
ScaleAndOffset encode_offset(const float* x, const float* importance, Quants& q) {
  if (importance == nullptr) {
    const Range r = range_of(x);
    if (!r.finite) return {kNotANumber, 0};
    const float d = (r.high - r.low) / levels, inverse = reciprocal(d);
    for (int i = 0; i < kSize; ++i) q.q[i] = round_half_up((x[i] - r.low) * inverse, levels);
    return {f32_to_f16(d), f32_to_f16(r.low)};
  }
  const ScaledBlock<kSize> b(x, importance);
  if (!b.finite) return {kNotANumber, 0};
  const Affine fit = search_affine<kSize, levels, false>(b.x, b.w, {-0.9f, 0.1f, 19});
  const ScaleAndOffset s = {b.store(fit.scale), store_fit(b, -fit.min)};
  const float inverse = reciprocal(b.read(s.d)), m = b.read(s.m);
  for (int i = 0; i < kSize; ++i) q.q[i] = static_cast<uint8_t>(round_clamped((b.x[i] - m) * inverse, 0, levels));
  return s;
}

}  // namespace

void q4_0_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ4_0*>(out);
  for (int64_t k = 0; k < n / kSize; ++k) {
    Quants q{};
    blocks[k].d = encode_signed<15>(row + k * kSize, importance ? importance + k * kSize : nullptr, q);
    pack_low(q, blocks[k].qs);
  }
}

void q4_1_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ4_1*>(row);
  for (int64_t k = 0; k < n / kSize; ++k) {
    const float d = f16_to_f32(blocks[k].d), m = f16_to_f32(blocks[k].m);
    for (int i = 0; i < kSize; ++i) out[k * kSize + i] = d * static_cast<float>(low_bits(blocks[k].qs, i)) + m;
  }
}
void q4_1_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ4_1*>(out);
  for (int64_t k = 0; k < n / kSize; ++k) {
    Quants q{};
    const auto s = encode_offset<15>(row + k * kSize, importance ? importance + k * kSize : nullptr, q);
    blocks[k].d = s.d, blocks[k].m = s.m;
    pack_low(q, blocks[k].qs);
  }
}

void q5_0_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ5_0*>(row);
  for (int64_t k = 0; k < n / kSize; ++k) {
    const BlockQ5_0& b = blocks[k];
    const float d = f16_to_f32(b.d);
    for (int i = 0; i < kSize; ++i) {
      out[k * kSize + i] = d * static_cast<float>((low_bits(b.qs, i) | high_bit(b.qh, i) << 4) - 16);
    }
  }
}
void q5_0_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ5_0*>(out);
  for (int64_t k = 0; k < n / kSize; ++k) {
    Quants q{};
    blocks[k].d = encode_signed<31>(row + k * kSize, importance ? importance + k * kSize : nullptr, q);
    pack_low(q, blocks[k].qs);
    pack_high(q, blocks[k].qh);
  }
}

void q5_1_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ5_1*>(row);
  for (int64_t k = 0; k < n / kSize; ++k) {
    const BlockQ5_1& b = blocks[k];
    const float d = f16_to_f32(b.d), m = f16_to_f32(b.m);
    for (int i = 0; i < kSize; ++i) {
      out[k * kSize + i] = d * static_cast<float>(low_bits(b.qs, i) | high_bit(b.qh, i) << 4) + m;
    }
  }
}
void q5_1_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ5_1*>(out);
  for (int64_t k = 0; k < n / kSize; ++k) {
    Quants q{};
    const auto s = encode_offset<31>(row + k * kSize, importance ? importance + k * kSize : nullptr, q);
    blocks[k].d = s.d, blocks[k].m = s.m;
    pack_low(q, blocks[k].qs);
    pack_high(q, blocks[k].qh);
  }
}

namespace {

float mxfp4_scale(int e) {
  return std::ldexp(1.0f, e - 128);
}

// The nearest level of v, v in units of half a level of E2M1; of two equally near ones that of smaller magnitude.
uint8_t mxfp4_code(float v) {
  constexpr float borders[] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
  const float magnitude = std::fabs(v);
  int code = 0;
  for (const float b : borders) code += magnitude > b;
  return static_cast<uint8_t>(v < 0.0f && code > 0 ? code | 8 : code);
}

float mxfp4_error(const ScaledBlock<kSize>& b, float inverse, float scale) {
  float total = 0.0f;
  for (int i = 0; i < kSize; ++i) {
    const float e = b.x[i] - scale * static_cast<float>(kLevelsE2M1[mxfp4_code(b.x[i] * inverse)]);
    total += b.w[i] * e * e;
  }
  return total;
}

}  // namespace

void mxfp4_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockMXFP4*>(row);
  for (int64_t k = 0; k < n / kSize; ++k) {
    const float d = mxfp4_scale(blocks[k].e);
    for (int i = 0; i < kSize; ++i) {
      out[k * kSize + i] = d * static_cast<float>(kLevelsE2M1[low_bits(blocks[k].qs, i)]);
    }
  }
}

// The exponent is that of the largest weight less that of the largest level, 4 = 2^2, as the standard and ggml have it.
// With importance the exponents beside it are tried, too.
void mxfp4_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockMXFP4*>(out);
  for (int64_t k = 0; k < n / kSize; ++k) {
    const float* x = row + k * kSize;
    const Range r = range_of(x);
    Quants q{};
    if (!r.finite) {
      blocks[k].e = 255;
      std::fill_n(q.q, kSize, static_cast<uint8_t>(7));
      pack_low(q, blocks[k].qs);
      continue;
    }
    int exponent = 0;
    std::frexp(r.extreme, &exponent);  // |extreme| in [1/2, 1) * 2^exponent
    int e = r.extreme == 0.0f ? 0 : std::max(0, exponent - 1 - 2 + 127);
    if (importance != nullptr && r.extreme != 0.0f) {
      const ScaledBlock<kSize> b(x, importance + k * kSize);
      const int middle = e;
      float least = std::numeric_limits<float>::infinity();
      for (int c = std::max(0, middle - 1); c <= middle + 1; ++c) {
        const float scale = std::ldexp(1.0f, c - 128 - b.exponent);
        const float error = mxfp4_error(b, 1.0f / scale, scale);
        if (error < least) least = error, e = c;
      }
    }
    blocks[k].e = static_cast<uint8_t>(e);
    // 2^(128 - e) may be beyond f32's range: two steps of at most 2^64 are not, and they round nothing that decides.
    const float root = std::ldexp(1.0f, (128 - e) / 2), rest = std::ldexp(1.0f, 128 - e - (128 - e) / 2);
    for (int i = 0; i < kSize; ++i) q.q[i] = mxfp4_code(x[i] * root * rest);
    pack_low(q, blocks[k].qs);
  }
}

}  // namespace hearth::codec
