// Q3_K and Q6_K: 16 sub-blocks of 16 weights, each a scale times signed integers.
#include "core/blocks.h"
#include "core/codec.h"
#include "core/scale_search.h"

namespace hearth::codec {

void q3_k_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ3_K*>(row);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    const BlockQ3_K& b = blocks[k];
    const float d = f16_to_f32(b.d);
    for (int j = 0; j < 16; ++j) {
      const int low = b.scales[j % 8] >> (j / 8 * 4) & 15, high = b.scales[8 + j % 4] >> (j / 4 * 2) & 3;
      const float dl = d * static_cast<float>((low | high << 4) - 32);
      for (int i = j * 16; i < (j + 1) * 16; ++i) {
        const int q = b.qs[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3, top = b.hmask[i % 32] >> (i / 32) & 1;
        out[k * kSuperBlock + i] = dl * static_cast<float>((q | top << 2) - 4);
      }
    }
  }
}

void q3_k_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ3_K*>(out);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    BlockQ3_K& b = blocks[k];
    b = {};
    const ScaledBlock<kSuperBlock> x(row + k * kSuperBlock, importance ? importance + k * kSuperBlock : nullptr);
    if (!x.finite) {
      b.d = kNotANumber;
      continue;
    }
    const auto codes = encode_scaled<IntegerGrid<-4, 3>, 16, -32, 31>(x, {4, 0.22f});
    b.d = codes.d;
    for (int j = 0; j < 16; ++j) {
      const int s = codes.scale[j] + 32;
      b.scales[j % 8] |= static_cast<uint8_t>((s & 15) << (j / 8 * 4));
      b.scales[8 + j % 4] |= static_cast<uint8_t>(s >> 4 << (j / 4 * 2));
    }
    for (int run = 0; run < 8; ++run) {
      for (int i = 0; i < 32; ++i) {
        const int q = codes.q[run * 32 + i];
        b.qs[run / 4 * 32 + i] |= static_cast<uint8_t>((q & 3) << (run % 4 * 2));
        b.hmask[i] |= static_cast<uint8_t>(q >> 2 << run);
      }
    }
  }
}

void q6_k_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockQ6_K*>(row);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    const BlockQ6_K& b = blocks[k];
    const float d = f16_to_f32(b.d);
    for (int j = 0; j < 16; ++j) {
      const float dl = d * static_cast<float>(b.scales[j]);
      for (int i = j * 16; i < (j + 1) * 16; ++i) {
        const int low = b.ql[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
        const int high = b.qh[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        out[k * kSuperBlock + i] = dl * static_cast<float>((low | high << 4) - 32);
      }
    }
  }
}

void q6_k_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockQ6_K*>(out);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    BlockQ6_K& b = blocks[k];
    b = {};
    const ScaledBlock<kSuperBlock> x(row + k * kSuperBlock, importance ? importance + k * kSuperBlock : nullptr);
    if (!x.finite) {
      b.d = kNotANumber;
      continue;
    }
    const auto codes = encode_scaled<IntegerGrid<-32, 31>, 16, -128, 127>(x, {9, 0.1f});
    b.d = codes.d;
    for (int j = 0; j < 16; ++j) b.scales[j] = static_cast<int8_t>(codes.scale[j]);
    for (int run = 0; run < 8; ++run) {
      for (int i = 0; i < 32; ++i) {
        const int q = codes.q[run * 32 + i];
        b.ql[run / 4 * 64 + run % 2 * 32 + i] |= static_cast<uint8_t>((q & 15) << (run / 2 % 2 * 4));
        b.qh[run / 4 * 32 + i] |= static_cast<uint8_t>(q >> 4 << (run % 4 * 2));
      }
    }
  }
}

}  // namespace hearth::codec
