#pragma once
// Block layouts of the quantised types beyond Q8_0 and Q4_0, as in ggml (ggml-org/ggml, src/ggml-common.h). A block is
// a run of consecutive weights of one row. d, m and dmin are binary16; "nibble i" of bytes is the low half of byte i.
#include <array>
#include <cstdint>

#include "core/half.h"

namespace hearth {

// Weights in a super-block: the types *_K and IQ4_XS quantise the scales of its sub-blocks, too.
inline constexpr int kSuperBlock = 256;

// ---- 32 weights. Weight i < 16 has its low four bits in the low nibble of qs[i], weight i + 16 in the high one. ----

// w[i] = d * q[i] + m, q in 0..15.
struct BlockQ4_1 {
  static constexpr int size = 32;
  f16_t d, m;
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockQ4_1) == 20);

// w[i] = d * (q[i] - 16), q in 0..31; bit i of qh (little endian) is bit 4 of q[i].
struct BlockQ5_0 {
  static constexpr int size = 32;
  f16_t d;
  uint8_t qh[size / 8];
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockQ5_0) == 22);

// w[i] = d * q[i] + m, q in 0..31; qh as in Q5_0.
struct BlockQ5_1 {
  static constexpr int size = 32;
  f16_t d, m;
  uint8_t qh[size / 8];
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockQ5_1) == 24);

// The 16 levels of IQ4_NL and IQ4_XS: closer together near zero, as weights are.
inline constexpr std::array<int8_t, 16> kLevelsIQ4 = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};

// w[i] = d * kLevelsIQ4[q[i]].
struct BlockIQ4_NL {
  static constexpr int size = 32;
  f16_t d;
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockIQ4_NL) == 18);

// Twice the values of E2M1 (one sign bit, two of exponent, one of mantissa), by code.
inline constexpr std::array<int8_t, 16> kLevelsE2M1 = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// OCP Microscaling MXFP4: w[i] = 2^(e - 128) * kLevelsE2M1[q[i]], e the E8M0 exponent (bias 127, one less for the
// levels' factor of two). The standard calls e = 255 NaN; it is read as 2^127 here, as ggml does: levels beyond 1 then
// are infinite. Nothing writes it but for blocks that hold no finite value.
struct BlockMXFP4 {
  static constexpr int size = 32;
  uint8_t e;
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockMXFP4) == 17);

// ---- 256 weights ----

// 16 sub-blocks of 16: w = (d * s) * q - dmin * m, q in 0..3; s and m are the low and the high nibble of scales[i / 16].
// Weight 128 a + 32 b + c has bits 2 b and 2 b + 1 of qs[32 a + c].
struct BlockQ2_K {
  static constexpr int size = kSuperBlock;
  uint8_t scales[size / 16];
  uint8_t qs[size / 4];
  f16_t d, dmin;
};
static_assert(sizeof(BlockQ2_K) == 84);

// 16 sub-blocks of 16: w = (d * (s - 32)) * (q - 4), q in 0..7. Low bits of q as in Q2_K; bit 2 of weight 32 b + c is
// bit b of hmask[c]. Six-bit scale j has its low nibble in byte j % 8 of scales (low half for j < 8), its high two bits
// in bits 2 (j / 4) of byte 8 + j % 4.
struct BlockQ3_K {
  static constexpr int size = kSuperBlock;
  uint8_t hmask[size / 8];
  uint8_t qs[size / 4];
  uint8_t scales[12];
  f16_t d;
};
static_assert(sizeof(BlockQ3_K) == 110);

// 8 sub-blocks of 32: w = (d * s) * q - dmin * m, q in 0..15. Weight 64 a + c, c < 32, is the low nibble of
// qs[32 a + c], weight 64 a + 32 + c the high one. Six-bit s[j] and m[j]: for j < 4 the low six bits of scales[j] and
// scales[j + 4]; beyond, the low and the high nibble of scales[j + 4], with the top two bits of scales[j - 4] (s) and
// of scales[j] (m) as their bits 4 and 5.
struct BlockQ4_K {
  static constexpr int size = kSuperBlock;
  f16_t d, dmin;
  uint8_t scales[12];
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockQ4_K) == 144);

// Q4_K with a fifth bit: that of weight 32 b + c is bit b of qh[c].
struct BlockQ5_K {
  static constexpr int size = kSuperBlock;
  f16_t d, dmin;
  uint8_t scales[12];
  uint8_t qh[size / 8];
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockQ5_K) == 176);

// 16 sub-blocks of 16: w = (d * scales[i / 16]) * (q - 32), q in 0..63. Weight 128 a + 32 b + c has its low nibble in
// ql[64 a + 32 (b % 2) + c], the low half for b < 2, and its high two bits in bits 2 b of qh[32 a + c].
struct BlockQ6_K {
  static constexpr int size = kSuperBlock;
  uint8_t ql[size / 2];
  uint8_t qh[size / 4];
  int8_t scales[size / 16];
  f16_t d;
};
static_assert(sizeof(BlockQ6_K) == 210);

// 8 sub-blocks of 32, each packed as IQ4_NL: w = (d * (s - 32)) * kLevelsIQ4[q]. Low nibbles of the six-bit s[j] in
// scales_l, two a byte; high bits in bits 2 j of scales_h.
struct BlockIQ4_XS {
  static constexpr int size = kSuperBlock;
  f16_t d;
  uint16_t scales_h;
  uint8_t scales_l[size / 64];
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockIQ4_XS) == 136);

}  // namespace hearth
