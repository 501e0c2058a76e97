#pragma once
// Storage types of tensors. Formats are data: a block struct with a checked size and one row in a trait table.
// Type numbers, names and block layouts are ggml's (ggml-org/ggml, src/ggml-common.h), so that files are shared with
// llama.cpp.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/half.h"

namespace hearth {

// Numbers as stored in GGUF. Only the types with row conversions are named; the trait table lists others, too.
enum class DType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq4_nl = 20,
  iq4_xs = 23,
  i8 = 24,
  i16 = 25,
  i32 = 26,
  i64 = 27,
  f64 = 28,
  bf16 = 30,
  mxfp4 = 39,
};

// Layouts of the other types: core/blocks.h.

// 32 weights: w[i] = d * qs[i].
struct BlockQ8_0 {
  static constexpr int size = 32;
  f16_t d;
  int8_t qs[size];
};
static_assert(sizeof(BlockQ8_0) == 34);

// 32 weights: w[i] = d * ((qs[i] & 15) - 8) and w[i + 16] = d * ((qs[i] >> 4) - 8), i in [0, 16).
struct BlockQ4_0 {
  static constexpr int size = 32;
  f16_t d;
  uint8_t qs[size / 2];
};
static_assert(sizeof(BlockQ4_0) == 18);

struct DTypeTraits {
  DType type;
  const char* name;  // lower case, as on the command line: "q8_0"
  int block_size;    // elements in a block
  int block_bytes;   // bytes of a block
  // Row conversions, n a multiple of block_size. Null for types that hearth can only list.
  void (*to_float)(const void* row, float* out, int64_t n);
  void (*from_float)(const float* row, void* out, int64_t n);
  // from_float with an importance for each column; null for types that make no use of it.
  void (*from_float_weighted)(const float* row, const float* importance, void* out, int64_t n);
  uint32_t file_type = 0;  // llama.cpp's general.file_type of a model whose matrices are of this type

  bool computable() const { return to_float != nullptr; }
  bool quantized() const { return computable() && block_size > 1; }
};

// The trait row of a type number as found in a file; nullptr if unknown.
const DTypeTraits* find_traits(uint32_t ggml_type);
// The trait row of a type that is known to be in the table.
const DTypeTraits& traits(DType type);
std::span<const DTypeTraits> all_traits();
// "q8_0" or "Q8_0" -> DType, among the computable types; nullopt if there is no such name.
std::optional<DType> parse_dtype(std::string_view name);

// A row of n values as blocks of `type`, n a multiple of its block size: from_float, or, with `importance` (n values,
// one a column, finite and not negative; the mean square of the column's input, say), an encoding that makes the sum of
// importance times squared error small. Types of 8 and more bits, whose error hardly depends on it, ignore it.
void quantize_row(DType type, const float* x, const float* importance, void* out, int64_t n);

// The names of the computable types, for messages: "f32, f16, ...".
std::string computable_names();

// Bytes of a row of n elements. n must be a multiple of the block size.
inline size_t row_bytes(DType type, int64_t n) {
  const DTypeTraits& t = traits(type);
  return static_cast<size_t>(n / t.block_size) * static_cast<size_t>(t.block_bytes);
}
inline bool is_quantized(DType type) {
  return traits(type).quantized();
}

}  // namespace hearth
