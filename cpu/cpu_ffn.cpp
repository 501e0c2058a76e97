// The dense feed-forward network, for any number of tokens.
#include <algorithm>
#include <cstring>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {
namespace {

// Neurons are summed in `n_lanes` partial sums of consecutive neurons; lane i has [begin(i), begin(i + 1)).
struct Lanes {
  int64_t n_neurons, n_lanes;
  explicit Lanes(int64_t n) : n_neurons(n), n_lanes(std::clamp<int64_t>(n / kLaneNeurons, n > 0 ? 1 : 0, kLanes)) {}
  int64_t begin(int64_t lane) const { return lane * n_neurons / n_lanes; }
};

}  // namespace

void CpuDevice::ffn_values(const FfnShard& s, const Operand& in) {
  const int64_t n = s.n(), T = in.T;
  float* values = scratch(values_, T * n);
  const int64_t fewest = std::min(rows_per_piece(s.gate, T), s.up ? rows_per_piece(s.up, T) : kMaxDotRows);
  const bool panels = s.gate.layout == Layout::panels || (s.up && s.up.layout == Layout::panels);
  const int64_t grain = panels ? std::max(fewest / kPanelRows, int64_t{1}) * kPanelRows : fewest;
  team_.for_chunks(n, grain, [&](int64_t begin, int64_t end, int thread) {
    const int64_t rows = end - begin;
    float* up = s.up ? thread_scratch(thread) + thread_floats_ - T * rows : nullptr;
    product(s.gate, begin, rows, in, values + begin, n, false, thread);
    if (s.up) product(s.up, begin, rows, in, up, rows, false, thread);
    for (int64_t t = 0; t < T; ++t) {
      float* value = values + t * n + begin;
      float* u = s.up ? up + t * rows : nullptr;
      if (s.gate_bias) k_.add(s.gate_bias.data + begin, rows, value);
      if (s.up && s.up_bias) k_.add(s.up_bias.data + begin, rows, u);
      k_.activate(static_cast<int>(s.act), s.act_threshold, value, u, s.up_relu, rows, value);
    }
  });
}

void CpuDevice::sum_lanes(int64_t n_lanes, int64_t n, float* y) {
  const float* lanes = lanes_.as<float>();
  team_.for_chunks(n, 1024, [&](int64_t begin, int64_t end, int) {
    for (int64_t lane = 0; lane < n_lanes; ++lane) k_.add(lanes + lane * n + begin, end - begin, y + begin);
  });
}

void CpuDevice::ffn_down_few(const FfnShard& s, int64_t T, float* y) {
  const int64_t n = s.n(), n_embd = s.down_t.cols;
  const Lanes lanes(n);
  float* sums = scratch(lanes_, lanes.n_lanes * T * n_embd);
  const float* values = values_.as<float>();
  team_.for_chunks(lanes.n_lanes, 1, [&](int64_t lane, int64_t, int) {
    float* sum = sums + lane * T * n_embd;
    std::memset(sum, 0, static_cast<size_t>(T * n_embd) * sizeof(float));
    const int64_t begin = lanes.begin(lane), end = lanes.begin(lane + 1);
    const RowsView rows{s.down_t.row(begin), s.down_t.row_size(), nullptr, end - begin};
    if (T == 1) {
      k_.axpy_rows[index(s.down_t.type)](rows, nullptr, n_embd, values + begin, sum);
    } else {
      k_.axpy_tokens[index(s.down_t.type)](rows, n_embd, values + begin, n, T, sum, n_embd);
    }
  });
  sum_lanes(lanes.n_lanes, T * n_embd, y);
}

void CpuDevice::ffn_down_batch(const FfnShard& s, int64_t T, float* y) {
  const int64_t n = s.n(), n_embd = s.down_t.cols, mr = k_.mr, nr = k_.nr;
  const float* packed = pack_input(values_.as<float>(), T, n);
  team_.for_chunks(n_embd, kStripColumns, [&](int64_t begin, int64_t end, int thread) {
    float* panels = thread_scratch(thread);
    for (int64_t k = 0; k < n; k += kPanelK) {
      const int64_t kc = std::min(kPanelK, n - k);
      k_.pack_cols[index(s.down_t.type)](s.down_t.data, s.down_t.row_size(), k, kc, begin, end - begin, panels);
      for (int64_t c = begin; c < end; c += nr) {
        for (int64_t t = 0; t < T; t += mr) {
          k_.gemm_tile(kc, packed + t * n + k * mr, panels + (c - begin) * kc, y + t * n_embd + c, n_embd,
                       static_cast<int>(std::min(mr, T - t)), static_cast<int>(std::min(nr, end - c)), true);
        }
      }
    }
  });
}

void CpuDevice::ffn_dense(const FfnShard& s, const Input& in, int64_t T, Vector y_bias, float* y, const NextNorm*) {
  HEARTH_CHECK(static_cast<bool>(s.down) != static_cast<bool>(s.down_t), "exactly one of down and down_t");
  if (T == 0) return;
  Operand input{rows_of(in, T), T, nullptr};
  prepare(input, s.gate);
  if (s.up) prepare(input, s.up);
  ffn_values(s, input);
  add_bias(y_bias, T, y);
  if (s.down_t) return T <= kFewTokens ? ffn_down_few(s, T, y) : ffn_down_batch(s, T, y);
  Act hidden{values_.as<float>(), nullptr};
  if (is_quantized(s.down.type)) {
    HEARTH_CHECK(values_q8_.bytes() >= static_cast<size_t>(T) * q8_bytes(s.n()),
                 "reserve() was not told of quantised weights");
    hidden.q8 = values_q8_.as<void>();
    quantize_rows(hidden, T, s.n());
  }
  const MatmulPart down{.w = s.down, .y = y, .accumulate = true};
  matmul({&down, 1}, hidden, T);
}

}  // namespace hearth::cpu
