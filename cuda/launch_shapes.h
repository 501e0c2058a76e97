#pragma once
// Shapes of launches and sizes of pieces, decided on the host from the device's properties. Plain C++: tested without a
// GPU.
#include <algorithm>
#include <cstdint>

#include "core/ops.h"

namespace hearth::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// --- decode attention: the context is split over blocks ---
// A piece is whole pages of the cache. The pieces depend on the token's own context and the device alone, never on the
// bound that fixed the grid, so that a graph captured for a long context gives bitwise the results of one captured for
// a short context.
constexpr int64_t kMaxSplits = 128;

// Most pieces that a context is cut into: the blocks of all heads together fill the GPU once.
constexpr int64_t attention_max_splits(int64_t head_blocks, int64_t resident_blocks) {
  return std::clamp<int64_t>(resident_blocks / head_blocks, 1, kMaxSplits);
}
// Pages in each piece (the last may have fewer) of a context that lies in n_pages.
constexpr int64_t attention_split_pages(int64_t n_pages, int64_t max_splits) {
  return ceil_div(n_pages, max_splits);
}
// Pieces that the grid must provide for any context of at most max_kv keys, of which a token sees `window` (0 = all).
constexpr int64_t attention_grid_splits(int64_t max_kv, int64_t window, int64_t max_splits) {
  const int64_t all = ceil_div(max_kv, kPagePositions), seen = ceil_div(window - 1, kPagePositions) + 1;
  return std::clamp<int64_t>(window > 0 ? std::min(all, seen) : all, 1, max_splits);
}

// --- transposed down projection: columns in tiles, rows split over blocks ---
constexpr int64_t kMaxDownSplits = 64;
struct DownPlan {
  int64_t tiles = 1;   // blocks across the columns
  int64_t splits = 1;  // blocks across the neurons; each writes one partial sum of its columns
};
// resident_blocks: that run at the same time. A split has at least min_rows neurons.
constexpr DownPlan down_plan(int64_t n_embd, int64_t columns_per_tile, int64_t n_ff, int64_t min_rows,
                             int64_t resident_blocks) {
  const int64_t tiles = ceil_div(n_embd, columns_per_tile);
  const int64_t most = std::min(kMaxDownSplits, ceil_div(n_ff, min_rows));
  return {tiles, std::clamp<int64_t>(resident_blocks / tiles, 1, std::max<int64_t>(most, 1))};
}

// --- matvec ---
// Every block stages the whole input, so blocks should have many rows; but every multiprocessor should have a block.
enum class MatvecShape {
  few_rows,         // blocks of 8 rows
  two_rows_a_warp,  // blocks of 32, one a multiprocessor
  two_blocks,       // the same, two a multiprocessor: more blocks than one each, which would be a second round of few
  four_rows_a_warp  // blocks of 32, in fewer warps; four rows share every load of the input
};
// fewest: rows of the smallest of the matrices that have `rows` together.
constexpr MatvecShape matvec_shape(int64_t rows, int64_t fewest, int64_t multiprocessors) {
  if (rows >= multiprocessors * 64 && fewest >= 4) return MatvecShape::four_rows_a_warp;
  if (rows < multiprocessors * 16 || fewest < 2) return MatvecShape::few_rows;
  return rows <= multiprocessors * 32 ? MatvecShape::two_rows_a_warp : MatvecShape::two_blocks;
}

// --- quantised weights in a batch: rows that are dequantised at once ---
// (as f16; whole tiles of the matrix product where they fit).
constexpr int64_t slab_rows(int64_t cols, int64_t scratch_bytes) {
  const int64_t rows = std::max<int64_t>(1, scratch_bytes / (cols * 2));
  return rows >= 128 ? rows / 128 * 128 : rows;
}

}  // namespace hearth::cuda
