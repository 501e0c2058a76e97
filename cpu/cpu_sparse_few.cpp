// The gate-first sparse feed-forward network of 2 to kFewTokens tokens. Each token's neurons are found and summed by the
// kernels that one token has, in the same order, so that its bits do not depend on the others. Neurons are visited in
// blocks whose rows stay in a core's cache, and every token takes its own of a block before the next one is visited: a
// row that several tokens name is read from memory once.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>

#include "core/error.h"
#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

// Neurons of a token, ascending, and where it keeps what it finds: block after block, then put together.
struct CpuDevice::TokenNeurons {
  const int32_t* listed = nullptr;  // null: all
  int64_t n_listed = 0;
  int32_t* ids = nullptr;   // [n]
  float* values = nullptr;  // [n]
  int64_t n = 0, n_active = 0;

  // The listed ones in [begin, end).
  std::span<const int32_t> listed_in(int64_t begin, int64_t end) const {
    const int32_t* const first = std::lower_bound(listed, listed + n_listed, static_cast<int32_t>(begin));
    return {first, std::lower_bound(first, listed + n_listed, static_cast<int32_t>(end))};
  }
};

// Finds a token's neurons of one block, [begin, end) of the shard; z: act(gate) of those that are looked at, named by
// `looked`, or all of the block. Returns how many are active; their values may be zero.
int64_t CpuDevice::find_few(const FfnShard& s, float threshold, Act in, int64_t begin, std::span<const int32_t> looked,
                            int64_t n, float* z, int32_t* ids, float* values, float* up) const {
  const auto id = [&](int64_t i) {
    return looked.data() != nullptr ? looked[static_cast<size_t>(i)] : static_cast<int32_t>(begin + i);
  };
  if (s.gate_bias) {
    for (int64_t i = 0; i < n; ++i) z[i] += s.gate_bias.data[id(i)];
  }
  k_.activate(static_cast<int>(s.act), s.act_threshold, z, nullptr, false, n, z);
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(std::fabs(z[i]) > threshold)) continue;
    ids[found] = id(i);
    values[found++] = z[i];
  }
  if (!s.up || found == 0) return found;
  k_.dot_rows[index(s.up.type)]({s.up.data, s.up.row_size(), ids, found}, nullptr, s.up.cols,
                                is_quantized(s.up.type) ? in.q8 : in.x, 0, 1, up, 0);
  for (int64_t i = 0; i < found; ++i) {
    values[i] *= up_factor(s, up[i] + (s.up_bias ? s.up_bias.data[ids[i]] : 0.0f));
  }
  return found;
}

void CpuDevice::sparse_few(const FfnShard& s, const SparseArgs& sparse, Act in, int64_t T, Vector y_bias, float* y) {
  HEARTH_CHECK(T <= kFewTokens, "{} tokens are not few", T);
  static_assert(kFewRows % kPanelRows == 0);
  const int64_t n = s.n(), n_embd = s.down_t.cols, n_blocks_of_rows = (n + kFewRows - 1) / kFewRows;
  const auto* lists = std::get_if<NeuronLists>(&sparse.candidates);
  HEARTH_CHECK(lists == nullptr || s.gate.layout == Layout::rows, "rows of a list are not in panels");
  std::array<TokenNeurons, kFewTokens> tokens;
  auto* const ids = reinterpret_cast<int32_t*>(scratch(ids_, T * (n + n_blocks_of_rows)));
  float* const values = scratch(values_, T * n);
  for (int64_t t = 0; t < T; ++t) {
    TokenNeurons& token = tokens[static_cast<size_t>(t)];
    token.ids = ids + t * n, token.values = values + t * n;
    if (lists == nullptr) continue;
    token.listed = lists->ids + t * lists->stride, token.n_listed = lists->count[t];
    HEARTH_CHECK(token.n_listed >= 0 && token.n_listed <= n, "{} neurons are listed of {}", token.n_listed, n);
  }
  int32_t* const counts = ids + T * n;  // [blocks][T]
  const bool gate_q8 = is_quantized(s.gate.type);
  const auto find = [&](int64_t block, int64_t, int thread) {
    const int64_t begin = block * kFewRows, end = std::min(n, begin + kFewRows), rows = end - begin;
    float* const z = thread_scratch(thread);  // [T][kFewRows], then [kFewRows] for up
    float* const up = z + kFewTokens * kFewRows;
    if (lists == nullptr) consecutive_gates(s, in, T, begin, rows, z, kFewRows);
    for (int64_t t = 0; t < T; ++t) {
      TokenNeurons& token = tokens[static_cast<size_t>(t)];
      const Act x = row_of(in, t, s.gate.cols);
      std::span<const int32_t> looked;
      if (lists != nullptr) {
        looked = token.listed_in(begin, end);
        k_.dot_rows[index(s.gate.type)]({s.gate.data, s.gate.row_size(), looked.data(), std::ssize(looked)}, nullptr,
                                        s.gate.cols, gate_q8 ? x.q8 : static_cast<const void*>(x.x), 0, 1,
                                        z + t * kFewRows, 0);
      }
      counts[block * T + t] = static_cast<int32_t>(
          find_few(s, sparse.threshold, x, begin, looked, lists != nullptr ? std::ssize(looked) : rows,
                   z + t * kFewRows, token.ids + begin, token.values + begin, up));
    }
  };
  team_.for_chunks(n_blocks_of_rows, 1, find);
  // Each token's finds one behind the other, without those whose value is zero because up is (dReLU).
  team_.for_chunks(T, 1, [&](int64_t t, int64_t, int) {
    TokenNeurons& token = tokens[static_cast<size_t>(t)];
    for (int64_t block = 0; block < n_blocks_of_rows; ++block) {
      const int64_t begin = block * kFewRows, found = counts[block * T + t];
      token.n_active += found;
      for (int64_t i = begin; i < begin + found; ++i) {
        token.ids[token.n] = token.ids[i], token.values[token.n] = token.values[i];
        token.n += token.values[i] != 0.0f ? 1 : 0;
      }
    }
    if (sparse.n_active != nullptr) sparse.n_active[t] = static_cast<int32_t>(token.n_active);
  });
  add_down_few(s, std::span(tokens).first(static_cast<size_t>(T)), y_bias, y);
  if (sparse.answer != nullptr) sparse.answer->publish(0, T * n_embd);
}

// y[t] += y_bias + sum of values[i] * down_t[ids[i]], in as many partial sums as one token alone has.
void CpuDevice::add_down_few(const FfnShard& s, std::span<const TokenNeurons> tokens, Vector y_bias, float* y) {
  const Matrix& w = s.down_t;
  const int64_t n_embd = w.cols, threads = team_.size();
  float* const sums = scratch(lanes_, std::ssize(tokens) * kSparseLanes * n_embd);
  const int64_t columns = columns_of_part(w.type, n_embd, threads);
  team_.for_chunks(n_embd, columns, [&](int64_t begin, int64_t end, int) {
    const size_t bytes = static_cast<size_t>(end - begin) * sizeof(float);
    std::array<int64_t, kFewTokens> done{};
    const auto sum_of = [&](size_t t, int64_t lane) {
      return sums + (static_cast<int64_t>(t) * kSparseLanes + lane) * n_embd + begin;
    };
    for (size_t t = 0; t < tokens.size(); ++t) {
      if (y_bias) k_.add(y_bias.data + begin, end - begin, y + static_cast<int64_t>(t) * n_embd + begin);
      for (int64_t lane = 0; sparse_lanes(tokens[t].n) > 1 && lane < kSparseLanes; ++lane)
        std::memset(sum_of(t, lane), 0, bytes);
    }
    for (int64_t block_end = kFewRows; block_end < s.n() + kFewRows; block_end += kFewRows) {
      for (size_t t = 0; t < tokens.size(); ++t) {
        const TokenNeurons& token = tokens[t];
        int64_t& i = done[t];
        int64_t last = i;
        while (last < token.n && token.ids[last] < block_end) ++last;
        const int64_t n_lanes = sparse_lanes(token.n);
        while (i < last) {  // a block may end one partial sum and begin the next
          const int64_t lane = n_lanes == 1 ? 0 : (i < token.n / n_lanes ? 0 : 1);
          const int64_t lane_end = std::min(last, (lane + 1) * token.n / n_lanes);
          float* const sum = n_lanes == 1 ? y + static_cast<int64_t>(t) * n_embd + begin : sum_of(t, lane);
          const RowsView rows{w.row(0) + row_bytes(w.type, begin), w.row_size(), token.ids + i, lane_end - i};
          k_.axpy_rows[index(w.type)](rows, nullptr, end - begin, token.values + i, sum);
          i = lane_end;
        }
      }
    }
    for (size_t t = 0; t < tokens.size(); ++t) {
      for (int64_t lane = 0; sparse_lanes(tokens[t].n) > 1 && lane < kSparseLanes; ++lane)
        k_.add(sum_of(t, lane), end - begin, y + static_cast<int64_t>(t) * n_embd + begin);
    }
  });
}

}  // namespace hearth::cpu
