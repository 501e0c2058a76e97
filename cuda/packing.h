#pragma once
// How rows of quantised weights lie in GPU memory. Plain C++ and constexpr: the CPU packs rows with it, kernels pack
// blocks that came over the link, and tests need no GPU.
//
// A file's blocks are 17 to 210 bytes, which no wide load can be aligned to. A packed row has their fields apart, each
// in column order: the low bits of the codes, their high bits, a scale record for every 32 weights, a super-scale for
// every 256. A type is a row of the table in packed_format().
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "core/blocks.h"
#include "core/dtype.h"
#include "core/error.h"

namespace hearth::cuda {

// How a weight comes from its code q: w = s * (q - offset) - m, or s * level[q]. What makes s and m:
enum class Scaling {
  half,        // s: binary16
  half_min,    // s and -m: binary16
  exponent,    // s: E8M0, for twice the level
  super_min,   // s = d * byte, m = dmin * byte
  super_pair,  // the same with nibbles of one byte, for each 16 weights
  super_sign,  // s = d * signed byte
};
enum class Levels { none, iq4, e2m1 };

struct PackedFormat {
  int low_bits, high_bits;  // of a code
  Levels levels = Levels::none;
  int group = 32;  // weights that share s and m
  Scaling scaling = Scaling::half;
  int offset = 0;

  constexpr int64_t low_bytes() const { return 4 * low_bits; }  // of 32 weights, as all but the last
  constexpr int64_t high_bytes() const { return 4 * high_bits; }
  constexpr int64_t scale_bytes() const {
    if (scaling == Scaling::half_min) return 4;
    return scaling == Scaling::exponent || (scaling == Scaling::super_sign && group == 32) ? 1 : 2;
  }
  constexpr int64_t super_bytes() const {  // of 256 weights
    if (scaling == Scaling::super_min || scaling == Scaling::super_pair) return 4;
    return scaling == Scaling::super_sign ? 2 : 0;
  }
};

// No bits for types that are not packed.
constexpr PackedFormat packed_format(DType type) {
  switch (type) {
    case DType::q8_0:
      return {8, 0};
    case DType::q4_0:
      return {4, 0, Levels::none, 32, Scaling::half, 8};
    case DType::q4_1:
      return {4, 0, Levels::none, 32, Scaling::half_min};
    case DType::q5_0:
      return {4, 1, Levels::none, 32, Scaling::half, 16};
    case DType::q5_1:
      return {4, 1, Levels::none, 32, Scaling::half_min};
    case DType::q2_k:
      return {2, 0, Levels::none, 16, Scaling::super_pair};
    case DType::q3_k:
      return {2, 1, Levels::none, 16, Scaling::super_sign, 4};
    case DType::q4_k:
      return {4, 0, Levels::none, 32, Scaling::super_min};
    case DType::q5_k:
      return {4, 1, Levels::none, 32, Scaling::super_min};
    case DType::q6_k:
      return {4, 2, Levels::none, 16, Scaling::super_sign, 32};
    case DType::iq4_nl:
      return {4, 0, Levels::iq4, 32, Scaling::half};
    case DType::iq4_xs:
      return {4, 0, Levels::iq4, 32, Scaling::super_sign};
    case DType::mxfp4:
      return {4, 0, Levels::e2m1, 32, Scaling::exponent};
    default:
      return {};
  }
}

constexpr bool is_packed(DType type) {
  return packed_format(type).low_bits > 0;
}

// Byte offsets of a packed row's fields behind its low bits, and bytes from row to row.
struct PackedRow {
  int64_t high, scales, supers, stride;
};
// Rows begin at whole sectors of memory. Words may be read that end behind a field: they end within the row.
constexpr PackedRow packed_row(PackedFormat f, int64_t cols) {
  const auto up = [](int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; };
  const int64_t groups = cols / 32;
  PackedRow at{};
  at.high = groups * f.low_bytes();
  at.scales = at.high + groups * f.high_bytes();
  at.supers = at.scales + up(groups * f.scale_bytes(), 4);
  at.stride = up(at.supers + up(cols / 256 * f.super_bytes(), 4), 32);
  return at;
}

// Levels [i, i + 4) as bytes of a word.
template <Levels kLevels>
consteval uint32_t four_levels(int i) {
  const auto& level = kLevels == Levels::iq4 ? kLevelsIQ4 : kLevelsE2M1;
  uint32_t word = 0;
  for (int k = 0; k < 4; ++k) word |= static_cast<uint32_t>(static_cast<uint8_t>(level[i + k])) << (8 * k);
  return word;
}

// 32 weights of a row, packed.
struct PackedGroup {
  uint32_t low[8] = {}, high[2] = {};
  uint32_t scale = 0;
};

// ---- a block's fields ----

constexpr uint32_t nibble(const uint8_t* qs, int i) {  // of 32
  return i < 16 ? qs[i] & 15u : static_cast<uint32_t>(qs[i - 16] >> 4);
}
constexpr uint32_t fifth_bit(const uint8_t* qh, int i) {
  return static_cast<uint32_t>(qh[i / 8] >> (i % 8) & 1) << 4;
}
// Code i of group g, the group's scale record, the block's super-scale.
template <typename Block>
struct Fields {  // BlockQ8_0, BlockQ4_0, BlockIQ4_NL
  static constexpr uint32_t code(const Block& b, int /*g*/, int i) {
    if constexpr (sizeof(Block::qs) == 32) return static_cast<uint8_t>(b.qs[i]);
    if constexpr (sizeof(Block::qs) == 16) return nibble(b.qs, i);
  }
  static constexpr uint32_t scale(const Block& b, int /*g*/) { return b.d; }
  static constexpr uint32_t super(const Block& /*b*/) { return 0; }
};
constexpr uint32_t two_halves(f16_t low, f16_t high) {
  return low | static_cast<uint32_t>(high) << 16;
}
template <>
struct Fields<BlockQ4_1> {
  static constexpr uint32_t code(const BlockQ4_1& b, int /*g*/, int i) { return nibble(b.qs, i); }
  static constexpr uint32_t scale(const BlockQ4_1& b, int /*g*/) { return two_halves(b.d, b.m); }
  static constexpr uint32_t super(const BlockQ4_1& /*b*/) { return 0; }
};
template <>
struct Fields<BlockQ5_0> {
  static constexpr uint32_t code(const BlockQ5_0& b, int /*g*/, int i) { return nibble(b.qs, i) | fifth_bit(b.qh, i); }
  static constexpr uint32_t scale(const BlockQ5_0& b, int /*g*/) { return b.d; }
  static constexpr uint32_t super(const BlockQ5_0& /*b*/) { return 0; }
};
template <>
struct Fields<BlockQ5_1> {
  static constexpr uint32_t code(const BlockQ5_1& b, int /*g*/, int i) { return nibble(b.qs, i) | fifth_bit(b.qh, i); }
  static constexpr uint32_t scale(const BlockQ5_1& b, int /*g*/) { return two_halves(b.d, b.m); }
  static constexpr uint32_t super(const BlockQ5_1& /*b*/) { return 0; }
};
template <>
struct Fields<BlockMXFP4> {
  static constexpr uint32_t code(const BlockMXFP4& b, int /*g*/, int i) { return nibble(b.qs, i); }
  static constexpr uint32_t scale(const BlockMXFP4& b, int /*g*/) { return b.e; }
  static constexpr uint32_t super(const BlockMXFP4& /*b*/) { return 0; }
};
template <>
struct Fields<BlockQ2_K> {
  static constexpr uint32_t code(const BlockQ2_K& b, int g, int i) {
    return static_cast<uint32_t>(b.qs[g / 4 * 32 + i] >> (g % 4 * 2) & 3);
  }
  static constexpr uint32_t scale(const BlockQ2_K& b, int g) {
    return b.scales[2 * g] | static_cast<uint32_t>(b.scales[2 * g + 1]) << 8;
  }
  static constexpr uint32_t super(const BlockQ2_K& b) { return two_halves(b.d, b.dmin); }
};
template <>
struct Fields<BlockQ3_K> {
  static constexpr uint32_t code(const BlockQ3_K& b, int g, int i) {
    return static_cast<uint32_t>((b.qs[g / 4 * 32 + i] >> (g % 4 * 2) & 3) | (b.hmask[i] >> g & 1) << 2);
  }
  static constexpr uint32_t signed_scale(const BlockQ3_K& b, int j) {
    const int low = b.scales[j % 8] >> (j / 8 * 4) & 15, high = b.scales[8 + j % 4] >> (j / 4 * 2) & 3;
    return static_cast<uint8_t>((low | high << 4) - 32);
  }
  static constexpr uint32_t scale(const BlockQ3_K& b, int g) {
    return signed_scale(b, 2 * g) | signed_scale(b, 2 * g + 1) << 8;
  }
  static constexpr uint32_t super(const BlockQ3_K& b) { return b.d; }
};
// The six-bit scale and minimum j of Q4_K and Q5_K, in two bytes.
constexpr uint32_t six_bit_pair(const uint8_t* s, int j) {
  if (j < 4) return (s[j] & 63u) | (s[j + 4] & 63u) << 8;
  const uint32_t scale = (s[j + 4] & 15u) | static_cast<uint32_t>(s[j - 4] >> 6) << 4;
  const uint32_t min = static_cast<uint32_t>(s[j + 4] >> 4) | static_cast<uint32_t>(s[j] >> 6) << 4;
  return scale | min << 8;
}
template <>
struct Fields<BlockQ4_K> {
  static constexpr uint32_t code(const BlockQ4_K& b, int g, int i) {
    return static_cast<uint32_t>(b.qs[g / 2 * 32 + i] >> (g % 2 * 4) & 15);
  }
  static constexpr uint32_t scale(const BlockQ4_K& b, int g) { return six_bit_pair(b.scales, g); }
  static constexpr uint32_t super(const BlockQ4_K& b) { return two_halves(b.d, b.dmin); }
};
template <>
struct Fields<BlockQ5_K> {
  static constexpr uint32_t code(const BlockQ5_K& b, int g, int i) {
    return static_cast<uint32_t>((b.qs[g / 2 * 32 + i] >> (g % 2 * 4) & 15) | (b.qh[i] >> g & 1) << 4);
  }
  static constexpr uint32_t scale(const BlockQ5_K& b, int g) { return six_bit_pair(b.scales, g); }
  static constexpr uint32_t super(const BlockQ5_K& b) { return two_halves(b.d, b.dmin); }
};
template <>
struct Fields<BlockQ6_K> {
  static constexpr uint32_t code(const BlockQ6_K& b, int g, int i) {
    const int low = b.ql[g / 4 * 64 + g % 2 * 32 + i] >> (g % 4 / 2 * 4) & 15;
    return static_cast<uint32_t>(low | (b.qh[g / 4 * 32 + i] >> (g % 4 * 2) & 3) << 4);
  }
  static constexpr uint32_t scale(const BlockQ6_K& b, int g) {
    return static_cast<uint8_t>(b.scales[2 * g]) | static_cast<uint32_t>(static_cast<uint8_t>(b.scales[2 * g + 1])) << 8;
  }
  static constexpr uint32_t super(const BlockQ6_K& b) { return b.d; }
};
template <>
struct Fields<BlockIQ4_XS> {
  static constexpr uint32_t code(const BlockIQ4_XS& b, int g, int i) { return nibble(b.qs + g * 16, i); }
  static constexpr uint32_t scale(const BlockIQ4_XS& b, int g) {
    const int low = b.scales_l[g / 2] >> (g % 2 * 4) & 15, high = b.scales_h >> (2 * g) & 3;
    return static_cast<uint8_t>((low | high << 4) - 32);
  }
  static constexpr uint32_t super(const BlockIQ4_XS& b) { return b.d; }
};

// ---- packing ----

// Group g of a block. Where a word has several codes they are those of columns 4 apart or 16 apart, so that a shift and
// a mask give four neighbours; where codes are levels, eight neighbours in nibbles, which select bytes.
template <DType D, typename Block>
constexpr PackedGroup pack_group(const Block& b, int g) {
  constexpr PackedFormat f = packed_format(D);
  PackedGroup out;
  for (int i = 0; i < 32; ++i) {
    const uint32_t code = Fields<Block>::code(b, g, i), low = code & ((1u << f.low_bits) - 1);
    const int byte = i % 4 * 8;
    if constexpr (f.low_bits == 8) {
      out.low[i / 4] |= low << byte;
    } else if constexpr (f.levels != Levels::none) {
      out.low[i / 8] |= low << (i % 8 * 4);
    } else if constexpr (f.low_bits == 4) {
      out.low[i % 16 / 4] |= low << (byte + i / 16 * 4);
    } else {
      out.low[i / 16] |= low << (byte + i % 16 / 4 * 2);
    }
    if constexpr (f.high_bits == 1) out.high[0] |= code >> f.low_bits << (byte + i / 4);
    if constexpr (f.high_bits == 2) out.high[i / 16] |= code >> f.low_bits << (byte + i % 16 / 4 * 2);
  }
  out.scale = Fields<Block>::scale(b, g);
  return out;
}

// kBytes of `from` to where as many bytes are aligned to.
template <int64_t kBytes>
constexpr void store_field(std::byte* to, const uint32_t* from) {
  if constexpr (kBytes > 0) {
    memcpy(__builtin_assume_aligned(to, kBytes < 16 ? kBytes : 16), from, static_cast<size_t>(kBytes));
  }
}
// Block `index` of a row into the packed row.
template <DType D, typename Block>
constexpr void pack_block(const Block& b, int64_t index, const PackedRow& at, std::byte* row) {
  constexpr PackedFormat f = packed_format(D);
  constexpr int kGroups = Block::size / 32;
  for (int g = 0; g < kGroups; ++g) {
    const PackedGroup p = pack_group<D>(b, g);
    const int64_t i = index * kGroups + g;
    store_field<f.low_bytes()>(row + i * f.low_bytes(), p.low);
    store_field<f.high_bytes()>(row + at.high + i * f.high_bytes(), p.high);
    store_field<f.scale_bytes()>(row + at.scales + i * f.scale_bytes(), &p.scale);
  }
  const uint32_t super = Fields<Block>::super(b);
  store_field<f.super_bytes()>(row + at.supers + index * f.super_bytes(), &super);
}

// Calls f.template operator()<D, Block>() for a packed type.
template <typename F>
void with_block(DType type, F&& f) {
  switch (type) {
    case DType::q8_0:
      return f.template operator()<DType::q8_0, BlockQ8_0>();
    case DType::q4_0:
      return f.template operator()<DType::q4_0, BlockQ4_0>();
    case DType::q4_1:
      return f.template operator()<DType::q4_1, BlockQ4_1>();
    case DType::q5_0:
      return f.template operator()<DType::q5_0, BlockQ5_0>();
    case DType::q5_1:
      return f.template operator()<DType::q5_1, BlockQ5_1>();
    case DType::q2_k:
      return f.template operator()<DType::q2_k, BlockQ2_K>();
    case DType::q3_k:
      return f.template operator()<DType::q3_k, BlockQ3_K>();
    case DType::q4_k:
      return f.template operator()<DType::q4_k, BlockQ4_K>();
    case DType::q5_k:
      return f.template operator()<DType::q5_k, BlockQ5_K>();
    case DType::q6_k:
      return f.template operator()<DType::q6_k, BlockQ6_K>();
    case DType::iq4_nl:
      return f.template operator()<DType::iq4_nl, BlockIQ4_NL>();
    case DType::iq4_xs:
      return f.template operator()<DType::iq4_xs, BlockIQ4_XS>();
    case DType::mxfp4:
      return f.template operator()<DType::mxfp4, BlockMXFP4>();
    default:
      HEARTH_CHECK(false, "{} has no blocks", traits(type).name);
  }
}

// Rows [first, first + count) of a file's quantised matrix, packed one after the other.
inline void pack_rows(DType type, int64_t cols, const void* rows, int64_t first, int64_t count, std::byte* out) {
  const PackedRow at = packed_row(packed_format(type), cols);
  with_block(type, [&]<DType D, typename Block>() {
    const int64_t per_row = cols / Block::size;
    for (int64_t r = 0; r < count; ++r) {
      const Block* blocks = static_cast<const Block*>(rows) + (first + r) * per_row;
      std::byte* const row = out + r * at.stride;
      for (int64_t b = 0; b < per_row; ++b) pack_block<D>(blocks[b], b, at, row);
    }
  });
}

}  // namespace hearth::cuda
