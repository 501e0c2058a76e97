#pragma once
// The table of inner kernels that exists once per instruction set. The bodies (body_*.h) are compiled once for each by
// kernels_scalar.cpp, kernels_avx2.cpp and kernels_avx512.cpp with that set's compiler flags.
//
// Included by those files, so it includes nothing that defines an inline function: the linker keeps one copy of such a
// function, and might keep the one that was compiled with AVX-512.
#include <stddef.h>
#include <stdint.h>

namespace hearth::cpu {

enum class WeightType {
  f32,
  f16,
  bf16,
  q8_0,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4,
};
constexpr int kWeightTypes = 16;
constexpr int kBlock = 32;          // elements of a block of activations; weights have as many, or 256
constexpr int64_t kPanelRows = 32;  // of a panel of quantised weights
constexpr int64_t kFewTokens = 8;   // up to so many, the result of a token has the same bits whatever the others are

// Activations in 8 bits, one row, in blocks of 32: x[i] = d[b] * q[i] with d = max |x| / 127. n is padded with zeros to
// whole blocks. offset[8 b + j] = -8 * (q[32 b + 4 j] + ... + q[32 b + 4 j + 3]): what a product with unsigned 4-bit
// weights q + 8 has too much, in the lanes in which the dot product instructions leave their sums; total[b] is the sum
// of the eight lanes, half[b] that of the first four.
struct Q8Row {
  float* d;
  int32_t* total;
  int32_t* half;
  int32_t* offset;
  int8_t* q;
};
static inline constexpr int64_t n_blocks(int64_t n) {
  return (n + kBlock - 1) / kBlock;
}
static inline constexpr size_t q8_row_bytes(int64_t n) {
  return (static_cast<size_t>(n_blocks(n)) * 76 + 63) / 64 * 64;
}

// Row r of the product is row `ids[r]` of w, or row r without ids.
struct RowsView {
  const void* w;
  size_t row_bytes;
  const int32_t* ids;
  int64_t n;
  bool near = false;  // most of them are in this core's second-level cache
};

// Where a panel is, and what its kernel prefetches.
enum class PanelIn {
  cache,             // nothing
  memory,            // what lies ahead in the panel
  memory_with_next,  // the panel behind it, too, which the caller reads next
};

struct Kernels {
  const char* name;
  int mr, nr;      // gemm_tile's tokens and columns
  int dot_tokens;  // up to so many tokens dot_rows is faster than packing and gemm_tile (measured on Zen 4)

  // --- dot products: y[t * y_stride + r] = sum_c w[r][c] x[t][c], c < cols, t < T <= kFewTokens. The result of a row
  // and a token has the same bits whatever the other rows and tokens are. x: rows of floats for f32, f16, bf16; Q8Row
  // storage for quantised types; x_stride in bytes. `then` (may be null): rows of about the same size that the caller
  // reads next, for prefetching.
  void (*dot_rows[kWeightTypes])(RowsView rows, const RowsView* then, int64_t cols, const void* x, size_t x_stride,
                                 int64_t T, float* y, int64_t y_stride);
  // acc[c] += sum_r v[r] w[r][c], c < cols.
  void (*axpy_rows[kWeightTypes])(RowsView rows, const RowsView* then, int64_t cols, const float* v, float* acc);
  // acc[t * acc_stride + c] += sum_r v[t * v_stride + r] w[r][c], t < T <= kFewTokens: the bits of axpy_rows.
  // Consecutive rows.
  void (*axpy_tokens[kWeightTypes])(RowsView rows, int64_t cols, const float* v, int64_t v_stride, int64_t T,
                                    float* acc, int64_t acc_stride);
  // The row as floats.
  void (*to_float[kWeightTypes])(const void* row, float* out, int64_t n);

  // --- matrix products, f32, on packed panels.
  // Panel of weight rows: out[k][nr] = w[r0 + j][k0 + k], rows beyond n_rows are zero. For types that are not
  // quantised.
  void (*pack_rows[kWeightTypes])(const void* w, size_t row_bytes, int64_t r0, int n_rows, int64_t k0, int64_t kc,
                                  float* out);
  // Panels of weight columns: out[c / nr][k][c % nr] = w[k0 + k][c0 + c], c < n_cols (c0 and n_cols multiples of 32, or
  // the rest of a row that is not quantised; padded with zeros to a multiple of nr).
  void (*pack_cols[kWeightTypes])(const void* w, size_t row_bytes, int64_t k0, int64_t kc, int64_t c0, int64_t n_cols,
                                  float* out);
  // c[i * ldc + j] (+)= sum_k a[k * mr + i] b[k * nr + j], i < m <= mr, j < n <= nr.
  void (*gemm_tile)(int64_t kc, const float* a, const float* b, float* c, int64_t ldc, int m, int n, bool add);

  // --- quantised matrix products in integers, on panels: kPanelRows rows and all columns, in as many bytes as they
  // take in a file. Up to kFewTokens tokens get the bits that dot_rows gives; the sums of a row and a token are the same
  // for any larger number, too. Null where the instruction set has no suitable instruction; dot_rows is as fast there.
  // Rows beyond n_rows are zero.
  void (*panel_pack[kWeightTypes])(const void* w, size_t row_bytes, int n_rows, int64_t cols, void* panel);
  // A row of the panel as floats.
  void (*panel_row[kWeightTypes])(const void* panel, int row, int64_t cols, float* out);
  // y[t * y_stride + j] (+)= row j of the panel times token t, t < T, j < n <= kPanelRows; x: rows of Q8Row storage.
  void (*panel_dot[kWeightTypes])(const void* panel, int64_t cols, const void* x, size_t x_stride, int64_t T, float* y,
                                  int64_t y_stride, int n, bool add, PanelIn where);

  // --- rows
  void (*quantize)(const float* x, int64_t n, void* q8_row);
  void (*rms_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
  void (*to_f16)(const float* x, int64_t n, uint16_t* y);
  void (*add)(const float* x, int64_t n, float* y);                 // y += x
  void (*scale)(float factor, int64_t n, float* y);                 // y *= factor
  void (*axpy)(float factor, const float* x, int64_t n, float* y);  // y += factor x
  void (*soft_cap)(float cap, int64_t n, float* y);                 // y = cap tanh(y / cap)
  float (*max)(const float* x, int64_t n);
  // x = exp(x - max); returns the sum. Relative error of exp below 3e-7; below -87 it is 0.
  float (*exp_sum)(float* x, int64_t n, float max);
  // value = act(z) * (up ? up : 1); act numbered as hearth::Activation. value may be z.
  void (*activate)(int act, float threshold, const float* z, const float* up, bool up_relu, int64_t n, float* value);
  // Rotates pairs (i, i + half) or (2 i, 2 i + 1), i < half.
  void (*rotate)(float* head, const float* cos, const float* sin, int64_t half, bool neox);
  // o[h * o_stride + c] = sum_j p[h * p_stride + j] v[j * v_stride + c], h < n_heads, j < n, c < d.
  void (*weighted_sum)(const uint16_t* v, int64_t v_stride, int64_t d, int64_t n, const float* p, int64_t p_stride,
                       int n_heads, float* o, int64_t o_stride);
  uint64_t (*read)(const void* data, size_t bytes);  // reads everything, for measuring bandwidth
};

extern const Kernels kernels_scalar;
extern const Kernels kernels_avx2;    // x86-64 only
extern const Kernels kernels_avx512;  // x86-64 only

}  // namespace hearth::cpu
