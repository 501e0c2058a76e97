// The feed-forward network: dense for any number of tokens, and gate-first sparse for one.
#include <algorithm>
#include <cmath>
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

void CpuDevice::ffn_values(const FfnShard& s, const Input& in) {
  const int64_t n = s.n(), T = in.T;
  float* values = scratch(values_, T * n);
  const int64_t grain = std::min(rows_per_piece(s.gate, T), s.up ? rows_per_piece(s.up, T) : kMaxDotRows);
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

void CpuDevice::sum_lanes(int64_t n_lanes, int64_t n_embd, float* y) {
  const float* lanes = lanes_.as<float>();
  team_.for_chunks(n_embd, 1024, [&](int64_t begin, int64_t end, int) {
    for (int64_t lane = 0; lane < n_lanes; ++lane) k_.add(lanes + lane * n_embd + begin, end - begin, y + begin);
  });
}

void CpuDevice::ffn_down_one(const FfnShard& s, float* y) {
  const int64_t n_embd = s.down_t.cols;
  const Lanes lanes(s.n());
  float* sums = scratch(lanes_, lanes.n_lanes * n_embd);
  const float* values = values_.as<float>();
  team_.for_chunks(lanes.n_lanes, 1, [&](int64_t lane, int64_t, int) {
    float* sum = sums + lane * n_embd;
    std::memset(sum, 0, static_cast<size_t>(n_embd) * sizeof(float));
    const int64_t begin = lanes.begin(lane), end = lanes.begin(lane + 1);
    const RowsView rows{s.down_t.row(begin), s.down_t.row_size(), nullptr, end - begin};
    k_.axpy_rows[index(s.down_t.type)](rows, nullptr, n_embd, values + begin, sum);
  });
  sum_lanes(lanes.n_lanes, n_embd, y);
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

void CpuDevice::ffn_dense(const FfnShard& s, Act in, int64_t T, Vector y_bias, float* y) {
  HEARTH_CHECK(static_cast<bool>(s.down) != static_cast<bool>(s.down_t), "exactly one of down and down_t");
  if (T == 0) return;
  Input input{in, T, nullptr};
  prepare(input, s.gate.cols, s.gate.type);
  if (s.up) prepare(input, s.up.cols, s.up.type);
  ffn_values(s, input);
  add_bias(y_bias, T, y);
  if (s.down_t) return T == 1 ? ffn_down_one(s, y) : ffn_down_batch(s, T, y);
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

// Returns how many neurons are active. Their ids, ascending (from 0 at neuron `from`), are then in ids_ and their
// activations in values_.
int32_t CpuDevice::ffn_select(const FfnShard& s, const SparseArgs& sparse, int64_t from, int64_t to, Act in) {
  const int64_t n = sparse.predicted != nullptr ? *sparse.n_predicted : to - from;
  HEARTH_CHECK(n >= 0 && n <= s.n(), "{} predicted neurons of {}", n, s.n());
  if (sparse.gate_values != nullptr) {
    std::copy_n(sparse.predicted, n, reinterpret_cast<int32_t*>(scratch(ids_, n)));
    std::copy_n(sparse.gate_values, n, scratch(values_, n));
    return static_cast<int32_t>(n);
  }
  const bool quantized = is_quantized(s.gate.type);
  HEARTH_CHECK(!quantized || in.q8 != nullptr, "quantised weights need the 8-bit form of their input");
  const void* x = quantized ? in.q8 : in.x;
  float* z = scratch(values_, n);
  const int64_t n_pieces = (n + kSelectRows - 1) / kSelectRows;
  auto* ids = reinterpret_cast<int32_t*>(scratch(ids_, s.n() + n_pieces));
  int32_t* counts = ids + s.n();
  // Each piece compacts its own neurons in place; the pieces are then moved together in order.
  team_.for_chunks(n, kSelectRows, [&](int64_t begin, int64_t end, int) {
    const int32_t* listed = sparse.predicted != nullptr ? sparse.predicted + begin : nullptr;
    const RowsView rows{listed != nullptr ? s.gate.data : s.gate.row(from + begin), s.gate.row_size(), listed,
                        end - begin};
    k_.dot_rows[index(s.gate.type)](rows, nullptr, s.gate.cols, x, 0, 1, z + begin, 0);
    const auto id = [&](int64_t i) { return listed != nullptr ? listed[i - begin] : static_cast<int32_t>(i); };
    if (s.gate_bias) {
      for (int64_t i = begin; i < end; ++i) z[i] += s.gate_bias.data[from + id(i)];
    }
    k_.activate(static_cast<int>(s.act), s.act_threshold, z + begin, nullptr, false, end - begin, z + begin);
    int64_t out = begin;
    for (int64_t i = begin; i < end; ++i) {
      if (!(std::fabs(z[i]) > sparse.threshold)) continue;
      ids[out] = id(i);
      z[out++] = z[i];
    }
    counts[begin / kSelectRows] = static_cast<int32_t>(out - begin);
  });
  int64_t n_active = 0;
  for (int64_t piece = 0; piece < n_pieces; ++piece) {
    const auto count = static_cast<size_t>(counts[piece]);
    std::memmove(ids + n_active, ids + piece * kSelectRows, count * sizeof(int32_t));
    std::memmove(z + n_active, z + piece * kSelectRows, count * sizeof(float));
    n_active += counts[piece];
  }
  return static_cast<int32_t>(n_active);
}

// The active neurons [begin, end): reads their up and down rows, adds values * down_t to sum [n_embd].
void CpuDevice::ffn_active(const FfnShard& s, Act in, int64_t begin, int64_t end, float* sum) const {
  constexpr int64_t kBatch = 32;
  const int32_t* ids = ids_.as<int32_t>();
  const float* gates = values_.as<float>();
  const int64_t n_embd = s.down_t.cols;
  const auto rows_of = [](const Matrix& w, const int32_t* rows, int64_t n) {
    return RowsView{w.data, w.row_size(), rows, n};
  };
  for (int64_t first = begin; first < end; first += kBatch) {
    const int64_t n = std::min(kBatch, end - first);
    if (!s.up) {
      const RowsView down = rows_of(s.down_t, ids + first, n),
                     next = rows_of(s.down_t, ids + first + n, end - first - n);
      k_.axpy_rows[index(s.down_t.type)](down, &next, n_embd, gates + first, sum);
      continue;
    }
    // The products with up bring in the rows of down, and those the next rows of up.
    float values[kBatch];
    int32_t kept_ids[kBatch];
    const RowsView down = rows_of(s.down_t, ids + first, n);
    const void* x = is_quantized(s.up.type) ? in.q8 : in.x;
    k_.dot_rows[index(s.up.type)](rows_of(s.up, ids + first, n), &down, s.up.cols, x, 0, 1, values, 0);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t id = ids[first + i];
      const float u = values[i] + (s.up_bias ? s.up_bias.data[id] : 0.0f);
      if (s.up_relu && !(u > 0.0f)) continue;  // dReLU: such a neuron's down row is not read either
      kept_ids[kept] = id;
      values[kept++] = gates[first + i] * u;
    }
    const RowsView next = rows_of(s.up, ids + first + n, end - first - n);
    k_.axpy_rows[index(s.down_t.type)](rows_of(s.down_t, kept_ids, kept), &next, n_embd, values, sum);
  }
}

void CpuDevice::ffn_sparse(const FfnShard& s, const SparseArgs& sparse, Act in, Vector y_bias, float* y) {
  HEARTH_CHECK(s.down_t && !s.down, "the sparse FFN needs down_t");
  HEARTH_CHECK(in.q8 != nullptr || !(s.up && is_quantized(s.up.type)),
               "quantised weights need the 8-bit form of their input");
  const int64_t n_embd = s.down_t.cols;
  if (s.n() > s.n_whole()) post_gates(s, sparse, in);
  const int32_t n_active = ffn_select(s, sparse, 0, s.n_whole(), in);
  if (sparse.active_ids != nullptr) std::copy_n(ids_.as<int32_t>(), n_active, sparse.active_ids);
  if (sparse.n_active != nullptr) *sparse.n_active = n_active;
  add_bias(y_bias, 1, y);
  const Lanes lanes(n_active);
  float* sums = scratch(lanes_, lanes.n_lanes * n_embd);
  team_.for_chunks(lanes.n_lanes, 1, [&](int64_t lane, int64_t, int) {
    float* sum = sums + lane * n_embd;
    std::memset(sum, 0, static_cast<size_t>(n_embd) * sizeof(float));
    ffn_active(s, in, lanes.begin(lane), lanes.begin(lane + 1), sum);
  });
  sum_lanes(lanes.n_lanes, n_embd, y);
  if (sparse.collect != nullptr) host(*sparse.collect).collect(y, n_embd);
}

// Hands over the active ones of the gate rows whose neurons the CPU has. (A CPU device in a GPU's place.)
void CpuDevice::post_gates(const FfnShard& s, const SparseArgs& sparse, Act in) {
  HEARTH_CHECK(sparse.hand_off.mailbox != nullptr && sparse.predicted == nullptr);
  const auto n = static_cast<size_t>(ffn_select(s, sparse, s.n_whole(), s.n(), in));
  host(*sparse.hand_off.mailbox)
      .post(sparse.hand_off.x, sparse.hand_off.n, {ids_.as<int32_t>(), n}, values_.as<float>());
}

}  // namespace hearth::cpu
