#pragma once
// Shapes of launches and sizes of pieces, decided on the host from the device's properties. Plain C++: tested without a
// GPU.
#include <algorithm>
#include <cstdint>

namespace hearth::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// --- decode attention: the context is split over blocks ---
// The pieces depend on the actual length and the device alone, never on the bound that fixed the grid, so that a graph
// captured for a long context gives bitwise the results of one captured for a short context.
constexpr int64_t kMinSplitKeys = 256;
constexpr int64_t kMaxSplits = 128;

// Most pieces that a context is cut into: the blocks of all heads together fill the GPU once.
constexpr int64_t attention_max_splits(int64_t head_blocks, int64_t resident_blocks) {
  return std::clamp<int64_t>(resident_blocks / head_blocks, 1, kMaxSplits);
}
// Keys in each piece (the last may have fewer) of a context of n_kv.
constexpr int64_t attention_split_keys(int64_t n_kv, int64_t max_splits) {
  const int64_t keys = round_up(ceil_div(n_kv, max_splits), 16);
  return keys > kMinSplitKeys ? keys : kMinSplitKeys;  // not std::max: kernels cannot take the constant's address
}
// Pieces that the grid must provide for any context of at most max_kv keys.
constexpr int64_t attention_grid_splits(int64_t max_kv, int64_t max_splits) {
  return std::clamp<int64_t>(ceil_div(max_kv, kMinSplitKeys), 1, max_splits);
}

// --- transposed down projection: columns in tiles, rows split over blocks ---
struct DownPlan {
  int64_t tiles = 1;   // blocks across the columns
  int64_t splits = 1;  // blocks across the neurons; each writes one partial sum of n_embd
};
constexpr DownPlan down_plan(int64_t n_embd, int64_t columns_per_tile, int64_t multiprocessors) {
  const int64_t tiles = ceil_div(n_embd, columns_per_tile);
  return {tiles, std::clamp<int64_t>(multiprocessors * 4 / tiles, 1, 64)};
}

// --- matvec ---
// Rows that one warp computes at once: four share every load of the input, unless that leaves multiprocessors idle.
constexpr int rows_per_warp(int64_t rows, int64_t multiprocessors) {
  return rows >= multiprocessors * 64 ? 4 : 1;
}

// --- quantised weights in a batch: rows that are dequantised at once ---
// (as f16; whole tiles of the matrix product where they fit).
constexpr int64_t slab_rows(int64_t cols, int64_t scratch_bytes) {
  const int64_t rows = std::max<int64_t>(1, scratch_bytes / (cols * 2));
  return rows >= 128 ? rows / 128 * 128 : rows;
}

}  // namespace hearth::cuda
