#pragma once
// How weights and activations lie in GPU memory. Plain C++: tested without a GPU.
#include <cstring>

#include "core/error.h"
#include "core/tensor.h"
#include "cuda/launch_shapes.h"
#include "cuda/packing.h"

namespace hearth::cuda {

constexpr size_t kAlignment = 256;  // of every tensor
constexpr size_t aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Bytes from row to row of a matrix on the GPU.
inline int64_t device_row_bytes(DType type, int64_t cols) {
  return is_packed(type) ? packed_row(packed_format(type), cols).stride : static_cast<int64_t>(row_bytes(type, cols));
}
// Bytes that adopt() takes. Throws Error for a type that GPUs have no kernels for.
inline size_t adopted_bytes(DType type, int64_t rows, int64_t cols) {
  if (is_quantized(type) && !is_packed(type)) {
    fail("the GPU has no kernels for weights of type {}; run on the CPU (--device cpu), or convert the file with "
         "`hearth quantize`",
         traits(type).name);
  }
  return aligned(static_cast<size_t>(rows * device_row_bytes(type, cols)));
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
