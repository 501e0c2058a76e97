// IQ4_NL and IQ4_XS: a scale times 16 levels that are closer together near zero.
#include "core/blocks.h"
#include "core/codec.h"
#include "core/scale_search.h"

namespace hearth::codec {
namespace {

// Levels lie at integers, so the borders between them lie at multiples of 1/2: the code of v depends on floor(2 v) only.
struct GridIQ4 {
  static constexpr float extreme = kLevelsIQ4[0];
  static constexpr int steps = 512;  // of 1/2, from -128

  static constexpr auto codes = [] {
    std::array<uint8_t, steps> table{};
    for (int i = 0; i < steps; ++i) {
      const int four_v = 2 * (i - 256) + 1;  // four times the middle of the step
      int best = 0, least = 1 << 20;
      for (int c = 0; c < 16; ++c) {
        const int distance = four_v > 4 * kLevelsIQ4[c] ? four_v - 4 * kLevelsIQ4[c] : 4 * kLevelsIQ4[c] - four_v;
        if (distance < least) least = distance, best = c;
      }
      table[i] = static_cast<uint8_t>(best);
    }
    return table;
  }();
  static constexpr auto levels = [] {
    std::array<float, steps> table{};
    for (int i = 0; i < steps; ++i) table[i] = kLevelsIQ4[codes[i]];
    return table;
  }();

  static int step_of(float v) {
    v = v > -128.0f ? v : -128.0f;
    v = v < 127.5f ? v : 127.5f;
    return static_cast<int>(2.0f * v + 256.0f);
  }
  static f32x4 nearest(f32x4 v) {
    return f32x4{levels[step_of(v[0])], levels[step_of(v[1])], levels[step_of(v[2])], levels[step_of(v[3])]};
  }
  static uint8_t code(float v) { return codes[step_of(v)]; }
};

constexpr Candidates kCandidates = {7, 1.0f};

}  // namespace

void iq4_nl_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockIQ4_NL*>(row);
  for (int64_t k = 0; k < n / BlockIQ4_NL::size; ++k) {
    const float d = f16_to_f32(blocks[k].d);
    float* o = out + k * BlockIQ4_NL::size;
    for (int i = 0; i < 16; ++i) {
      o[i] = d * static_cast<float>(kLevelsIQ4[blocks[k].qs[i] & 15]);
      o[i + 16] = d * static_cast<float>(kLevelsIQ4[blocks[k].qs[i] >> 4]);
    }
  }
}

void iq4_nl_encode(const float* row, const float* importance, void* out, int64_t n) {
  constexpr int size = BlockIQ4_NL::size;
  auto* blocks = static_cast<BlockIQ4_NL*>(out);
  for (int64_t k = 0; k < n / size; ++k) {
    BlockIQ4_NL& b = blocks[k];
    const ScaledBlock<size> x(row + k * size, importance ? importance + k * size : nullptr);
    if (!x.finite) {
      b = {kNotANumber, {}};
      continue;
    }
    b.d = x.store(search_scale<GridIQ4, size>(x.x, x.w, kCandidates));
    const float inverse = reciprocal(x.read(b.d));
    for (int i = 0; i < 16; ++i) {
      b.qs[i] = static_cast<uint8_t>(GridIQ4::code(x.x[i] * inverse) | GridIQ4::code(x.x[i + 16] * inverse) << 4);
    }
  }
}

void iq4_xs_to_float(const void* row, float* out, int64_t n) {
  const auto* blocks = static_cast<const BlockIQ4_XS*>(row);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    const BlockIQ4_XS& b = blocks[k];
    const float d = f16_to_f32(b.d);
    for (int j = 0; j < 8; ++j) {
      const int low = b.scales_l[j / 2] >> (j % 2 * 4) & 15, high = b.scales_h >> (2 * j) & 3;
      const float dl = d * static_cast<float>((low | high << 4) - 32);
      float* o = out + k * kSuperBlock + j * 32;
      for (int i = 0; i < 16; ++i) {
        o[i] = dl * static_cast<float>(kLevelsIQ4[b.qs[j * 16 + i] & 15]);
        o[i + 16] = dl * static_cast<float>(kLevelsIQ4[b.qs[j * 16 + i] >> 4]);
      }
    }
  }
}

void iq4_xs_encode(const float* row, const float* importance, void* out, int64_t n) {
  auto* blocks = static_cast<BlockIQ4_XS*>(out);
  for (int64_t k = 0; k < n / kSuperBlock; ++k) {
    BlockIQ4_XS& b = blocks[k];
    b = {};
    const ScaledBlock<kSuperBlock> x(row + k * kSuperBlock, importance ? importance + k * kSuperBlock : nullptr);
    if (!x.finite) {
      b.d = kNotANumber;
      continue;
    }
    const auto codes = encode_scaled<GridIQ4, 8, -32, 31>(x, kCandidates);
    b.d = codes.d;
    for (int j = 0; j < 8; ++j) {
      const int s = codes.scale[j] + 32;
      b.scales_l[j / 2] |= static_cast<uint8_t>((s & 15) << (j % 2 * 4));
      b.scales_h = static_cast<uint16_t>(b.scales_h | s >> 4 << (2 * j));
      for (int i = 0; i < 16; ++i) {
        b.qs[j * 16 + i] = static_cast<uint8_t>(codes.q[j * 32 + i] | codes.q[j * 32 + 16 + i] << 4);
      }
    }
  }
}

}  // namespace hearth::codec
