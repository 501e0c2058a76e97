// Block formats as descriptions: which bytes of a block hold what, and how they become weights. Part of every
// kernels_*.cpp, after body_weights.h.
//
// A super-block is kBlocks blocks of 32 columns; weight = d * scale * (q - kOffset) - dmin * min, where scales and
// minima are integers of a group: of 32 columns (kGroups = 1) or 16 (2), or there are none (0) and they count as 1.
// kOffset is one of those of less_offset() (simd_*.h), and super-blocks of several blocks have groups: a format with
// another offset or without scales shifts its quants, or has scales of 1.
// Layouts are ggml's (core/blocks.h). A description is read in two ways: 32 columns of one row at a time, or four
// columns of 16 rows, which a panel has interleaved by four bytes (body_formats_panel.h). A Reader gives
//   bytes(at)    32 bytes from `at` on, one for each column
//   nibbles(at)  16 bytes from `at` on: columns 0 to 15 are the low halves, 16 to 31 the high ones
//   bits(at)     4 bytes: bit c is 1 for column c
// and, of several rows at once, Words of scales: word(at) of 4 bytes, half(at) of 2.
// Bytes come as vectors of 16-bit lanes (Bytes32), which is what shift instructions know; masks cut off what crosses a
// byte.
struct Field {
  int at, bytes, unit;  // in a panel, units of so many bytes of all rows lie side by side
};

// Bytes of 4-bit and 6-bit numbers, four of them in a word.
constexpr uint16_t kByte4 = 0x0F0F, kByte2 = 0x0303, kByte1 = 0x0101;
constexpr uint32_t kLow4 = 0x0F0F0F0F, kLow2 = 0x03030303, kLow6 = 0x3F3F3F3F;
// 6-bit numbers less 32, as signed bytes.
template <typename Word>
HEARTH_SIMD Word less_32(Word six) {
  const Word x = six ^ 0x20202020u, sign = x & 0x20202020u;
  return x | (sign << 1) | (sign << 2);
}
// The scales and minima of Q4_K and Q5_K: 8 of each, in 12 bytes from `at` on.
template <typename Reader, typename Word>
HEARTH_SIMD void scales_of_k(const Reader& r, int at, Word* scale, Word* min) {
  const Word a = r.word(at), b = r.word(at + 4), c = r.word(at + 8);
  scale[0] = a & kLow6, min[0] = b & kLow6;
  scale[1] = (c & kLow4) | ((a >> 2) & 0x30303030u);
  min[1] = ((c >> 4) & kLow4) | ((b >> 2) & 0x30303030u);
}

// The values that the 16 codes stand for, plus kOffset.
alignas(16) constexpr uint8_t kIq4Values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kMxfp4Values[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

struct WeightQ4_1 {
  static constexpr int kBytes = 20, kBlocks = 1, kGroups = 0, kOffset = 0;
  static constexpr int kD = 0, kDMin = 2;
  static constexpr bool kAdds = true;  // the format adds its minimum
  static constexpr bool kMin = true;
  static constexpr Field kFields[] = {{0, 2, 2}, {2, 2, 2}, {4, 16, 4}};
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int) {
    return r.nibbles(4);
  }
};

struct WeightQ5_0 {
  static constexpr int kBytes = 22, kBlocks = 1, kGroups = 0, kOffset = 16;
  static constexpr int kD = 0;
  static constexpr bool kMin = false;
  static constexpr Field kFields[] = {{0, 2, 2}, {2, 4, 4}, {6, 16, 4}};
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int) {
    return r.nibbles(6) | (r.bits(2) << 4);
  }
};

struct WeightQ5_1 {
  static constexpr int kBytes = 24, kBlocks = 1, kGroups = 0, kOffset = 0;
  static constexpr int kD = 0, kDMin = 2;
  static constexpr bool kAdds = true;  // the format adds its minimum
  static constexpr bool kMin = true;
  static constexpr Field kFields[] = {{0, 2, 2}, {2, 2, 2}, {4, 4, 4}, {8, 16, 4}};
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int) {
    return r.nibbles(8) | (r.bits(4) << 4);
  }
};

struct WeightIQ4_NL {
  static constexpr int kBytes = 18, kBlocks = 1, kGroups = 0, kOffset = 128;
  static constexpr int kD = 0;
  static constexpr bool kMin = false;
  static constexpr Field kFields[] = {{0, 2, 2}, {2, 16, 4}};
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int) {
    return r.lookup(r.nibbles(2), kIq4Values);
  }
};

struct WeightMXFP4 {
  static constexpr int kBytes = 17, kBlocks = 1, kGroups = 0, kOffset = 16;
  static constexpr int kD = 0;
  static constexpr bool kE8M0 = true;  // d is 2^(byte - 128)
  static constexpr bool kMin = false;
  static constexpr Field kFields[] = {{0, 1, 1}, {1, 16, 4}};
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int) {
    return r.lookup(r.nibbles(1), kMxfp4Values);
  }
};

struct WeightQ2_K {
  static constexpr int kBytes = 84, kBlocks = 8, kGroups = 2, kOffset = 0;
  static constexpr int kD = 80, kDMin = 82;
  static constexpr bool kMin = true;
  static constexpr Field kFields[] = {{0, 16, 4}, {16, 64, 4}, {80, 2, 2}, {82, 2, 2}};
  template <typename Reader, typename Word>
  HEARTH_SIMD void scales(const Reader& r, Word* scale, Word* min) {
    for (int k = 0; k < 4; ++k) {
      const Word both = r.word(4 * k);
      scale[k] = both & kLow4, min[k] = (both >> 4) & kLow4;
    }
  }
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int b) {
    return (r.bytes(16 + b / 4 * 32) >> (b % 4 * 2)) & kByte2;
  }
};

struct WeightQ3_K {
  static constexpr int kBytes = 110, kBlocks = 8, kGroups = 2, kOffset = 4;
  static constexpr int kD = 108;
  static constexpr bool kMin = false;
  static constexpr Field kFields[] = {{0, 32, 4}, {32, 64, 4}, {96, 12, 4}, {108, 2, 2}};
  template <typename Reader, typename Word>
  HEARTH_SIMD void scales(const Reader& r, Word* scale, Word*) {
    const Word a = r.word(96), b = r.word(100), high = r.word(104);
    scale[0] = less_32<Word>((a & kLow4) | ((high & kLow2) << 4));
    scale[1] = less_32<Word>((b & kLow4) | (((high >> 2) & kLow2) << 4));
    scale[2] = less_32<Word>(((a >> 4) & kLow4) | (((high >> 4) & kLow2) << 4));
    scale[3] = less_32<Word>(((b >> 4) & kLow4) | (((high >> 6) & kLow2) << 4));
  }
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int b) {
    return ((r.bytes(32 + b / 4 * 32) >> (b % 4 * 2)) & kByte2) | (((r.bytes(0) >> b) & kByte1) << 2);
  }
};

struct WeightQ4_K {
  static constexpr int kBytes = 144, kBlocks = 8, kGroups = 1, kOffset = 0;
  static constexpr int kD = 0, kDMin = 2;
  static constexpr bool kMin = true;
  static constexpr Field kFields[] = {{0, 2, 2}, {2, 2, 2}, {4, 12, 4}, {16, 128, 4}};
  template <typename Reader, typename Word>
  HEARTH_SIMD void scales(const Reader& r, Word* scale, Word* min) {
    scales_of_k(r, 4, scale, min);
  }
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int b) {
    return (r.bytes(16 + b / 2 * 32) >> (b % 2 * 4)) & kByte4;
  }
};

struct WeightQ5_K {
  static constexpr int kBytes = 176, kBlocks = 8, kGroups = 1, kOffset = 0;
  static constexpr int kD = 0, kDMin = 2;
  static constexpr bool kMin = true;
  static constexpr Field kFields[] = {{0, 2, 2}, {2, 2, 2}, {4, 12, 4}, {16, 32, 4}, {48, 128, 4}};
  template <typename Reader, typename Word>
  HEARTH_SIMD void scales(const Reader& r, Word* scale, Word* min) {
    scales_of_k(r, 4, scale, min);
  }
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int b) {
    return ((r.bytes(48 + b / 2 * 32) >> (b % 2 * 4)) & kByte4) | (((r.bytes(16) >> b) & kByte1) << 4);
  }
};

struct WeightQ6_K {
  static constexpr int kBytes = 210, kBlocks = 8, kGroups = 2, kOffset = 32;
  static constexpr int kD = 208;
  static constexpr bool kMin = false;
  static constexpr Field kFields[] = {{0, 128, 4}, {128, 64, 4}, {192, 16, 4}, {208, 2, 2}};
  template <typename Reader, typename Word>
  HEARTH_SIMD void scales(const Reader& r, Word* scale, Word*) {
    for (int k = 0; k < 4; ++k) scale[k] = r.word(192 + 4 * k);
  }
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int b) {
    const int half = b / 4, quarter = b % 4;
    return ((r.bytes(64 * half + 32 * (quarter % 2)) >> (quarter / 2 * 4)) & kByte4) |
           (((r.bytes(128 + 32 * half) >> (2 * quarter)) & kByte2) << 4);
  }
};

struct WeightIQ4_XS {
  static constexpr int kBytes = 136, kBlocks = 8, kGroups = 1, kOffset = 128;
  static constexpr int kD = 0;
  static constexpr bool kMin = false;
  static constexpr Field kFields[] = {{0, 2, 2}, {2, 2, 2}, {4, 4, 4}, {8, 128, 4}};
  template <typename Reader, typename Word>
  HEARTH_SIMD void scales(const Reader& r, Word* scale, Word*) {
    // Two bits of each scale are in `high`, in order; four in `low`, the even ones' in the lower halves.
    const Word high = r.half(2), low = r.word(4);
    const auto pair = [&](int i) __attribute__((always_inline)) {
      return ((low >> (8 * i)) & 15) | (((low >> (8 * i + 4)) & 15) << 8) | (((high >> (4 * i)) & 3) << 4) |
             (((high >> (4 * i + 2)) & 3) << 12);
    };
    scale[0] = less_32<Word>(pair(0) | (pair(1) << 16));
    scale[1] = less_32<Word>(pair(2) | (pair(3) << 16));
  }
  template <typename Reader>
  HEARTH_SIMD auto quants(const Reader& r, int b) {
    return r.lookup(r.nibbles(8 + 16 * b), kIq4Values);
  }
};

template <typename W>
concept Formats = requires {
  W::kFields;
};
// d and dmin, read as Readers do.
template <Formats W, typename Reader>
HEARTH_SIMD auto d_of(const Reader& r) {
  if constexpr (requires { W::kE8M0; }) {
    return r.e8m0(W::kD);
  } else {
    return r.f16(W::kD);
  }
}
template <Formats W, typename Reader>
HEARTH_SIMD auto dmin_of(const Reader& r) {
  if constexpr (requires { W::kAdds; }) {
    return r.negative_f16(W::kDMin);
  } else {
    return r.f16(W::kDMin);
  }
}
