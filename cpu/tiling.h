#pragma once
// Into what pieces the SIMD device cuts its work. Results depend on these numbers in the last bits, never on the number
// of threads.
#include <algorithm>
#include <cstdint>

#include "cpu/cpu_device.h"

namespace hearth::cpu {

static_assert(cpu::kFewTokens == hearth::kFewTokens);  // kernels.h includes nothing of the project
static_assert(cpu::kPanelRows == hearth::kPanelRows);

// Products.
// Weights of a piece for one token: many for every thread, because a core's share of the bandwidth varies and the
// slowest is waited for; but each piece begins with rows that nobody has asked for. Matrices of 12288 and 4096 rows of
// 8 KiB in memory, beyond the caches, are read by 16 threads at 133 and 123 GB/s in pieces of 512 and 262 KiB, at 118
// and 115 in pieces of 128 (Sapphire Rapids that reads 138). Each row is summed by itself, so that these numbers do not
// show in results. For a few tokens the rows of a piece stay in the second-level cache between tokens.
constexpr size_t kStreamBytes = 512 << 10;
constexpr size_t kShortestStreamBytes = 16 << 10;
constexpr size_t kStreamsPerThread = 8;
constexpr size_t kFewTokensBytes = 256 << 10;
constexpr int64_t kMaxDotRows = 256;
// Rows of a piece for many tokens, and the columns multiplied between two visits of the output: 32 KiB panels stay in
// L1.
constexpr int64_t kGemmRows = 32;
constexpr int64_t kPanelK = 256;
// Columns of down_t in one piece.
constexpr int64_t kStripColumns = 128;
// Tokens of a piece of a row operation.
constexpr int64_t kRowsPerPiece = 4;

// Dense feed-forward network of one token: partial sums of the down projection (at most), and the neurons that are
// worth one of their own.
constexpr int64_t kLanes = 64;
constexpr int64_t kLaneNeurons = 16;

// Sparse feed-forward network: lists of up to so many neurons for each thread are dealt out at once, in parts as the
// threads' speeds suggest; of longer ones, every thread gets so many pieces, or more, of so many neurons at most. With
// parts that follow the speeds, 14 threads of a shared host take 37.5 us for 240 neurons of 24 KB and 126 for 1200; in
// pieces 44 and 167.
constexpr int64_t kDealtRows = 96;
// The speeds that one list shows move the parts by so much; lists with fewer neurons for each thread say nothing.
constexpr double kLearningRate = 0.05;
constexpr int64_t kLearntRows = 4;
constexpr int64_t kSelectPieces = 4;
constexpr int64_t kSelectRows = 64;
// With several tokens, neurons of a block, whose rows stay in a core's second-level cache.
constexpr int64_t kFewRows = 32;
// Partial sums of the down projection, which the threads share out by columns. With one there is nothing to add up, but
// 16 threads read rows in parts of 512 bytes; with many, each thread reads long parts, but the sums travel between
// cores. A list of 130 rows of 8 KiB on 14 threads, and a round for their sums: 12.3 us with 2, 13 with 1, 16.5 with 8;
// of 1210 on 16 threads: 76 us, 95, 75. Up to so many neurons, the round for sums, which takes 2.4 us, is worth more
// than what two lanes gain.
constexpr int64_t kSparseLanes = 2;
constexpr int64_t kOneLaneNeurons = 256;
static_assert(kSparseLanes <= kLanes && kSparseLanes <= 2);
constexpr int64_t sparse_lanes(int64_t n) {
  return n <= kOneLaneNeurons ? 1 : kSparseLanes;
}

// Mixtures of experts: pieces of every thread; rows of a piece at most, and for many tokens, where a piece of weights
// stays in the second-level cache.
constexpr int64_t kExpertPieces = 8;
constexpr int64_t kExpertRows = 256;
constexpr int64_t kExpertBatchRows = 64;
// Rows of a piece, whole panels.
constexpr int64_t expert_piece_rows(int64_t rows, int64_t pieces, int64_t most) {
  return std::clamp(rows / pieces / kPanelRows * kPanelRows, kPanelRows, most);
}
constexpr int64_t whole_units(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// Attention in a prefill: positions multiplied at a time, and gemm tiles of queries (tokens times the heads that share
// keys) in one piece.
constexpr int64_t kKeyBlock = 64;
constexpr int64_t kQueryTiles = 8;

// The factor beside act(gate) in a neuron's value. u: the product of its up row, with the bias.
inline float up_factor(const FfnShard& s, float u) {
  if (s.act == Activation::clamped_silu) return std::clamp(u, -s.act_threshold, s.act_threshold) + 1.0f;
  return s.up_relu && !(u > 0.0f) ? 0.0f : u;
}

inline size_t index(DType type) {
  return static_cast<size_t>(weight_type(type));
}

}  // namespace hearth::cpu
