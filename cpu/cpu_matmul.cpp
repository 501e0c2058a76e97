// Products of weights with one or many tokens.
#include <algorithm>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

CpuDevice::Method CpuDevice::method(const Matrix& w, int64_t T) const {
  if (!is_quantized(w.type)) return T > k_.dot_tokens ? Method::gemm : Method::dot;
  const bool packs = T > kFewTokens && k_.panel_dot[index(w.type)] != nullptr;
  return packs || w.layout == Layout::panels ? Method::panels : Method::dot;
}

int64_t CpuDevice::rows_per_piece(const Matrix& w, int64_t T) const {
  if (T > kFewTokens) return kGemmRows;
  const size_t streams = kStreamsPerThread * static_cast<size_t>(team_.size());
  const size_t bytes = T == 1 ? std::clamp(w.bytes() / streams, kShortestStreamBytes, kStreamBytes) : kFewTokensBytes;
  const auto rows = static_cast<int64_t>(bytes / std::max<size_t>(1, w.row_size()));
  const int64_t unit = w.layout == Layout::panels ? kPanelRows : 4;
  return std::clamp<int64_t>(rows / unit * unit, unit, kMaxDotRows);
}

void CpuDevice::prepare(Operand& input, const Matrix& w) {
  HEARTH_CHECK(!is_quantized(w.type) || input.act.q8 != nullptr,
               "quantised weights need the 8-bit form of their input");
  if (input.packed == nullptr && method(w, input.T) == Method::gemm)
    input.packed = pack_input(input.act.x, input.T, w.cols);
}

const float* CpuDevice::pack_input(const float* x, int64_t T, int64_t K) {
  const int64_t mr = k_.mr, tiles = (T + mr - 1) / mr;
  float* packed = scratch(packed_, tiles * mr * K);
  team_.for_chunks(tiles, 1, [&](int64_t tile, int64_t, int) {
    float* out = packed + tile * K * mr;
    for (int64_t i = 0; i < mr; ++i) {
      const int64_t t = tile * mr + i;
      for (int64_t k = 0; k < K; ++k) out[k * mr + i] = t < T ? x[t * K + k] : 0.0f;
    }
  });
  return packed;
}

void CpuDevice::product_gemm(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy,
                             bool accumulate, int thread) {
  float* panel = thread_scratch(thread);
  const int64_t mr = k_.mr, nr = k_.nr, K = w.cols;
  for (int64_t r = 0; r < n; r += nr) {
    const int columns = static_cast<int>(std::min<int64_t>(nr, n - r));
    for (int64_t k = 0; k < K; k += kPanelK) {
      const int64_t kc = std::min(kPanelK, K - k);
      k_.pack_rows[index(w.type)](w.data, w.row_size(), r0 + r, columns, k, kc, panel);
      for (int64_t t = 0; t < in.T; t += mr) {
        k_.gemm_tile(kc, in.packed + t * K + k * mr, panel, y + t * ldy + r, ldy,
                     static_cast<int>(std::min(mr, in.T - t)), columns, accumulate || k > 0);
      }
    }
  }
}

void CpuDevice::product_panels(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy,
                               bool accumulate, int thread) {
  const bool packed = w.layout == Layout::panels;
  // Packing reads many rows side by side; as one stream they come from memory twice as fast.
  if (!packed) prefetch(w.row(r0), static_cast<size_t>(n) * w.row_size());
  for (int64_t r = 0; r < n; r += kPanelRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kPanelRows, n - r));
    const void* panel = thread_scratch(thread);
    if (packed) {
      panel = panel_of(w, r0 + r);
    } else {
      k_.panel_pack[index(w.type)](w.row(r0 + r), w.row_size(), rows, w.cols, thread_scratch(thread));
    }
    const bool last = r + kPanelRows >= n;
    const PanelIn where = !packed ? PanelIn::cache : last ? PanelIn::memory : PanelIn::memory_with_next;
    k_.panel_dot[index(w.type)](panel, w.cols, in.act.q8, q8_bytes(w.cols), in.T, y + r, ldy, rows, accumulate, where);
  }
}

size_t CpuDevice::packed_bytes(const Matrix& m) const {
  return k_.panel_dot[index(m.type)] == nullptr ? 0 : panel_bytes(m);
}

Matrix CpuDevice::pack(const Matrix& m, std::byte* memory) {
  Matrix packed = m;
  packed.data = memory, packed.layout = Layout::panels;
  team_.for_chunks((m.rows + kPanelRows - 1) / kPanelRows, 1, [&](int64_t panel, int64_t, int) {
    const int64_t r0 = panel * kPanelRows;
    const auto rows = static_cast<int>(std::min<int64_t>(kPanelRows, m.rows - r0));
    std::byte* out = memory + static_cast<size_t>(r0) * m.row_size();
    k_.panel_pack[index(m.type)](m.row(r0), m.row_size(), rows, m.cols, out);
  });
  return packed;
}

void CpuDevice::product_dot(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy,
                            bool accumulate, int thread) {
  const bool quantized = is_quantized(w.type);
  const auto* x = static_cast<const std::byte*>(quantized ? in.act.q8 : in.act.x);
  const size_t x_stride = quantized ? q8_bytes(w.cols) : static_cast<size_t>(w.cols) * sizeof(float);
  const RowsView rows{w.row(r0), w.row_size(), nullptr, n};
  float* sums = thread_scratch(thread);
  // A few tokens at a time stay in the nearest cache, the rows of the piece in the next.
  for (int64_t t = 0; t < in.T; t += kFewTokens) {
    const int64_t tokens = std::min(kFewTokens, in.T - t);
    const auto* xt = x + static_cast<size_t>(t) * x_stride;
    float* yt = y + t * ldy;
    k_.dot_rows[index(w.type)](rows, nullptr, w.cols, xt, x_stride, tokens, accumulate ? sums : yt,
                               accumulate ? n : ldy);
    for (int64_t i = 0; accumulate && i < tokens; ++i) k_.add(sums + i * n, n, yt + i * ldy);
  }
}

void CpuDevice::product(const Matrix& w, int64_t r0, int64_t n, const Operand& in, float* y, int64_t ldy,
                        bool accumulate, int thread) {
  switch (method(w, in.T)) {
    case Method::dot:
      return product_dot(w, r0, n, in, y, ldy, accumulate, thread);
    case Method::gemm:
      return product_gemm(w, r0, n, in, y, ldy, accumulate, thread);
    case Method::panels:
      return product_panels(w, r0, n, in, y, ldy, accumulate, thread);
  }
}

void CpuDevice::matmul(std::span<const MatmulPart> parts, const Input& in, int64_t T, const NextNorm*) {
  if (parts.empty() || T == 0) return;
  // All parts share the input; it is packed at most once.
  Operand input{rows_of(in, T), T, nullptr};
  int64_t pieces = 0;
  for (const MatmulPart& p : parts) {
    HEARTH_CHECK(p.w.cols == parts[0].w.cols, "the parts of a product share their input");
    prepare(input, p.w);
    const int64_t grain = rows_per_piece(p.w, T);
    pieces += (p.w.rows + grain - 1) / grain;
  }
  team_.for_chunks(pieces, 1, [&](int64_t piece, int64_t, int thread) {
    const MatmulPart* p = parts.data();
    int64_t grain = rows_per_piece(p->w, T);
    while (piece >= (p->w.rows + grain - 1) / grain) {
      piece -= (p->w.rows + grain - 1) / grain;
      grain = rows_per_piece((++p)->w, T);
    }
    const int64_t r0 = piece * grain, n = std::min(grain, p->w.rows - r0);
    const int64_t stride = p->y_stride != 0 ? p->y_stride : p->w.rows;
    product(p->w, r0, n, input, p->y + r0, stride, p->accumulate, thread);
    if (!p->bias) return;
    for (int64_t t = 0; t < T; ++t) k_.add(p->bias.data + r0, n, p->y + t * stride + r0);
  });
}

// A piece is some rows of one head. Its tokens are taken a few at a time, so that none depends on how many there are.
void CpuDevice::head_products(const HeadProducts& p, int64_t T) {
  constexpr int64_t kHeadRows = 128;
  const int64_t cols = p.w.cols, rows = p.rows(), pieces = (rows + kHeadRows - 1) / kHeadRows;
  const bool quantized = is_quantized(p.w.type);
  const size_t q8_row = q8_bytes(cols), x_row = static_cast<size_t>(p.n_head * p.x_stride()) * sizeof(float);
  HEARTH_CHECK(p.w.layout == Layout::rows && p.w.rows % p.n_head == 0);
  HEARTH_CHECK(!quantized || kFewTokens * q8_row <= thread_floats_ * sizeof(float),
               "reserve() was told of fewer columns");
  team_.for_chunks(p.n_head * pieces, 1, [&](int64_t item, int64_t, int thread) {
    const int64_t h = item / pieces, r0 = item % pieces * kHeadRows, n = std::min(kHeadRows, rows - r0);
    const RowsView view{p.w.row(h * rows + r0), p.w.row_size(), nullptr, n};
    auto* const q8 = reinterpret_cast<std::byte*>(thread_scratch(thread));
    for (int64_t t0 = 0; t0 < T; t0 += kFewTokens) {
      const int64_t tokens = std::min(kFewTokens, T - t0);
      const float* const x = p.x + (t0 * p.n_head + h) * p.x_stride();
      float* const y = p.y + (t0 * p.n_head + h) * p.y_stride();
      for (int64_t t = 0; t < tokens; ++t) {
        const float* const from = x + t * p.n_head * p.x_stride();
        if (quantized) k_.quantize(from, cols, q8 + static_cast<size_t>(t) * q8_row);
        if (r0 == 0) std::copy_n(from + cols, p.n_tail, y + t * p.n_head * p.y_stride());
      }
      k_.dot_rows[index(p.w.type)](view, nullptr, cols, quantized ? static_cast<const void*>(q8) : x,
                                   quantized ? q8_row : x_row, tokens, y + p.n_tail + r0, p.n_head * p.y_stride());
    }
  });
}

}  // namespace hearth::cpu
