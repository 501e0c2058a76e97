#pragma once
// Into what pieces the SIMD device cuts its work. Results depend on these numbers in the last bits, never on the thread
// count.
#include <cstdint>

#include "cpu/cpu_device.h"

namespace hearth::cpu {

constexpr int64_t kSmallT = 8;      // tokens that dot products take at once: they stay in the nearest caches
constexpr int64_t kInt8Tokens = 4;  // from so many tokens on, packing quantised weights pays
constexpr int64_t kMaxDotRows =
    256;                           // rows of a piece for so few tokens: about 64 KiB of weights, at most this many rows
constexpr int64_t kGemmRows = 32;  // rows of a piece for more tokens
constexpr int64_t kPanelK = 256;   // columns multiplied between two visits of the output: 32 KiB panels stay in L1
constexpr int64_t kStripColumns = 128;  // columns of down_t in one piece
constexpr int64_t kRowsPerPiece = 4;    // tokens of a piece of a row operation
constexpr int64_t kSelectRows = 64;     // gates of one piece of the sparse FFN
constexpr int64_t kLanes = 64;          // partial sums of the FFN's down projection, at most
constexpr int64_t kLaneNeurons = 16;    // neurons that are worth a partial sum of their own
constexpr int64_t kContextPiece = 256;  // positions attended to by one piece of a decode step
constexpr int64_t kKeyBlock = 64;       // positions multiplied at a time in a prefill
constexpr int64_t kQueryTiles = 8;  // gemm tiles of queries (tokens times the heads that share keys) in a prefill piece

inline size_t index(DType type) {
  return static_cast<size_t>(weight_type(type));
}

}  // namespace hearth::cpu
