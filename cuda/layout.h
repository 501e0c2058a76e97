#pragma once
// How weights and activations lie in GPU memory. Plain C++: tested without a GPU.
//
// A file's Q8_0 and Q4_0 blocks are 34 and 18 bytes, which no 16-byte load can be aligned to. In GPU memory the quants
// of all rows come first (Matrix::data), then the f16 scales of all rows (Matrix::scales); the order inside each is the
// file's.
#include <cstring>

#include "core/tensor.h"
#include "cuda/plan.h"

namespace hearth::cuda {

constexpr size_t kAlignment = 256;  // of every tensor

// Quants of a block of 32, in bytes.
constexpr int64_t quant_bytes(DType type) {
  return type == DType::q4_0 ? BlockQ4_0::size / 2 : BlockQ8_0::size;
}

// Scales of a row, padded to an even number: kernels copy them in pairs.
constexpr int64_t scale_stride(int64_t cols) {
  return round_up(cols / 32, 2);
}

struct AdoptedLayout {
  size_t data_bytes = 0;
  size_t scales_offset = 0;  // from data; 0 when the type has no scales
  size_t total_bytes = 0;    // what adopt() takes
};
inline AdoptedLayout adopted_layout(DType type, int64_t rows, int64_t cols) {
  const auto align = [](size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; };
  AdoptedLayout l;
  if (!is_quantized(type)) {
    l.data_bytes = static_cast<size_t>(rows) * row_bytes(type, cols);
    l.total_bytes = align(l.data_bytes);
    return l;
  }
  const auto blocks = static_cast<size_t>(rows * (cols / 32));
  l.data_bytes = blocks * static_cast<size_t>(quant_bytes(type));
  l.scales_offset = align(l.data_bytes);
  l.total_bytes = align(l.scales_offset + static_cast<size_t>(rows * scale_stride(cols)) * sizeof(f16_t));
  return l;
}

template <typename Block>
void split_row(const Block* blocks, int64_t n, std::byte* quants, f16_t* scales) {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(quants + static_cast<size_t>(i) * sizeof(Block::qs), blocks[i].qs, sizeof(Block::qs));
    scales[i] = blocks[i].d;
  }
  if (n % 2 != 0) scales[n] = 0;
}
// Takes a row of n blocks of the file's layout apart.
inline void split_row(DType type, const void* row, int64_t n, std::byte* quants, f16_t* scales) {
  if (type == DType::q4_0) return split_row(static_cast<const BlockQ4_0*>(row), n, quants, scales);
  split_row(static_cast<const BlockQ8_0*>(row), n, quants, scales);
}

}  // namespace hearth::cuda
