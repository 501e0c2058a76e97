#include "core/panels.h"

#include "core/error.h"

namespace hearth {

Matrix unpack_panels(const Matrix& m, std::byte* memory) {
  const PanelFormat format = panel_format(m.type);
  HEARTH_CHECK(m.layout == Layout::panels && format.fields[0].bytes > 0, "a matrix of {} that is not in panels",
               traits(m.type).name);
  const auto block = static_cast<size_t>(traits(m.type).block_bytes), per_row = m.row_size() / block;
  for (int64_t r = 0; r < m.rows; ++r) {
    const std::byte* const panel = m.row(r / kPanelRows * kPanelRows);
    for (size_t b = 0; b < per_row; ++b) {
      read_panel_block(format, panel + kPanelRows * b * block, r % kPanelRows, memory);
      memory += block;
    }
  }
  Matrix rows = m;
  rows.data = memory - m.bytes(), rows.layout = Layout::rows;
  return rows;
}

}  // namespace hearth
