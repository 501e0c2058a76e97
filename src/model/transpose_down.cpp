#include "model/transpose_down.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"

namespace hearth::model {
namespace {

template <typename T>
void transpose_tiled(const T* in, int64_t rows, int64_t cols, T* out) {
  constexpr int64_t tile = 64;  // a tile of both sides fits the first-level cache
  for (int64_t r0 = 0; r0 < rows; r0 += tile) {
    for (int64_t c0 = 0; c0 < cols; c0 += tile) {
      for (int64_t c = c0; c < std::min(cols, c0 + tile); ++c) {
        for (int64_t r = r0; r < std::min(rows, r0 + tile); ++r) out[c * rows + r] = in[r * cols + c];
      }
    }
  }
}

// One block of columns at a time: their floats, a column a row, and then their rows in the type.
void requantize(const Matrix& m, DType type, std::byte* out, RequantizationError& error) {
  const DTypeTraits &t = traits(m.type), &to = traits(type);
  const int64_t width = t.block_size;
  const size_t out_row = row_bytes(type, m.rows);
  std::vector<float> piece(static_cast<size_t>(width)), columns(static_cast<size_t>(width * m.rows)),
      again(static_cast<size_t>(m.rows));
  for (int64_t c0 = 0; c0 < m.cols; c0 += width) {
    for (int64_t r = 0; r < m.rows; ++r) {
      t.to_float(m.row(r) + row_bytes(m.type, c0), piece.data(), width);
      for (int64_t c = 0; c < width; ++c) columns[static_cast<size_t>(c * m.rows + r)] = piece[static_cast<size_t>(c)];
    }
    for (int64_t c = 0; c < width; ++c) {
      const float* column = columns.data() + c * m.rows;
      std::byte* row = out + static_cast<size_t>(c0 + c) * out_row;
      to.from_float(column, row, m.rows);
      to.to_float(row, again.data(), m.rows);
      for (int64_t r = 0; r < m.rows; ++r) {
        const double difference = static_cast<double>(again[static_cast<size_t>(r)]) - column[r];
        error.squared_error += difference * difference;
        error.squared += static_cast<double>(column[r]) * column[r];
      }
    }
  }
}

}  // namespace

double RequantizationError::relative() const {
  return squared > 0 ? std::sqrt(squared_error / squared) : 0.0;
}

DType transposed_type(const Matrix& m, std::optional<DType> wanted) {
  return is_quantized(m.type) && wanted ? *wanted : m.type;
}

bool can_transpose(const Matrix& m, DType type) {
  return m.rows % traits(type).block_size == 0;
}

size_t transposed_bytes(const Matrix& m, DType type) {
  return static_cast<size_t>(m.cols) * row_bytes(type, m.rows);
}

DType standard_type(const Matrix& down_t) {
  return is_quantized(down_t.type) ? DType::f16 : down_t.type;
}

Matrix transpose(const Matrix& m, DType type, std::span<std::byte> memory, RequantizationError& error) {
  HEARTH_CHECK(can_transpose(m, type) && memory.size() >= transposed_bytes(m, type));
  HEARTH_CHECK(is_quantized(m.type) || type == m.type, "{} does not become {}", traits(m.type).name, traits(type).name);
  if (is_quantized(m.type)) {
    requantize(m, type, memory.data(), error);
  } else if (m.type == DType::f32) {
    transpose_tiled(static_cast<const uint32_t*>(m.data), m.rows, m.cols, reinterpret_cast<uint32_t*>(memory.data()));
  } else {
    transpose_tiled(static_cast<const uint16_t*>(m.data), m.rows, m.cols, reinterpret_cast<uint16_t*>(memory.data()));
  }
  return {type, m.cols, m.rows, memory.data()};
}

}  // namespace hearth::model
