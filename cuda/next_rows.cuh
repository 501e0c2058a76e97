#pragma once
// Weights of the products after a hand-off come to the second-level cache while the GPU waits for the CPU.
#include <array>

#include "cuda/launch.cuh"
#include "cuda/layout.h"

namespace hearth::cuda {

// Coming products whose weights go to the second-level cache: `bytes` of each row, as many of each, so that no
// part of the product waits for others; and of every other group of rows another part, so that at any time some of them
// come from the cache and some from memory.
struct NextRows {
  static constexpr int kMatrices = 3, kGroup = 4, kPlaces = 4;  // a group: the rows of a warp (matvec.cu), mostly
  const std::byte* data[kMatrices];
  int end[kMatrices];  // of their rows, counted over all
  int row_bytes, bytes;
  int first;  // byte of a row: those before it are asked for when the product's blocks start
#ifdef __CUDACC__
  __device__ __forceinline__ const std::byte* at(int row) const {
    const int place = row / kGroup % kPlaces * ((row_bytes - first - bytes) / (kPlaces - 1)) / 128 * 128;
    const int m = row < end[0] ? 0 : row < end[1] ? 1 : 2;
    return data[m] + static_cast<int64_t>(row - (m > 0 ? end[m - 1] : 0)) * row_bytes + first + place;
  }
#endif
};

// Nothing else runs until the CPU has answered, so that most of the cache is free for what is read then. The sums wait
// until all of it has come: a quarter of the cache takes about as long as the answer's way over the link. H200, 7B in
// 7.75 GiB: 373 tok/s with the first 25 MB of the query weights alone, 367 to 375 with as much of all three matrices,
// 380 to 382 with half of that; Q8_0 in 4.3 GiB 482 to 489, 473 to 494, 492.
inline NextRows next_rows(const Gpu& gpu, const std::array<Matrix, NextRows::kMatrices>& matrices) {
  constexpr int64_t kLine = 128, kStarted = 1024;
  NextRows next{};
  int64_t rows = 0, row_bytes = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Matrix& m = matrices[i];
    if (m) {
      const int64_t bytes = device_row_bytes(m.type, m.cols);
      if (row_bytes != 0 && bytes != row_bytes) return {};
      row_bytes = bytes, rows += m.rows;
      next.data[i] = static_cast<const std::byte*>(m.data);
    }
    next.end[i] = static_cast<int>(rows);
  }
  if (rows == 0 || row_bytes % 16 != 0) return {};
  const int64_t each = std::min(row_bytes - kStarted, static_cast<int64_t>(gpu.l2_bytes / 4) / rows);
  next.row_bytes = static_cast<int>(row_bytes), next.first = kStarted;
  next.bytes = static_cast<int>(std::max<int64_t>(0, each / kLine * kLine));
  return next;
}

}  // namespace hearth::cuda
