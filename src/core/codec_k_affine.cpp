// Q2_K, Q4_K and Q5_K: sub-blocks with a scale and a minimum, both of few bits.
#include "core/affine_search.h"
#include "core/blocks.h"
#include "core/codec.h"

namespace hearth::codec {
namespace {

// The six-bit scales and minima of Q4_K and Q5_K.
struct SixBits {
  int scale, min;
};
SixBits unpack(const uint8_t* bytes, int j) {
  if (j < 4) return {bytes[j] & 63, bytes[j + 4] & 63};
  return {(bytes[j + 4] & 15) | (bytes[j - 4] >> 6 << 4), (bytes[j + 4] >> 4) | (bytes[j] >> 6 << 4)};
}
// Into zeroed bytes.
void pack(uint8_t* bytes, int j, SixBits s) {
  if (j < 4) {
    bytes[j] |= static_cast<uint8_t>(s.scale);
    bytes[j + 4] |= static_cast<uint8_t>(s.min);
  } else {
    bytes[j + 4] = static_cast<uint8_t>((s.scale & 15) | (s.min & 15) << 4);
    bytes[j - 4] |= static_cast<uint8_t>(s.scale >> 4 << 6);
    bytes[j] |= static_cast<uint8_t>(s.min >> 4 << 6);
  }
}

const float* at(const float* importance, int64_t i) {
  return importance != nullptr ? importance + i : nullptr;
}

}  // namespace

void q2_k_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ2_K*>(row);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    const BlockQ2_K& b = blocks[k];
    const float d = f16_to_f32(b.d), dmin = f16_to_f32(b.dmin);
    for (int j = 0; j < 16; ++j) {
      const float dl = d * static_cast<float>(b.scales[j] & 15), ml = dmin * static_cast<float>(b.scales[j] >> 4);
      for (int i = j * 16; i < (j + 1) * 16; ++i) {
        const int q = b.qs[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        out[k * kSuperBlock + i] = dl * static_cast<float>(q) - ml;
      }
    }
  }
}

void q2_k_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ2_K*>(out);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    BlockQ2_K& b = blocks[k];
    b = {};
    const ScaledBlock<kSuperBlock> x(row + k * kSuperBlock, at(importance, k * kSuperBlock));
    if (!x.finite) {
      b.d = kNotANumber;
      continue;
    }
    const auto codes = AffineEncoder<16, 3, 15>(x, {-0.5f, 0.1f, 16}, 1).encode(2);
    b.d = codes.d, b.dmin = codes.dmin;
    for (int j = 0; j < 16; ++j) b.scales[j] = static_cast<uint8_t>(codes.scale[j] | codes.min[j] << 4);
    for (int i = 0; i < kSuperBlock; ++i) {
      b.qs[i / 128 * 32 + i % 32] |= static_cast<uint8_t>(codes.q[i] << (i / 32 % 4 * 2));
    }
  }
}

void q4_k_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ4_K*>(row);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    const BlockQ4_K& b = blocks[k];
    const float d = f16_to_f32(b.d), dmin = f16_to_f32(b.dmin);
    for (int j = 0; j < 8; ++j) {
      const auto [scale, min] = unpack(b.scales, j);
      const float dl = d * static_cast<float>(scale), ml = dmin * static_cast<float>(min);
      for (int i = 0; i < 32; ++i) {
        const int q = b.qs[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
        out[k * kSuperBlock + j * 32 + i] = dl * static_cast<float>(q) - ml;
      }
    }
  }
}

void q4_k_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ4_K*>(out);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    BlockQ4_K& b = blocks[k];
    b = {};
    const ScaledBlock<kSuperBlock> x(row + k * kSuperBlock, at(importance, k * kSuperBlock));
    if (!x.finite) {
      b.d = kNotANumber;
      continue;
    }
    const auto codes = AffineEncoder<8, 15, 63>(x, {-1.0f, 0.1f, 21}, 1).encode(2);
    b.d = codes.d, b.dmin = codes.dmin;
    for (int j = 0; j < 8; ++j) {
      pack(b.scales, j, {codes.scale[j], codes.min[j]});
      for (int i = 0; i < 32; ++i) {
        b.qs[j / 2 * 32 + i] |= static_cast<uint8_t>(codes.q[j * 32 + i] << (j % 2 * 4));
      }
    }
  }
}

void q5_k_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ5_K*>(row);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    const BlockQ5_K& b = blocks[k];
    const float d = f16_to_f32(b.d), dmin = f16_to_f32(b.dmin);
    for (int j = 0; j < 8; ++j) {
      const auto [scale, min] = unpack(b.scales, j);
      const float dl = d * static_cast<float>(scale), ml = dmin * static_cast<float>(min);
      for (int i = 0; i < 32; ++i) {
        const int low = b.qs[j / 2 * 32 + i] >> (j % 2 * 4) & 15, high = b.qh[i] >> j & 1;
        out[k * kSuperBlock + j * 32 + i] = dl * static_cast<float>(low | high << 4) - ml;
      }
    }
  }
}

void q5_k_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ5_K*>(out);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    BlockQ5_K& b = blocks[k];
    b = {};
    const ScaledBlock<kSuperBlock> x(row + k * kSuperBlock, at(importance, k * kSuperBlock));
    if (!x.finite) {
      b.d = kNotANumber;
      continue;
    }
    const auto codes = AffineEncoder<8, 31, 63>(x, {-0.5f, 0.1f, 16}, 1).encode(2);
    b.d = codes.d, b.dmin = codes.dmin;
    for (int j = 0; j < 8; ++j) {
      pack(b.scales, j, {codes.scale[j], codes.min[j]});
      for (int i = 0; i < 32; ++i) {
        const int q = codes.q[j * 32 + i];
        b.qs[j / 2 * 32 + i] |= static_cast<uint8_t>((q & 15) << (j % 2 * 4));
        b.qh[i] |= static_cast<uint8_t>(q >> 4 << j);
      }
    }
  }
}

}  // namespace hearth::codec
