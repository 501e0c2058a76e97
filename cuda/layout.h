#pragma once
// How weights and activations lie in GPU memory. Plain C++: tested without a GPU.
//
// A file's Q8_0 and Q4_0 blocks are 34 and 18 bytes, which no 16-byte load can be aligned to. In GPU memory the quants
// of all rows come first (Matrix::data), then the f16 scales of all rows (Matrix::scales); the order inside each is the
// file's.
#include <cstring>

#include "core/error.h"
#include "core/tensor.h"
#include "cuda/launch_shapes.h"

namespace hearth::cuda {

constexpr size_t kAlignment = 256;  // of every tensor
constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Quants of a block of 32, in bytes.
constexpr int64_t quant_bytes(DType type) {
  return type == DType::q4_0 ? BlockQ4_0::size / 2 : BlockQ8_0::size;
}

struct AdoptedLayout {
  size_t data_bytes = 0;
  size_t scales_offset = 0;  // from data; 0 when the type has no scales
  size_t total_bytes = 0;    // what adopt() takes
};
// Throws Error for a type that GPUs have no kernels for.
inline AdoptedLayout adopted_layout(DType type, int64_t rows, int64_t cols) {
  constexpr DType kKnown[] = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0};
  if (std::find(std::begin(kKnown), std::end(kKnown), type) == std::end(kKnown)) {
    fail("the GPU computes with f32, f16, bf16, q8_0 and q4_0, not with {}; run on the CPU (--device cpu), or convert "
         "the file with `hearth quantize`",
         traits(type).name);
  }
  AdoptedLayout l;
  if (!is_quantized(type)) {
    l.data_bytes = static_cast<size_t>(rows) * row_bytes(type, cols);
    l.total_bytes = aligned(l.data_bytes);
    return l;
  }
  const auto blocks = static_cast<size_t>(rows * (cols / 32));
  l.data_bytes = blocks * static_cast<size_t>(quant_bytes(type));
  l.scales_offset = aligned(l.data_bytes);
  l.total_bytes = aligned(l.scales_offset + blocks * sizeof(f16_t));
  return l;
}

template <typename Block>
void split_blocks(const Block* blocks, int64_t n, std::byte* quants, f16_t* scales) {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(quants + static_cast<size_t>(i) * sizeof(Block::qs), blocks[i].qs, sizeof(Block::qs));
    scales[i] = blocks[i].d;
  }
}
// Takes n blocks of the file's layout apart.
inline void split_blocks(DType type, const void* blocks, int64_t n, std::byte* quants, f16_t* scales) {
  if (type == DType::q4_0) return split_blocks(static_cast<const BlockQ4_0*>(blocks), n, quants, scales);
  split_blocks(static_cast<const BlockQ8_0*>(blocks), n, quants, scales);
}

// Act::q8 of a row of n activations: n quants (padded to whole blocks of 32), then {scale, scale * sum of quants} a
// block. x[i] = scale * q[i]; the sum serves weights that are stored with an offset (Q4_0's 8).
struct Q8Scale {
  float d;
  float d_sum;
};
constexpr int64_t q8_quants_bytes(int64_t n) {
  return round_up(n, 32);
}
constexpr int64_t q8_row_bytes(int64_t n) {
  return round_up(q8_quants_bytes(n) + q8_quants_bytes(n) / 32 * static_cast<int64_t>(sizeof(Q8Scale)), 16);
}

}  // namespace hearth::cuda
