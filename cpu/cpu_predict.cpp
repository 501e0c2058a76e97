// Predictors: scores of a layer's neurons, and the lists of those above their thresholds, in one dispatch of the team.
#include <algorithm>
#include <cstring>

#include "cpu/cpu_device.h"
#include "cpu/tiling.h"

namespace hearth::cpu {

// The layer between the two products; without one, the input itself.
Act CpuDevice::predictor_hidden(const Predictor& p, Act in) const {
  if (!p.fc1) return in;
  const int64_t rank = p.fc1.rows;
  const bool quantized = is_quantized(p.fc2.type);
  HEARTH_CHECK(p.fc2.cols == rank, "fc2 has {} columns, fc1 {} rows", p.fc2.cols, rank);
  HEARTH_CHECK(!quantized || values_q8_.bytes() >= q8_bytes(rank), "reserve() was told of fewer than {} neurons", rank);
  return {scratch(lanes_, rank), quantized ? values_q8_.as<void>() : nullptr};
}

// Scores the neurons [begin, end), and lists those above their thresholds at ids[begin]; returns how many.
int32_t CpuDevice::predict_piece(const Predictor& p, Act hidden, int64_t begin, int64_t end, int32_t* ids,
                                 float* score) const {
  const void* x = is_quantized(p.fc2.type) ? hidden.q8 : hidden.x;
  const RowsView rows{p.fc2.row(begin), p.fc2.row_size(), nullptr, end - begin};
  k_.dot_rows[index(p.fc2.type)](rows, nullptr, p.fc2.cols, x, 0, 1, score + begin, 0);
  int32_t found = 0;
  for (int64_t k = begin; k < end; ++k) {
    ids[begin + found] = static_cast<int32_t>(k);  // written before it is decided: found <= k - begin
    found += score[k] > p.threshold.data[k] ? 1 : 0;
  }
  return found;
}

// Several tokens one after the other: the second one finds the rows in the last-level cache.
void CpuDevice::predict(const Predictor& p, const Input& input, int64_t T, const PredictArgs& args) {
  const Act in = rows_of(input, T);
  const int64_t n = (p.fc1 ? p.fc1 : p.fc2).cols;
  for (int64_t t = 0; t < T; ++t) {
    auto* const q8 = static_cast<std::byte*>(in.q8);
    predict_token(p, {in.x + t * n, q8 != nullptr ? q8 + static_cast<size_t>(t) * q8_bytes(n) : nullptr}, t, T, args);
  }
}

void CpuDevice::predict_token(const Predictor& p, Act in, int64_t t, int64_t T, const PredictArgs& args) {
  const int64_t n = p.n();
  const Act hidden = predictor_hidden(p, in);
  HEARTH_CHECK(!is_quantized(p.fc2.type) || hidden.q8 != nullptr,
               "quantised weights need the 8-bit form of their input");
  HEARTH_CHECK(!p.fc1 || !is_quantized(p.fc1.type) || in.q8 != nullptr,
               "quantised weights need the 8-bit form of their input");
  const int64_t grain = rows_per_piece(p.fc2, 1);
  auto* ids = reinterpret_cast<int32_t*>(scratch(ids_, 2 * n));
  int32_t* counts = ids + n;
  float* score = scratch(values_, n);
  const auto first_layer = [&](int64_t begin, int64_t end, int) {
    const RowsView rows{p.fc1.row(begin), p.fc1.row_size(), nullptr, end - begin};
    k_.dot_rows[index(p.fc1.type)](rows, nullptr, p.fc1.cols, is_quantized(p.fc1.type) ? in.q8 : in.x, 0, 1,
                                   hidden.x + begin, 0);
  };
  const auto between = [&](size_t) {
    const int64_t rank = p.fc1.rows;
    if (p.fc1_bias) k_.add(p.fc1_bias.data, rank, hidden.x);
    if (p.relu) k_.activate(static_cast<int>(Activation::relu), 0.0f, hidden.x, nullptr, false, rank, hidden.x);
    if (hidden.q8 != nullptr) k_.quantize(hidden.x, rank, hidden.q8);
  };
  const auto second_layer = [&](int64_t begin, int64_t end, int) {
    counts[begin / grain] = predict_piece(p, hidden, begin, end, ids, score);
  };
  const ThreadTeam::Round rounds[] = {{p.fc1.rows, p.fc1 ? rows_per_piece(p.fc1, 1) : 1, first_layer},
                                      {n, grain, second_layer}};
  team_.for_rounds(std::span(rounds).subspan(p.fc1 ? 0 : 1), between);
  int64_t total = 0;  // the pieces' lists, moved together
  for (int64_t begin = 0; begin < n; begin += grain) {
    const int32_t count = counts[begin / grain];
    std::memmove(ids + total, ids + begin, static_cast<size_t>(count) * sizeof(int32_t));
    total += count;
  }
  hand_out(args, n, t, T, {ids, static_cast<size_t>(total)});
}

}  // namespace hearth::cpu
