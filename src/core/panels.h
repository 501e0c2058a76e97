#pragma once
// Panels (Layout::panels): how CPUs keep quantised rows that they read whole, and what other devices unpack of it.
//
// A panel is kPanelRows rows, block by block, in as many bytes as in a file. A field that begins at byte `at` of a block
// begins at kPanelRows * at of the rows' blocks together, and its units of all rows lie side by side. The last panel of a
// matrix has rows that mean nothing where `rows` is no multiple of kPanelRows. Plain and constexpr: every device reads it.
#include <cstdint>

#include "core/tensor.h"

namespace hearth {

constexpr int64_t kPanelRows = 32;

struct PanelField {
  int at = 0, bytes = 0, unit = 4;
};
struct PanelFormat {
  PanelField fields[5] = {};  // one after the other; those that are not used have no bytes
  uint8_t flip = 0;           // the bits in which bytes of the last field differ from the file's
};

// No fields for types that have no panels.
constexpr PanelFormat panel_format(DType type) {
  switch (type) {
    case DType::q8_0:
      return {{{0, 2, 2}, {2, 32, 4}}, 0x80};
    case DType::q4_0:
    case DType::iq4_nl:
      return {{{0, 2, 2}, {2, 16, 4}}};
    case DType::q4_1:
      return {{{0, 2, 2}, {2, 2, 2}, {4, 16, 4}}};
    case DType::q5_0:
      return {{{0, 2, 2}, {2, 4, 4}, {6, 16, 4}}};
    case DType::q5_1:
      return {{{0, 2, 2}, {2, 2, 2}, {4, 4, 4}, {8, 16, 4}}};
    case DType::mxfp4:
      return {{{0, 1, 1}, {1, 16, 4}}};
    case DType::q2_k:
      return {{{0, 16, 4}, {16, 64, 4}, {80, 2, 2}, {82, 2, 2}}};
    case DType::q3_k:
      return {{{0, 32, 4}, {32, 64, 4}, {96, 12, 4}, {108, 2, 2}}};
    case DType::q4_k:
      return {{{0, 2, 2}, {2, 2, 2}, {4, 12, 4}, {16, 128, 4}}};
    case DType::q5_k:
      return {{{0, 2, 2}, {2, 2, 2}, {4, 12, 4}, {16, 32, 4}, {48, 128, 4}}};
    case DType::q6_k:
      return {{{0, 128, 4}, {128, 64, 4}, {192, 16, 4}, {208, 2, 2}}};
    case DType::iq4_xs:
      return {{{0, 2, 2}, {2, 2, 2}, {4, 4, 4}, {8, 128, 4}}};
    default:
      return {};
  }
}

// Row `row` of a panel's blocks, as a file has it.
constexpr void read_panel_block(const PanelFormat& format, const std::byte* panel, int64_t row, std::byte* block) {
  constexpr int kFields = sizeof(format.fields) / sizeof(PanelField);
  for (int k = 0; k < kFields; ++k) {
    const PanelField& f = format.fields[k];
    const bool last = k + 1 == kFields || format.fields[k + 1].bytes == 0;
    for (int i = 0; i < f.bytes; ++i) {
      const int in_unit = i % f.unit;
      const std::byte b = panel[kPanelRows * (f.at + i - in_unit) + f.unit * row + in_unit];
      block[f.at + i] = last ? b ^ static_cast<std::byte>(format.flip) : b;
    }
  }
}

// Bytes of a matrix in panels, the rows that fill its last one included.
inline size_t panel_bytes(const Matrix& m) {
  return static_cast<size_t>((m.rows + kPanelRows - 1) / kPanelRows * kPanelRows) * m.row_size();
}
// Bytes of a matrix in host memory, in the layout that it has.
inline size_t stored_bytes(const Matrix& m) {
  return m.layout == Layout::panels ? panel_bytes(m) : m.bytes();
}

// The rows of a matrix in panels, as a file has them, in m.bytes() of memory.
Matrix unpack_panels(const Matrix& m, std::byte* memory);

}  // namespace hearth
