#pragma once
// Down projections as the sparse kernels read them: [n_ff][n_embd], a neuron's column as a row.
#include <optional>
#include <span>

#include "core/buffer.h"
#include "core/tensor.h"

namespace hearth::model {

// The change by requantising: sums over the weights of squared differences, and of squares.
struct RequantizationError {
  double squared_error = 0, squared = 0;
  double relative() const;  // root of their quotient
};

// The type of the transposed matrix: f32, f16 and bf16 stay what they are, others become `wanted`, if there is one.
DType transposed_type(const Matrix& m, std::optional<DType> wanted = {});
// Whether the transposed matrix can have a type: its rows must be whole blocks.
bool can_transpose(const Matrix& m, DType type);
// Bytes of the transposed matrix.
size_t transposed_bytes(const Matrix& m, DType type);
// Into `memory`, of transposed_bytes(). Exact for f32, f16 and bf16, whose type stays; weights of other types become
// `type`, and what that changes is added to `error`. m must be one that can_transpose().
Matrix transpose(const Matrix& m, DType type, std::span<std::byte> memory, RequantizationError& error);
// The type in which a transposed projection is transposed back for a device without kernels for it: f16 where it is
// quantised, as quantising it once more would lose more than that rounds.
DType standard_type(const Matrix& down_t);

}  // namespace hearth::model
