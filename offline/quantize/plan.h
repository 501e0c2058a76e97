#pragma once
// The plan of `hearth quantize` by tensor: its type, its layout, its importance. Decided before a byte is written.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/gguf.h"
#include "offline/quantize/importance.h"
#include "offline/quantize/quantize.h"

namespace hearth::offline {

// One tensor of the output.
struct Job {
  const gguf::TensorInfo* in = nullptr;
  std::string name;
  DType type = DType::f32;
  std::vector<int64_t> ne;
  bool transpose = false;
  size_t out = 0;                 // the writer's index
  std::vector<float> importance;  // [n][ne[0]] of a stack of n matrices; empty: none

  bool copy() const { return !transpose && type == in->traits->type; }
  uint64_t bytes() const { return row_bytes(type, ne[0]) * static_cast<uint64_t>(n_rows()); }
  int64_t n_rows() const { return in->cols() * in->rows() / ne[0]; }
  // [ne[0]], for row r of the stack; null where there is none.
  const float* importance_of(int64_t r) const {
    return importance.empty() ? nullptr : importance.data() + r / ne[1] * ne[0];
  }
};

struct QuantizePlan {
  std::vector<Job> jobs;  // in the order of the file
  std::optional<Importance> importance;
  std::vector<std::string> fallbacks, unweighted;  // QuantizeReport's
  bool down_transposed = false;
  std::string down_reason;
};

// Whether a tensor is a down projection, in either layout; whether it is one that is transposed.
bool is_down(std::string_view name);
bool is_transposed_down(std::string_view name);

// Throws Error as quantize() does, but for what is found in the values.
QuantizePlan plan_quantization(const gguf::File& file, const QuantizeOptions& options);

}  // namespace hearth::offline
