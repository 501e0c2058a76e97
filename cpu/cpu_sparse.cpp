// The gate-first sparse feed-forward network of one token, in one dispatch of the team: first the neurons, whole rows
// of gate and up, then the columns of down. Every neuron's activation and every column's sum is computed by one thread
// in list order, so that the work may be cut as the number of threads suggests.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

CpuDevice::Candidates CpuDevice::candidates(int64_t first, int64_t n, const int32_t* listed) const {
  const int64_t threads = team_.size();
  Candidates c{.first = first, .n = n, .listed = listed};
  if (n <= kDealtRows * threads) {
    c.n_pieces = std::min(n, threads);
  } else {
    const int64_t rows = std::min(n / (4 * threads), kSelectRows);
    c.n_pieces = (n + rows - 1) / rows;
  }
  c.ids = reinterpret_cast<int32_t*>(scratch(ids_, n + c.n_pieces));
  c.counts = c.ids + n;
  c.values = scratch(values_, n);
  return c;
}

void CpuDevice::select_piece(const FfnShard& s, const SparseArgs& sparse, Act in, const Candidates& c,
                             int64_t piece) const {
  const int64_t begin = c.begin(piece), n = c.begin(piece + 1) - begin;
  int32_t* ids = c.ids + begin;
  float* z = c.values + begin;
  if (sparse.gate_values != nullptr) {
    std::copy_n(c.listed + begin, n, ids);
    std::copy_n(sparse.gate_values + begin, n, z);
    c.counts[piece] = static_cast<int32_t>(n);
    return;
  }
  const void* x = is_quantized(s.gate.type) ? in.q8 : in.x;
  const auto listed_rows = [&](const Matrix& w) { return RowsView{w.data, w.row_size(), c.listed + begin, n}; };
  if (c.listed != nullptr) {
    // Most of the listed neurons are active: their rows of up are asked for while the last gates are read.
    const RowsView next = listed_rows(s.up ? s.up : s.gate);
    k_.dot_rows[index(s.gate.type)](listed_rows(s.gate), &next, s.gate.cols, x, 0, 1, z, 0);
  } else {
    const RowsView rows{s.gate.row(c.first + begin), s.gate.row_size(), nullptr, n};
    k_.dot_rows[index(s.gate.type)](rows, nullptr, s.gate.cols, x, 0, 1, z, 0);
  }
  if (s.gate_bias) {
    for (int64_t i = 0; i < n; ++i) z[i] += s.gate_bias.data[c.first + c.id(begin + i)];
  }
  k_.activate(static_cast<int>(s.act), s.act_threshold, z, nullptr, false, n, z);
  int32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(std::fabs(z[i]) > sparse.threshold)) continue;
    ids[found] = c.id(begin + i);
    z[found++] = z[i];
  }
  c.counts[piece] = found;
}

void CpuDevice::multiply_up(const FfnShard& s, Act in, const Candidates& c, int64_t piece, int thread) const {
  const int64_t n = c.counts[piece];
  const int32_t* ids = c.ids + c.begin(piece);
  float* values = c.values + c.begin(piece);
  float* up = thread_scratch(thread);
  k_.dot_rows[index(s.up.type)]({s.up.data, s.up.row_size(), ids, n}, nullptr, s.up.cols,
                                is_quantized(s.up.type) ? in.q8 : in.x, 0, 1, up, 0);
  for (int64_t i = 0; i < n; ++i) {
    const float u = up[i] + (s.up_bias ? s.up_bias.data[ids[i]] : 0.0f);
    values[i] = s.up_relu && !(u > 0.0f) ? 0.0f : values[i] * u;
  }
}

int64_t CpuDevice::join_pieces(const Candidates& c) {
  int64_t n = 0;
  for (int64_t piece = 0; piece < c.n_pieces; ++piece) {
    const int64_t begin = c.begin(piece), count = c.counts[piece];
    if (n != begin) {
      std::memmove(c.ids + n, c.ids + begin, static_cast<size_t>(count) * sizeof(int32_t));
      std::memmove(c.values + n, c.values + begin, static_cast<size_t>(count) * sizeof(float));
    }
    n += count;
  }
  return n;
}

void CpuDevice::add_down(const FfnShard& s, const Candidates& c, int64_t n, int64_t begin, int64_t end, float* y,
                         int thread) const {
  const Matrix& w = s.down_t;
  const std::byte* column = w.row(0) + row_bytes(w.type, begin);
  // Short sums of sums: rounding errors grow with the length of a sum.
  float* total = thread_scratch(thread);
  float* sum = total + kDownColumns;
  const size_t bytes = static_cast<size_t>(end - begin) * sizeof(float);
  std::memset(total, 0, bytes);
  for (int64_t i = 0; i < n; i += kSumRows) {
    const int64_t rows = std::min(kSumRows, n - i);
    const RowsView now{column, w.row_size(), c.ids + i, rows},
        next{column, w.row_size(), c.ids + i + rows, n - i - rows};
    std::memset(sum, 0, bytes);
    k_.axpy_rows[index(w.type)](now, &next, end - begin, c.values + i, sum);
    k_.add(sum, end - begin, total);
  }
  k_.add(total, end - begin, y + begin);
}

void CpuDevice::ffn_sparse(const FfnShard& s, const SparseArgs& sparse, Act in, Vector y_bias, float* y) {
  HEARTH_CHECK(s.down_t && !s.down, "the sparse FFN needs down_t");
  HEARTH_CHECK(in.q8 != nullptr || !((s.up && is_quantized(s.up.type)) || (s.gate && is_quantized(s.gate.type))),
               "quantised weights need the 8-bit form of their input");
  if (s.n() > s.n_whole()) post_gates(s, sparse, in);
  const int64_t n = sparse.predicted != nullptr ? *sparse.n_predicted : s.n_whole();
  HEARTH_CHECK(n >= 0 && n <= s.n_whole(), "{} predicted neurons of {}", n, s.n_whole());
  HEARTH_CHECK(sparse.gate_values == nullptr || sparse.predicted != nullptr, "gates of neurons that are not listed");
  HEARTH_CHECK(sparse.gate_values != nullptr || s.gate, "a shard without gates needs their values");
  const Candidates c = candidates(0, n, sparse.predicted);
  int64_t n_active = 0, n_summed = 0;
  const auto find = [&](int64_t piece, int64_t, int thread) {
    select_piece(s, sparse, in, c, piece);
    if (s.up) multiply_up(s, in, c, piece, thread);
  };
  const auto join = [&] {
    n_active = join_pieces(c);
    if (sparse.active_ids != nullptr) std::copy_n(c.ids, n_active, sparse.active_ids);
    for (int64_t i = 0; i < n_active; ++i) {
      c.ids[n_summed] = c.ids[i], c.values[n_summed] = c.values[i];
      n_summed += c.values[i] != 0.0f ? 1 : 0;  // dReLU: of the others, down is not read either
    }
  };
  const auto add_columns = [&](int64_t begin, int64_t end, int thread) {
    if (y_bias) k_.add(y_bias.data + begin, end - begin, y + begin);
    add_down(s, c, n_summed, begin, end, y, thread);
  };
  const int64_t n_embd = s.down_t.cols, share = (n_embd + team_.size() - 1) / team_.size();
  const int64_t columns = std::min((share + kBlock - 1) / kBlock * kBlock, kDownColumns);
  if (n > 0) {
    team_.for_rounds({c.n_pieces, 1, find}, join, {n_embd, columns, add_columns});
  } else {
    add_bias(y_bias, 1, y);
  }
  if (sparse.n_active != nullptr) *sparse.n_active = static_cast<int32_t>(n_active);
  if (sparse.collect != nullptr) host(*sparse.collect).collect(y, n_embd);
}

// Hands over the active ones of the gate rows whose neurons the CPU has. (A CPU device in a GPU's place.)
void CpuDevice::post_gates(const FfnShard& s, const SparseArgs& sparse, Act in) {
  HEARTH_CHECK(sparse.hand_off.mailbox != nullptr && sparse.predicted == nullptr);
  const Candidates c = candidates(s.n_whole(), s.n() - s.n_whole(), nullptr);
  team_.for_chunks(c.n_pieces, 1, [&](int64_t piece, int64_t, int) { select_piece(s, sparse, in, c, piece); });
  host(*sparse.hand_off.mailbox)
      .post(sparse.hand_off.x, sparse.hand_off.n, {c.ids, static_cast<size_t>(join_pieces(c))}, c.values);
}

}  // namespace hearth::cpu
