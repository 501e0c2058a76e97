#pragma once
// Sums the squares of what matrices are multiplied with, for an importance matrix (offline/quantize/importance.h).
#include <cstdint>
#include <vector>

#include "core/thread_team.h"
#include "gguf/gguf.h"
#include "offline/quantize/importance.h"

namespace hearth::offline {

// The inputs of a layer's matrices. Matrices that read the same have the same importance.
enum class MatrixInput {
  attention,    // attn_q, attn_k, attn_v, or attn_qkv
  attn_output,  // attn_output
  ffn,          // ffn_gate, ffn_up
  down,         // ffn_down: the neurons' values. Also of files that have ffn_down_t, for `quantize --standard-down`
};

class ImportanceCollector {
 public:
  // Adds to `sums`, for matrices that the file has. All must outlive the collector.
  ImportanceCollector(ThreadTeam& team, const gguf::File& file, Importance& sums);
  // T more tokens: rows [T][n]. The result has the same bits for any number of threads.
  void add(size_t layer, MatrixInput input, const float* rows, int64_t T, int64_t n);

 private:
  ThreadTeam& team_;
  const gguf::File& file_;
  Importance& sums_;
  std::vector<double> batch_;  // [n]
};

}  // namespace hearth::offline
