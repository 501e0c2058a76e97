// Products of weights with one or many tokens.
#include <algorithm>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

CpuDevice::Method CpuDevice::method(DType type, int64_t T) const {
  if (!is_quantized(type)) return T > k_.dot_tokens ? Method::gemm : Method::dot;
  return T >= kInt8Tokens && k_.int8_gemm[index(type)] != nullptr ? Method::int8 : Method::dot;
}

int64_t CpuDevice::rows_per_piece(const Matrix& w, int64_t T) const {
  if (T > kSmallT || method(w.type, T) != Method::dot) return kGemmRows;
  const size_t streams = kStreamsPerThread * static_cast<size_t>(team_.size());
  const size_t bytes = T == 1 ? std::clamp(w.bytes() / streams, kShortestStreamBytes, kStreamBytes) : kFewTokensBytes;
  const auto rows = static_cast<int64_t>(bytes / std::max<size_t>(1, w.row_size()));
  return std::clamp<int64_t>(rows / 4 * 4, 4, kMaxDotRows);
}

void CpuDevice::prepare(Input& input, int64_t K, DType type) {
  HEARTH_CHECK(!is_quantized(type) || input.act.q8 != nullptr, "quantised weights need the 8-bit form of their input");
  if (input.packed == nullptr && method(type, input.T) == Method::gemm)
    input.packed = pack_input(input.act.x, input.T, K);
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

void CpuDevice::product_gemm(const Matrix& w, int64_t r0, int64_t n, const Input& in, float* y, int64_t ldy,
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

void CpuDevice::product_int8(const Matrix& w, int64_t r0, int64_t n, const Input& in, float* y, int64_t ldy,
                             bool accumulate, int thread) {
  void* panel = thread_scratch(thread);
  // Packing reads many rows side by side; as one stream they come from memory twice as fast.
  prefetch(w.row(r0), static_cast<size_t>(n) * w.row_size());
  for (int64_t r = 0; r < n; r += k_.nr) {
    const int columns = static_cast<int>(std::min<int64_t>(k_.nr, n - r));
    k_.int8_pack_rows[index(w.type)](w.data, w.row_size(), r0 + r, columns, w.cols, panel);
    k_.int8_gemm[index(w.type)](panel, w.cols, in.act.q8, q8_bytes(w.cols), in.T, y + r, ldy, columns, accumulate);
  }
}

void CpuDevice::product_dot(const Matrix& w, int64_t r0, int64_t n, const Input& in, float* y, int64_t ldy,
                            bool accumulate, int thread) {
  const bool quantized = is_quantized(w.type);
  const auto* x = static_cast<const std::byte*>(quantized ? in.act.q8 : in.act.x);
  const size_t x_stride = quantized ? q8_bytes(w.cols) : static_cast<size_t>(w.cols) * sizeof(float);
  const RowsView rows{w.row(r0), w.row_size(), nullptr, n};
  float* sums = thread_scratch(thread);
  // A few tokens at a time stay in the nearest cache, the rows of the piece in the next.
  for (int64_t t = 0; t < in.T; t += kSmallT) {
    const int64_t tokens = std::min(kSmallT, in.T - t);
    const auto* xt = x + static_cast<size_t>(t) * x_stride;
    float* yt = y + t * ldy;
    k_.dot_rows[index(w.type)](rows, nullptr, w.cols, xt, x_stride, tokens, accumulate ? sums : yt,
                               accumulate ? n : ldy);
    for (int64_t i = 0; accumulate && i < tokens; ++i) k_.add(sums + i * n, n, yt + i * ldy);
  }
}

void CpuDevice::product(const Matrix& w, int64_t r0, int64_t n, const Input& in, float* y, int64_t ldy, bool accumulate,
                        int thread) {
  switch (method(w.type, in.T)) {
    case Method::dot:
      return product_dot(w, r0, n, in, y, ldy, accumulate, thread);
    case Method::gemm:
      return product_gemm(w, r0, n, in, y, ldy, accumulate, thread);
    case Method::int8:
      return product_int8(w, r0, n, in, y, ldy, accumulate, thread);
  }
}

void CpuDevice::matmul(std::span<const MatmulPart> parts, Act in, int64_t T) {
  if (parts.empty() || T == 0) return;
  // All parts share the input; it is packed at most once.
  Input input{in, T, nullptr};
  int64_t pieces = 0;
  for (const MatmulPart& p : parts) {
    HEARTH_CHECK(p.w.cols == parts[0].w.cols, "the parts of a product share their input");
    prepare(input, p.w.cols, p.w.type);
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

}  // namespace hearth::cpu
