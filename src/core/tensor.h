#pragma once
// Non-owning views of weights. The address space (host or one GPU) is that of the Device that made the view.
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace hearth {

// How a matrix lies in memory.
enum class Layout {
  rows,    // row by row, as in the file
  planes,  // row by row, each row's scales apart from its quants, as GPUs read them (cuda/packing.h)
  panels,  // several rows interleaved, in a form of the device's own that takes as many bytes (Device::pack())
};

// A row-major matrix of `rows` rows with `cols` elements each: what GGUF calls ne = [cols, rows]. y = W x has rows
// elements. An empty matrix (data == nullptr) means "this model has no such tensor".
struct Matrix {
  DType type = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* data = nullptr;
  Layout layout = Layout::rows;

  explicit operator bool() const { return data != nullptr; }
  size_t row_size() const { return row_bytes(type, cols); }                // bytes of a row in the file's layout
  size_t bytes() const { return static_cast<size_t>(rows) * row_size(); }  // bytes of the values, whatever the layout
  // Row r in the file's layout; there is none in a panel.
  const std::byte* row(int64_t r) const {
    return static_cast<const std::byte*>(data) + static_cast<size_t>(r) * row_size();
  }
  // Rows [first, first + count) in the file's layout.
  Matrix slice_rows(int64_t first, int64_t count) const { return {type, count, cols, row(first)}; }
};

// A vector of f32 parameters (norm weights, biases), n elements; empty when the model has none.
struct Vector {
  const float* data = nullptr;
  int64_t n = 0;
  explicit operator bool() const { return data != nullptr; }
};

// Activations of n_tokens rows, as produced by one operation for the next: f32 rows, and a companion in the device's
// own 8-bit form for consumers with quantised weights (null when no consumer is quantised).
struct Act {
  float* x = nullptr;
  void* q8 = nullptr;  // Device::q8_bytes(n) bytes a row
};

}  // namespace hearth
