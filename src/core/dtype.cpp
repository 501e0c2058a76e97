#include "core/dtype.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "core/blocks.h"
#include "core/codec.h"
#include "core/error.h"

namespace hearth {
namespace {

void f32_to_float(const void* row, float* out, int64_t n) {
  std::memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
}
void f32_from_float(const float* row, void* out, int64_t n) {
  std::memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
}

void f16_to_float(const void* row, float* out, int64_t n) {
  const auto* in = static_cast<const f16_t*>(row);
  for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(in[i]);
}
void f16_from_float(const float* row, void* out, int64_t n) {
  auto* o = static_cast<f16_t*>(out);
  for (int64_t i = 0; i < n; ++i) o[i] = f32_to_f16(row[i]);
}

void bf16_to_float(const void* row, float* out, int64_t n) {
  const auto* in = static_cast<const bf16_t*>(row);
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(in[i]);
}
void bf16_from_float(const float* row, void* out, int64_t n) {
  auto* o = static_cast<bf16_t*>(out);
  for (int64_t i = 0; i < n; ++i) o[i] = f32_to_bf16(row[i]);
}

void q8_0_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ8_0*>(row);
  for (int64_t b = 0; b < n / BlockQ8_0::size; ++b) {
    const float d = f16_to_f32(blocks[b].d);
    for (int i = 0; i < BlockQ8_0::size; ++i) out[b * BlockQ8_0::size + i] = d * static_cast<float>(blocks[b].qs[i]);
  }
}
// 1 / d, or 0 where that overflows: such a d is zero in f16, too, so the whole block is zero whatever its quants.
float inverse_scale(float d) {
  return std::fabs(d) >= 0x1p-127f ? 1.0f / d : 0.0f;
}
// std::round for |x| < 2^31, as arithmetic that compilers vectorise: the sum is exact in double, so nothing is rounded
// twice.
inline int round_half_away(float x) {
  return static_cast<int>(static_cast<double>(x) + std::copysign(0.5, static_cast<double>(x)));
}

// Same rounding as ggml's reference quantiser, so that files made by either are equal bit for bit.
void q8_0_from_float(const float* row, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ8_0*>(out);
  for (int64_t b = 0; b < n / BlockQ8_0::size; ++b) {
    const float* x = row + b * BlockQ8_0::size;
    float amax = 0.0f;
    for (int i = 0; i < BlockQ8_0::size; ++i) amax = std::max(amax, std::fabs(x[i]));
    const float d = amax / 127.0f;
    const float inverse = inverse_scale(d);
    blocks[b].d = f32_to_f16(d);
    for (int i = 0; i < BlockQ8_0::size; ++i) blocks[b].qs[i] = static_cast<int8_t>(round_half_away(x[i] * inverse));
  }
}

void q4_0_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ4_0*>(row);
  constexpr int half = BlockQ4_0::size / 2;
  for (int64_t b = 0; b < n / BlockQ4_0::size; ++b) {
    const float d = f16_to_f32(blocks[b].d);
    float* o = out + b * BlockQ4_0::size;
    for (int i = 0; i < half; ++i) {
      o[i] = d * static_cast<float>((blocks[b].qs[i] & 15) - 8);
      o[i + half] = d * static_cast<float>((blocks[b].qs[i] >> 4) - 8);
    }
  }
}
void q4_0_from_float(const float* row, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ4_0*>(out);
  constexpr int half = BlockQ4_0::size / 2;
  for (int64_t b = 0; b < n / BlockQ4_0::size; ++b) {
    const float* x = row + b * BlockQ4_0::size;
    float extreme = 0.0f;  // the value of largest magnitude, with its sign: it maps to -8
    for (int i = 0; i < BlockQ4_0::size; ++i) {
      if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
    }
    const float d = extreme / -8.0f;
    const float inverse = inverse_scale(d);
    blocks[b].d = f32_to_f16(d);
    for (int i = 0; i < half; ++i) {
      const auto lo = static_cast<uint8_t>(std::min(15.0f, x[i] * inverse + 8.5f));
      const auto hi = static_cast<uint8_t>(std::min(15.0f, x[i + half] * inverse + 8.5f));
      blocks[b].qs[i] = static_cast<uint8_t>(lo | (hi << 4));
    }
  }
}

constexpr DTypeTraits listed(uint32_t type, const char* name, int block_size, int block_bytes) {
  return {static_cast<DType>(type), name, block_size, block_bytes, nullptr, nullptr, nullptr};
}

template <auto encode>
void unweighted(const float* row, void* out, int64_t n) {
  encode(row, nullptr, out, n);
}
using Decode = void(const void*, float*, int64_t);
using Encode = void(const float*, const float*, void*, int64_t);
template <class Block, Decode decode, Encode encode>
constexpr DTypeTraits coded(DType type, const char* name, uint32_t file_type) {
  return {type, name, Block::size, sizeof(Block), decode, unweighted<encode>, encode, file_type};
}

// One row per format. Rows without functions let `inspect` account for the bytes of any GGUF.
constexpr std::array kTraits = {
    DTypeTraits{DType::f32, "f32", 1, 4, f32_to_float, f32_from_float, nullptr, 0},
    DTypeTraits{DType::f16, "f16", 1, 2, f16_to_float, f16_from_float, nullptr, 1},
    DTypeTraits{DType::bf16, "bf16", 1, 2, bf16_to_float, bf16_from_float, nullptr, 32},
    DTypeTraits{DType::q8_0, "q8_0", BlockQ8_0::size, sizeof(BlockQ8_0), q8_0_to_float, q8_0_from_float, nullptr, 7},
    DTypeTraits{DType::q4_0, "q4_0", BlockQ4_0::size, sizeof(BlockQ4_0), q4_0_to_float, q4_0_from_float,
                codec::q4_0_encode, 2},
    coded<BlockQ4_1, codec::q4_1_to_float, codec::q4_1_encode>(DType::q4_1, "q4_1", 3),
    coded<BlockQ5_0, codec::q5_0_to_float, codec::q5_0_encode>(DType::q5_0, "q5_0", 8),
    coded<BlockQ5_1, codec::q5_1_to_float, codec::q5_1_encode>(DType::q5_1, "q5_1", 9),
    listed(9, "q8_1", 32, 36),
    coded<BlockQ2_K, codec::q2_k_to_float, codec::q2_k_encode>(DType::q2_k, "q2_k", 10),
    coded<BlockQ3_K, codec::q3_k_to_float, codec::q3_k_encode>(DType::q3_k, "q3_k", 12),
    coded<BlockQ4_K, codec::q4_k_to_float, codec::q4_k_encode>(DType::q4_k, "q4_k", 15),
    coded<BlockQ5_K, codec::q5_k_to_float, codec::q5_k_encode>(DType::q5_k, "q5_k", 17),
    coded<BlockQ6_K, codec::q6_k_to_float, codec::q6_k_encode>(DType::q6_k, "q6_k", 18),
    listed(15, "q8_k", 256, 292),
    listed(16, "iq2_xxs", 256, 66),
    listed(17, "iq2_xs", 256, 74),
    listed(18, "iq3_xxs", 256, 98),
    listed(19, "iq1_s", 256, 50),
    coded<BlockIQ4_NL, codec::iq4_nl_to_float, codec::iq4_nl_encode>(DType::iq4_nl, "iq4_nl", 25),
    listed(21, "iq3_s", 256, 110),
    listed(22, "iq2_s", 256, 82),
    coded<BlockIQ4_XS, codec::iq4_xs_to_float, codec::iq4_xs_encode>(DType::iq4_xs, "iq4_xs", 30),
    listed(24, "i8", 1, 1),
    listed(25, "i16", 1, 2),
    listed(26, "i32", 1, 4),
    listed(27, "i64", 1, 8),
    listed(28, "f64", 1, 8),
    listed(29, "iq1_m", 256, 56),
    listed(34, "tq1_0", 256, 54),
    listed(35, "tq2_0", 256, 66),
    coded<BlockMXFP4, codec::mxfp4_to_float, codec::mxfp4_encode>(DType::mxfp4, "mxfp4", 38),
};

}  // namespace

const DTypeTraits* find_traits(uint32_t ggml_type) {
  for (const DTypeTraits& t : kTraits) {
    if (static_cast<uint32_t>(t.type) == ggml_type) return &t;
  }
  return nullptr;
}

const DTypeTraits& traits(DType type) {
  const DTypeTraits* t = find_traits(static_cast<uint32_t>(type));
  HEARTH_CHECK(t != nullptr, "type number {}", static_cast<uint32_t>(type));
  return *t;
}

std::span<const DTypeTraits> all_traits() {
  return kTraits;
}

std::string computable_names() {
  std::string names;
  for (const DTypeTraits& t : kTraits) {
    if (t.computable()) names += (names.empty() ? "" : ", ") + std::string(t.name);
  }
  return names;
}

std::optional<DType> parse_dtype(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const DTypeTraits& t : kTraits) {
    if (t.computable() && lower == t.name) return t.type;
  }
  return std::nullopt;
}

void quantize_row(DType type, const float* x, const float* importance, void* out, int64_t n) {
  const DTypeTraits& t = traits(type);
  HEARTH_CHECK(t.computable() && n % t.block_size == 0, "{} values of type {}", n, t.name);
  if (importance != nullptr && t.from_float_weighted != nullptr) {
    t.from_float_weighted(x, importance, out, n);
  } else {
    t.from_float(x, out, n);
  }
}

}  // namespace hearth
